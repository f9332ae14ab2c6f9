"""What is begun before it is known to be needed, because an index lets one wait.

What a guess is right about is at hand when it is asked for; a wrong guess costs its work and decides nothing.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.catalog.models import Phase
from envbuild.core import tomlread
from envbuild.core.background import Background, beside
from envbuild.core.files import machine_errors
from envbuild.core.progress import SilentReporter
from envbuild.lock.components.models import CompileMetadata
from envbuild.lock.context import LockContext
from envbuild.lock.lockfile import PROJECT_FILE, LockDirectory
from envbuild.lock.project.pyproject import Project, main_lines, render_project
from envbuild.lock.uv.program import uv_meanwhile
from envbuild.lock.uv.resolution import Resolution, lock_arguments, resolve
from envbuild.lock.uv.torch_builds import TorchSource

RESOLVED = "uv.lock"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A resolution under way.

    Attributes:
        text: the project that is resolved.
        folder: where.
    """

    text: str
    folder: Path
    answer: Background[Resolution]

    def into(self, folder: Path) -> Resolution:
        """Wait for it, and put its uv.lock into another folder.

        Raises:
            EnvbuildError: what resolving raised.
        """
        resolution = self.answer.result()
        with machine_errors(folder):
            (folder / RESOLVED).write_bytes((self.folder / RESOLVED).read_bytes())
        return resolution


def begin(
    project: Project,
    keep: Mapping[str, str],
    torch: TorchSource,
    like: LockDirectory | None,
    what: str,
    work: LockContext,
) -> Begun | None:
    """Begin to resolve a project whose compile phase is not read yet, as if it declared what it did in another lock.

    Most of the time it does: an sdist does not change. None where there is nothing to guess, or nothing to guess from.
    """
    guessed = _guess(project, like) if like is not None else None
    if guessed is None:
        return None
    text = render_project(guessed, pins=keep, source=torch)
    folder = _folder_with(text, work)
    answer = beside(
        lambda: resolve(folder, torch, what, work.log, SilentReporter().update, settings_may_be_ignored=True)
    )
    work.ending.callback(answer.stop)
    return Begun(text=text, folder=folder, answer=answer)


def _guess(project: Project, like: LockDirectory) -> Project | None:
    if not _is_unread(project):
        return None
    with machine_errors(like.path):
        document = tomlread.loads((like.path / PROJECT_FILE).read_text())
    known = main_lines(project)
    return replace(
        project,
        build_requires=tuple(line for line in document["project"]["dependencies"] if line not in known),
        metadata=tuple(
            CompileMetadata(
                name=table["name"],
                version=table["version"],
                sdist_digest="",
                requires_dist=tuple(table["requires-dist"]),
                provides_extra=tuple(table.get("provides-extra", ())),
                build_requires=(),
                rewritten=(),
            )
            for table in document["tool"]["uv"].get("dependency-metadata", ())
        ),
    )


def kept_files(
    names: Sequence[str], keep: Mapping[str, str], previous: LockDirectory | None
) -> dict[str, Mapping[str, Any]] | None:
    """The releases that are kept, as the uv.lock beside their lock has them; None where it does not have them all.

    That file is nobody's record: only what has a hash that the lock itself states is taken.
    """
    path = previous.path / RESOLVED if previous is not None else None
    if previous is None or path is None or not path.is_file():
        return None
    with machine_errors(path):
        try:
            tables = {package["name"]: package for package in tomlread.loads(path.read_text())["package"]}
        except (ValueError, KeyError, TypeError):
            return None
        phases = [file.read_text() for phase in previous.lock.phases if (file := previous.file(phase)) is not None]
    stated = set(_HASH.findall("\n".join(phases)))
    found: dict[str, Mapping[str, Any]] = {
        name: tables.get(name, {}) for name in dict.fromkeys(map(canonicalize_name, names))
    }
    for name, package in found.items():
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        if package.get("version") != keep.get(name) or not files:
            return None
        if not all("url" in file and file.get("hash") in stated for file in files):
            return None
    return found


@contextlib.contextmanager
def filling_uvs_cache(
    project: Project, keep: Mapping[str, str], torch: TorchSource, work: LockContext
) -> Iterator[None]:
    """Have uv resolve phase main for as long as the block reads sdists: it will ask the index for the same again."""
    if not _is_unread(project):
        yield
        return
    main = {name: item for name, item in project.chosen.items() if item.phase is Phase.MAIN}
    folder = _folder_with(render_project(replace(project, chosen=main), pins=keep, source=torch), work)
    with uv_meanwhile(lock_arguments(torch), what="fill uv's cache", cwd=folder):
        yield


def _is_unread(project: Project) -> bool:
    """Whether sdists are to be read, and no repository is to be cloned, of which half a clone is no use."""
    items = project.chosen.values()
    return any(item.phase is Phase.COMPILE for item in items) and not any(item.commit for item in items)


def _folder_with(text: str, work: LockContext) -> Path:
    with machine_errors(work.folder):
        folder = Path(tempfile.mkdtemp(dir=work.folder, prefix="throw-away."))
        (folder / PROJECT_FILE).write_text(text)
    return folder
