"""Package indexes that components name, each for certain packages: by name in a lock, by address at a site."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class NamedIndex:
    """An index, and where the site has it."""

    name: str
    url: str

    @property
    def argument(self) -> str:
        """The index as uv's --index takes it: with its name, by which credentials are found."""
        return f"{self.name}={self.url}"
