"""A package's sources in a folder: unpacked, changed by the recipe's patches, as often as a build begins."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors, remove_tree
from envbuild.core.process import ProcessOptions, find_tool, run

# 1980-01-02, the first day that every time zone's zip files can have.
SOURCE_DATE_EPOCH = 315619200
# What setuptools makes again from object files, which are in build/temp.*.
MADE_AGAIN = ("build/lib*", "build/bdist*")


def unpack(name: str, archive: bytes, folder: Path, inside: str = "") -> Path:
    """The one top folder of an sdist, its files as they were before any build.

    Object files of a build that was ended stay. Sources keep the times of the archive, so that a build finds up to
    date what it had finished.

    Args:
        inside: the folder in it that is built; empty for its top.

    Raises:
        CheckRefusedError: it is no archive, has no single folder on top, or not the one to be built.
    """
    try:
        with machine_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for stale in [path for pattern in MADE_AGAIN for path in folder.glob(str(Path("*", inside, pattern)))]:
                remove_tree(stale)
            # By content: sdists are tar files of any compression, old ones zip files (PEP 527).
            if archive[:2] == b"PK":
                _unpack_zip(archive, folder)
            else:
                with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
                    _unpack_tar(tar, folder)
        tops = [path for path in folder.iterdir() if path.is_dir()]
        if len(tops) != 1:
            raise ValueError(f"it has {len(tops)} folders on top instead of one")
        place = (tops[0] / inside).resolve()
        if not place.is_dir() or not place.is_relative_to(tops[0].resolve()):
            raise ValueError(f"it has no folder {inside}")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, ValueError) as error:
        raise CheckRefusedError(
            f"the sdist of {name} cannot be unpacked",
            why=str(error),
            fix="Choose another version of the component and lock again.",
        ) from error
    return tops[0]


def _unpack_tar(tar: tarfile.TarFile, folder: Path) -> None:
    if hasattr(tarfile, "data_filter"):
        tar.extractall(folder, filter="data")
        return
    # tarfile.data_filter is PEP 706's.
    # Python before 3.10.12 and 3.11.4, as Debian 12 has it, does not look at what it extracts.
    members = tar.getmembers()
    links = {Path(member.name) for member in members if member.issym()}
    for member in members:
        _refuse_unsafe(member, folder.resolve())
        if links.intersection(Path(member.name).parents):
            raise tarfile.TarError(f"{member.name!r} lies below a link")
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    tar.extractall(folder, members)  # noqa: S202 - looked at above


def _refuse_unsafe(member: tarfile.TarInfo, folder: Path) -> None:
    """Refuse what lies outside of the folder, links to outside of it, and what is neither file, folder nor link."""
    places = [folder / member.name]
    if member.issym():
        places.append(folder / Path(member.name).parent / member.linkname)
    elif member.islnk():
        places.append(folder / member.linkname)
    elif not (member.isreg() or member.isdir()):
        raise tarfile.TarError(f"{member.name!r} is neither a file nor a folder nor a link")
    outside = any(not Path(os.path.normpath(place)).is_relative_to(folder) for place in places)
    if outside or ".." in Path(member.name).parts:
        raise tarfile.TarError(f"{member.name!r} would be outside the folder")


def _unpack_zip(archive: bytes, folder: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        for member in opened.infolist():
            # extract keeps names inside of the folder by itself, and does not keep times.
            path = Path(opened.extract(member, folder))
            os.utime(path, (SOURCE_DATE_EPOCH, SOURCE_DATE_EPOCH))


def apply_patches(name: str, source: Path, patches: Sequence[tuple[str, bytes]]) -> None:
    """Apply patches, name and content each, in their order.

    Raises:
        CheckRefusedError: one does not apply.
        MachineError: git is not installed.
    """
    for file, content in patches:
        done = run(
            [find_tool("git", "git"), "apply", "--whitespace=nowarn", "-"],
            what=f"apply {file} to {name}",
            check=False,
            options=ProcessOptions(
                # A folder of a repository of somebody else's is not looked for above this one.
                env={**os.environ, "GIT_CEILING_DIRECTORIES": str(source.parent)},
                cwd=source,
                stdin=content,
            ),
        )
        if done.status != 0:
            raise CheckRefusedError(
                f"the patch {file} does not apply to {name}",
                why=done.output.strip(),
                fix="Correct it in envs/wheels/patches/, or the versions that the package's recipe names it for.",
            )
    # git gives changed files the present time: a build that goes on would compile them again.
    for path in _changed(patches, source):
        os.utime(path, (SOURCE_DATE_EPOCH, SOURCE_DATE_EPOCH))


def _changed(patches: Sequence[tuple[str, bytes]], source: Path) -> list[Path]:
    """The files that patches change, as their ``+++ b/...`` lines name them."""
    lines = [line for _, content in patches for line in content.decode().splitlines()]
    names = [line.partition("/")[2].partition("\t")[0] for line in lines if line.startswith("+++ b/")]
    return [source / name for name in names if (source / name).exists()]
