"""What is begun before it is known to be needed, because an index lets one wait.

What a guess is right about is at hand when it is asked for; a wrong guess costs its work and decides nothing.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.stack import Phase
from envbuild.core import tomlread
from envbuild.core.background import Background, run_in_background
from envbuild.core.files import machine_errors
from envbuild.core.progress import SilentReporter
from envbuild.lock.components.models import CompileMetadata
from envbuild.lock.context import LockContext
from envbuild.lock.lockfile import PROJECT_FILE, LockDirectory
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import Project, main_lines, render_project
from envbuild.lock.uv.program import uv_meanwhile
from envbuild.lock.uv.resolution import Resolution, lock_arguments, resolve

RESOLVED = "uv.lock"


@dataclass(frozen=True, kw_only=True)
class Guess:
    """The resolution of a guessed project, under way.

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


def begin_guess(plan: LockPlan, context: LockContext) -> Guess | None:
    """Begin to resolve a plan whose compile phase is not read yet, as if it declared what it did in another lock.

    Most of the time it does: an sdist does not change. None where there is nothing to guess, or nothing to guess from.
    """
    like = plan.inputs.like
    guessed = _guess(plan.project, like) if like is not None else None
    if guessed is None:
        return None
    text = render_project(guessed, pins=plan.keep, source=plan.torch)
    folder = _folder_with(text, context)
    quiet = replace(context, reporter=SilentReporter())
    answer = run_in_background(lambda: resolve(folder, plan.torch, plan.what, quiet, settings_may_be_ignored=True))
    return Guess(text=text, folder=folder, answer=answer)


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


@contextlib.contextmanager
def filling_uvs_cache(plan: LockPlan, context: LockContext) -> Iterator[None]:
    """Have uv resolve phase main for as long as the block reads sdists: it will ask the index for the same again."""
    project = plan.project
    if not _is_unread(project):
        yield
        return
    main = {name: item for name, item in project.chosen.items() if item.phase is Phase.MAIN}
    folder = _folder_with(render_project(replace(project, chosen=main), pins=plan.keep, source=plan.torch), context)
    with uv_meanwhile(lock_arguments(plan.torch), what="fill uv's cache", cwd=folder):
        yield


def _is_unread(project: Project) -> bool:
    """Whether sdists are to be read, and no repository is to be cloned, of which half a clone is no use."""
    items = project.chosen.values()
    return any(item.phase is Phase.COMPILE for item in items) and not any(item.commit for item in items)


def _folder_with(text: str, context: LockContext) -> Path:
    with machine_errors(context.folder):
        folder = Path(tempfile.mkdtemp(dir=context.folder, prefix="throw-away."))
        (folder / PROJECT_FILE).write_text(text)
    return folder
