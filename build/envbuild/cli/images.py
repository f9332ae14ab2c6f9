"""``envbuild image inspect|diff``: what is in an image, and how two differ."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.cli.common import LockedOptions, SelectionOptions, Session, as_command, base_name, out_dir, target_name
from envbuild.cli.options import argument, flag, option
from envbuild.core.digests import Json
from envbuild.core.errors import UsageError
from envbuild.core.files import machine_errors
from envbuild.image.inspect.compare import compare
from envbuild.image.inspect.file_diff import FileDifference, different_files
from envbuild.image.inspect.inspect import as_json, inspect_image, lines
from envbuild.image.inspect.open import open_image
from envbuild.image.layers.sandbox import builder_paths
from envbuild.image.output import find_image

# The exit code of --exit-code for a difference, as for `git diff`; 1 would be a fault of envbuild.
DIFFERENT = 5


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    image: str | None = argument(required=False)
    stack: str | None = option("--stack NAME", "Instead of IMAGE: this stack's image in --out-dir; needs --target.")
    target: str | None = target_name()
    base: str | None = base_name()
    out_dir: Path = out_dir()


@as_command("inspect", InspectOptions)
def inspect_command(session: Session, options: InspectOptions) -> None:
    """Print what is in IMAGE: packages, layers, configuration, and its inputs.

    IMAGE is a folder of out/images, an OCI layout (FOLDER or FOLDER:TAG), a docker or OCI archive, or a .sqsh.
    """
    image, stack = options.image, options.stack
    if (image is None) == (stack is None):
        raise UsageError(
            "name one image",
            why="Both IMAGE and --stack were named." if image else "Neither IMAGE nor --stack was named.",
            fix="Name one: envbuild image inspect out/images/NAME, or envbuild image inspect --stack S --target T",
        )
    named = image if image is not None else _built(session, options)
    with session.store.staging("inspect") as scratch:
        opened = open_image(named, scratch)
        inspected = inspect_image(opened, builder_paths(session.store), session.store)
        session.done(as_json(inspected), *lines(inspected))


def _built(session: Session, options: InspectOptions) -> str:
    selected = SelectionOptions(stack=options.stack or "", target=options.target, base=options.base)
    selection = session.select_locked(LockedOptions(selection=selected, name=None))
    return str(find_image(options.out_dir, selection.stack_name, selection.base_name, selection.target_name).path)


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    old: str = argument()
    new: str = argument()
    files: bool = flag("--files", "Compare every file too: content, mode, owner, links, type.")
    times: bool = flag("--times", "With --files: also compare modification times.")
    exit_code: bool = flag("--exit-code", f"Exit with code {DIFFERENT} if there is a difference.")


@as_command("diff", DiffOptions)
def diff_command(session: Session, options: DiffOptions) -> None:
    """Print how the image NEW differs from OLD: packages, configuration, layers, and the bytes to ship.

    OLD and NEW are named as for `image inspect`.
    """
    old, new, files, times = options.old, options.new, options.files, options.times
    if times and not files:
        raise UsageError(
            "--times needs --files",
            why="Times are compared file by file, which is not done without --files.",
            fix=f"Add --files: {shlex.join(['envbuild', 'image', 'diff', old, new, '--files', '--times'])}",
        )
    with session.store.staging("diff") as scratch:
        # Each in its own folder: both may be unpacked to files of the same names.
        opened = [open_image(named, _folder(scratch, name)) for named, name in ((old, "old"), (new, "new"))]
        paths = builder_paths(session.store)
        one, other = (inspect_image(change, paths, session.store) for change in opened)
        difference = compare(one, other)
        changed: list[FileDifference] = []
        if files:
            with session.reporter.step("compare every file"):
                changed = list(different_files(opened[0], opened[1], times=times))
        equal = difference.equal and not changed
        result: dict[str, Json] = {"equal": equal, **difference.as_json()}
        if files:
            result["files"] = [change.as_json() for change in changed]
        text = [*difference.lines(), *[change.line() for change in changed]]
        text.append(f"{len(changed)} names of files differ" if files else "files were not compared: --files")
        session.done(result, *text)
    if options.exit_code and not equal:
        raise click.exceptions.Exit(DIFFERENT)


def _folder(scratch: Path, name: str) -> Path:
    folder = scratch / name
    with machine_errors(folder):
        folder.mkdir()
    return folder


COMMANDS = (inspect_command, diff_command)
