"""A uv.lock as frozen types: the one place that reads the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envbuild.core import tomlread
from envbuild.core.validation import describe_errors


class _Table(BaseModel):
    # uv adds keys from version to version.
    model_config = ConfigDict(frozen=True, alias_generator=lambda name: name.replace("_", "-"), populate_by_name=True)


class LockedFile(_Table):
    """A wheel or sdist: it has an address, a path, or only a name where the whole source is the file.

    Attributes:
        digest: with the name of its algorithm; empty where the index states none.
        size: bytes.
    """

    url: str = ""
    path: str = ""
    filename: str = ""
    digest: str = Field(default="", alias="hash")
    size: int | None = None
    upload_time: datetime | None = None

    @property
    def name(self) -> str:
        """The file's own name."""
        # In an address the + of a local version (2.13.0+cpu) is %2B.
        return (self.filename or self.path or self.url).rsplit("/", 1)[-1].replace("%2B", "+")

    @property
    def sha256(self) -> str:
        """``sha256:<hex>``; empty where the index states none."""
        return self.digest if self.digest.startswith("sha256:") else ""


class Dependency(_Table):
    """What a package needs.

    Attributes:
        version: stated only where a package is there more than once.
        extra: the extras of it that are asked for.
    """

    name: str
    version: str = ""
    extra: tuple[str, ...] = ()


class ResolvedPackage(_Table):
    """A ``[[package]]``.

    Attributes:
        version: empty for a source tree that computes it.
        source: address or path by kind: registry, git, url, path, directory, editable, virtual.
        resolution_markers: where it is meant, of a package that is there more than once.
    """

    name: str
    version: str = ""
    source: Mapping[str, str]
    dependencies: tuple[Dependency, ...] = ()
    optional_dependencies: Mapping[str, tuple[Dependency, ...]] = Field(default_factory=dict)
    resolution_markers: tuple[str, ...] = ()
    wheels: tuple[LockedFile, ...] = ()
    sdist: LockedFile | None = None

    @property
    def title(self) -> str:
        """Name and version, for people."""
        return f"{self.name} {self.version}".strip()

    @property
    def files(self) -> tuple[LockedFile, ...]:
        """Its wheels, then its sdist."""
        return (*self.wheels, *([self.sdist] if self.sdist is not None else []))

    @property
    def upload_seconds(self) -> list[int]:
        """When its files were uploaded, as far as the index says: seconds since 1970."""
        return [int(file.upload_time.timestamp()) for file in self.files if file.upload_time is not None]

    @property
    def needs(self) -> Iterator[Dependency]:
        """What it needs by itself, and for the extras that something asks for."""
        for dependencies in (self.dependencies, *self.optional_dependencies.values()):
            yield from dependencies


Packages: TypeAlias = Mapping[str, ResolvedPackage]


class Override(_Table):
    """An override of the project; one for the declarations of a single package has no name of its own."""

    name: str = ""
    specifier: str = ""
    marker: str = ""


class _Manifest(_Table):
    overrides: tuple[Override, ...] = ()


class _Options(_Table):
    exclude_newer: str = ""


class UvLock(_Table):
    """A whole uv.lock; its packages are those of the project and the project itself.

    Attributes:
        supported_markers: the platforms that it is for; empty: all.
    """

    requires_python: str = ""
    supported_markers: tuple[str, ...] = ()
    packages: tuple[ResolvedPackage, ...] = Field(alias="package")
    manifest: _Manifest = _Manifest()
    options: _Options = _Options()

    @property
    def locked(self) -> tuple[ResolvedPackage, ...]:
        """The packages without the project itself."""
        # uv calls the source of a project with `package = false` virtual.
        return tuple(package for package in self.packages if "virtual" not in package.source)


def parse_uv_lock(text: str) -> UvLock:
    """The content of a uv.lock.

    Raises:
        ValueError: it is not TOML, or a key is missing or of another type; says which.
    """
    try:
        return UvLock.model_validate(tomlread.loads(text))
    except ValidationError as error:
        raise ValueError(describe_errors(error)) from error
