"""What the package indexes have, asked through uv: versions, files and dates of releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import tomlkit

from envbuild.catalog.base import Base
from envbuild.core.errors import ResolutionError
from envbuild.core.tomlread import Toml
from envbuild.lock.context import LockContext
from envbuild.lock.uv.interpreter import for_any_python
from envbuild.lock.uv.named_index import OwnIndexes
from envbuild.lock.uv.preferences import prefer
from envbuild.lock.uv.resolution import limits, resolve, resolve_without_interpreter, throw_away
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX
from envbuild.lock.uv_lock import Packages, ResolvedPackage

# Releases that will not do are passed over one by one: so many. Transformer Engine 1.9 to 1.11 need flash-attn 2.4.2,
# which cannot be built, and 1.12 is what NeMo of 2025-03-01 locks with.
MOST_PASSED_OVER = 8


@dataclass(frozen=True, kw_only=True)
class PackageIndex:
    """The indexes of a site, for a base. A question that was asked in the same run is answered from memory.

    Attributes:
        own: which packages are of an index of their own.
        settings: other keys of ``[tool.uv]``, such as those that hold releases to a moment.
    """

    base: Base
    context: LockContext
    own: OwnIndexes = field(default_factory=OwnIndexes)
    settings: Mapping[str, Toml] = field(default_factory=dict)

    def with_settings(self, **more: Toml) -> PackageIndex:
        """The same with these keys, ``_`` for ``-``."""
        changed = {key.replace("_", "-"): value for key, value in more.items()}
        return replace(self, settings={**self.settings, **changed})

    def lowest(self) -> PackageIndex:
        """The same, answering with the lowest releases instead of the newest."""
        return self.with_settings(resolution="lowest")

    def find(self, packages: Mapping[str, str], what: str, *, preferred: Mapping[str, str] | None = None) -> Packages:
        """Packages as if they needed nothing, by name.

        Args:
            packages: specifiers by name.
            what: what is asked, for messages.
            preferred: versions that are taken where the specifiers accept them.

        Raises:
            ResolutionError: there is no such release of one of them.
        """
        # Metadata in the project keeps uv from reading, or building, the package's own.
        metadata = tomlkit.aot()
        for name in packages:
            table = tomlkit.table()
            table["name"], table["requires-dist"] = name, []
            metadata.append(table)
        project = self.with_settings(dependency_metadata=metadata)._question(packages)
        question = f"{project}{sorted((preferred or {}).items())}"
        if question not in self.context.answers:
            folder = throw_away(for_any_python(project), self.context)
            prefer(folder, preferred or {})
            try:
                # Nothing is built: any Python does.
                resolution = resolve_without_interpreter(project, folder, PACKAGE_INDEX, what, self.context)
                self.context.answers[question] = resolution.packages
            except ResolutionError as error:
                self.context.answers[question] = error
        answer = self.context.answers[question]
        if isinstance(answer, ResolutionError):
            raise answer.with_context()
        return answer

    def release(self, name: str, specifier: str) -> ResolvedPackage | None:
        """The release that uv takes of a package by itself; None: there is none."""
        try:
            return self.find({name: specifier}, f"find {name} {specifier}").get(name)
        except ResolutionError:
            return None

    def version(self, name: str, specifier: str) -> str | None:
        """The version of :meth:`release`."""
        release = self.release(name, specifier)
        return None if release is None else release.version

    def find_with_needs(self, packages: Mapping[str, str], what: str) -> Packages:
        """:meth:`find`, with what the packages need."""
        folder = throw_away(self._question(packages), self.context)
        return resolve(folder, PACKAGE_INDEX, what, self.context).packages

    def _question(self, packages: Mapping[str, str]) -> str:
        """The pyproject.toml of a project that depends on these packages alone."""
        document = tomlkit.document()
        document["project"] = {
            "name": "envbuild-throw-away",
            "version": "0",
            "requires-python": f"=={self.base.python.version}.*",
            "dependencies": [f"{name}{specifier}" for name, specifier in packages.items()],
        }
        settings = {**limits(self.base), **self.own.settings(packages), **self.settings}
        document["tool"] = {"uv": {"package": False, **settings}}
        return tomlkit.dumps(document)
