"""``envbuild image inspect|diff``: what is in an image, and how two differ."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from envbuild.cli.command import Command
from envbuild.cli.common import Session, out_dir_option, output_options
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


@click.command("inspect", cls=Command)
@click.argument("image", required=False)
@click.option("--stack", metavar="NAME", help="Instead of IMAGE: the one of this stack in --out-dir; needs --target.")
@click.option("--base", metavar="NAME", help="The userland; default: the stack's default base for the target.")
@click.option("--target", metavar="NAME", help="The hardware generation (`envbuild list targets`).")
@out_dir_option
@output_options
def inspect_command(
    session: Session, image: str | None, stack: str | None, base: str | None, target: str | None, out_dir: Path
) -> None:
    """Print what is in IMAGE: packages, layers, configuration, and what decides it.

    IMAGE is a folder of out/images, an OCI layout (FOLDER or FOLDER:TAG), an archive of docker or OCI, or a .sqsh.
    """
    if (image is None) == (stack is None):
        raise UsageError(
            "name one image",
            why="Both IMAGE and --stack were named." if image else "Neither IMAGE nor --stack was named.",
            fix="Name one: envbuild image inspect out/images/NAME, or envbuild image inspect --stack S --target T",
        )
    named = image if image is not None else _built(session, stack or "", base, target, out_dir)
    with session.store.staging("inspect") as scratch:
        opened = open_image(named, scratch)
        inspected = inspect_image(opened, builder_paths(session.store), session.store)
        session.done(as_json(inspected), *lines(inspected))


def _built(session: Session, stack: str, base: str | None, target: str | None, out_dir: Path) -> str:
    selection = session.select_locked(stack, target, base, None)
    return str(find_image(out_dir, selection.stack_name, selection.base_name, selection.target_name).path)


@click.command("diff", cls=Command)
@click.argument("old")
@click.argument("new")
@click.option("--files", is_flag=True, help="Compare every file too: content, mode, owner, links, type.")
@click.option("--times", is_flag=True, help="With --files: a time alone is a difference.")
@click.option("--exit-code", is_flag=True, help=f"End with exit code {DIFFERENT} where there is a difference.")
@output_options
@click.pass_context
def diff_command(
    context: click.Context, session: Session, old: str, new: str, files: bool, times: bool, exit_code: bool
) -> None:
    """Print how the image NEW differs from OLD: packages, configuration, layers, and the bytes to ship.

    Both are named as for `image inspect`.
    """
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
    if exit_code and not equal:
        context.exit(DIFFERENT)


def _folder(scratch: Path, name: str) -> Path:
    folder = scratch / name
    with machine_errors(folder):
        folder.mkdir()
    return folder


COMMANDS = (inspect_command, diff_command)
