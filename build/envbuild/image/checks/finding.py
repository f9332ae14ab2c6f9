"""What checks say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ImageFinding:
    """Something that an image must not have.

    Attributes:
        code: of the check.
        of_base: it is in a layer of a base that somebody else made: told, and not refused.
    """

    code: str
    text: str
    of_base: bool = False
