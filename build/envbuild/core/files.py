"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from envbuild.core.errors import EnvbuildError, MachineError, disk_full
from envbuild.core.interruptions import interruptions_kept, refuse_hidden_interruption

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder"}
# The mode of a folder that no other account enters.
PRIVATE = 0o700
# ioctl_ficlone(2), and what it says between two file systems and on those that have no clones.
FICLONE = 0x40049409
_NO_CLONE = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM)
# Of link(2): another disk; a file system without links, or a file of another account (proc(5), protected_hardlinks);
# too many links to one file (ext4: 65,000).
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)
LOW_SPACE_BYTES = 64 * 1024 * 1024
LOW_FILES = 64
# How often a tree is removed into which an ending program still writes, and the seconds in between.
REMOVALS, REMOVAL_PAUSE = 20, 0.05


def write_atomic(path: Path, data: str | bytes, mode: int = 0o644) -> None:
    """Write ``data`` to ``path`` through a temporary file next to it and a rename."""
    with _replaced(path) as temporary:
        with temporary.open("wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            # rename(2) orders nothing on the disk: without this a power cut could leave an empty file of the final
            # name.
            os.fsync(stream.fileno())
        temporary.chmod(mode)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A file next to ``path``, which takes its place when the block is done."""
    with machine_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder: rename(2) does not work from one file system to another.
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(descriptor)
        temporary = Path(name)
        try:
            yield temporary
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def make_private(folder: Path) -> None:
    """Make a folder that no other account enters, or close one that this account has already."""
    make_own(folder)
    # lstat: another account may have put a link there, which chmod would follow.
    info = folder.lstat()
    if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and stat.S_IMODE(info.st_mode) != PRIVATE:
        folder.chmod(PRIVATE)


def make_own(folder: Path) -> None:
    """Make a folder that no other account enters; one that is there stays as open as its owner wants it."""
    # Whatever the umask: folders that others may write to are refused later.
    for parent in reversed([parent for parent in folder.parents if not parent.exists()]):
        parent.mkdir(0o755, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        # With its mode from the beginning, so that no other account enters before a chmod.
        folder.mkdir(PRIVATE)


def remove_tree(path: Path) -> None:
    """Remove a directory tree, read-only directories in it included; a missing tree is fine."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    if not path.exists():
        return
    # Root file systems have folders that their owner may not write to, and unlink(2) needs that right.
    _open_up(path)
    for folder, below, _ in os.walk(path):
        for name in below:  # before os.walk tries to list it
            _open_up(Path(folder, name))
    with interruptions_kept():
        for _ in range(REMOVALS - 1):
            if _is_removed(path):
                return
            time.sleep(REMOVAL_PAUSE)
        shutil.rmtree(path)


def _is_removed(path: Path) -> bool:
    """Whether a tree could be removed: a program that was ended a moment ago may have put a file where was none."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


def _open_up(folder: Path) -> None:
    info = folder.lstat()
    if stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_IRWXU != stat.S_IRWXU and info.st_uid == os.getuid():
        folder.chmod(info.st_mode | stat.S_IRWXU)


def replace_tree(staged: Path, final: Path) -> None:
    """Put the directory ``staged`` in the place of ``final`` by renames.

    Between the two renames ``final`` is absent for an instant; a crash there leaves the old tree next to it under
    a dotted name and never a mixture.
    """
    with machine_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        # rename(2) replaces no directory that has something in it. renameat2(2) could exchange both at once, but Python
        # has no call for it.
        if final.exists():
            old = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.old."))
            final.rename(old / final.name)
            try:
                staged.rename(final)
            except BaseException:
                (old / final.name).rename(final)
                old.rmdir()
                raise
            remove_tree(old)
        else:
            staged.rename(final)


def refuse_unwritable(path: Path) -> None:
    """Refuse a path at which this account can put no folder, before the work whose result goes there.

    Raises:
        MachineError: no folder can be made there, or the disk is full; it names ``path``.
    """
    place = path.absolute().parent
    while not os.path.lexists(place):
        place = place.parent
    try:
        # access(2) allows root what the file system refuses, as in /proc. The name is one that tidy() removes.
        Path(tempfile.mkdtemp(dir=place, prefix=f".{path.name}.new.")).rmdir()
    except OSError as error:
        refuse_hidden_interruption(error)
        raise os_error(OSError(error.errno, error.strerror), path) from error


class NotPlainFileError(OSError):
    """Something is no file with an end: a pipe, a device, a socket, a folder."""


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading that others may have put there; a pipe or a device is not waited for.

    Raises:
        NotPlainFileError: it is not a plain file.
    """
    # open(2): a pipe without a writer is waited for, but not with O_NONBLOCK, which means nothing for plain files.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        refuse_no_plain(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def refuse_no_plain(path: Path, info: os.stat_result) -> None:
    """Raise NotPlainFileError for what stat does not show as a plain file."""
    if not stat.S_ISREG(info.st_mode):
        what = _KINDS.get(stat.S_IFMT(info.st_mode), "something else")
        raise NotPlainFileError(f"{path.name} is {what} and no plain file")


def read_plain(path: Path, at_most_bytes: int) -> bytes:
    """The content of a plain file.

    Raises:
        NotPlainFileError: it is not a plain file, or is larger than allowed.
    """
    with open_plain(path) as stream:
        return read_at_most(stream, path.name, at_most_bytes)


def read_at_most(stream: BinaryIO, name: str, at_most_bytes: int) -> bytes:
    """The content of an open file.

    Raises:
        NotPlainFileError: it is larger than allowed.
    """
    content = stream.read(at_most_bytes + 1)
    if len(content) > at_most_bytes:
        raise NotPlainFileError(f"{name} is larger than {at_most_bytes >> 20} MiB")
    return content


def read_number(path: Path) -> int | None:
    """The number that a file of the kernel holds; None where there is no such file, or a word in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def link_or_copy(source: Path, destination: Path) -> None:
    """Give ``destination`` the content and times of ``source``: a hard link where the disk allows it, else a copy.

    Only inside of the store: whoever is given one name of a file can write to it, and so to all of them
    (:func:`clone_or_copy`).
    """
    with _replaced(destination) as temporary:
        # link(2) replaces nothing, so the name must be free.
        temporary.unlink()
        link(source, temporary)


def link(source: Path, target: Path) -> None:
    """Put the file or link ``source`` at ``target``, where nothing is: a hard link where the disk allows it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def clone_or_copy(source: Path, destination: Path) -> None:
    """Give ``destination`` a copy of ``source`` with its mode and times, which changes to either do not reach.

    Where the file system can (XFS, btrfs), both share their blocks until one is written to, and nothing is copied.
    """
    with _replaced(destination) as temporary:
        with source.open("rb") as original, temporary.open("wb") as copy:
            try:
                fcntl.ioctl(copy, FICLONE, original.fileno())
            except OSError as error:
                # Another file system, or one that shares no blocks (ioctl_ficlone(2)).
                if error.errno not in _NO_CLONE:
                    raise
                shutil.copyfile(source, temporary)
        shutil.copystat(source, temporary)


def space_is_low(path: Path) -> bool:
    """Whether less than 64 MiB or 64 files are left on the disk of ``path`` (or of its nearest existing parent)."""
    while not path.exists():
        path = path.parent
    usage = os.statvfs(path)
    # Some file systems have no fixed number of files, and say 0 of 0.
    # f_bavail and f_favail are what ordinary accounts may use, without what is reserved for root (statvfs(3)).
    few_files = usage.f_files > 0 and usage.f_favail < LOW_FILES
    return few_files or usage.f_bavail * usage.f_frsize < LOW_SPACE_BYTES


@contextlib.contextmanager
def machine_errors(path: Path, doing: str = "write") -> Iterator[None]:
    """Turn the operating system's refusals while writing (or reading) ``path`` into errors that people understand."""
    try:
        yield
    except EnvbuildError:
        raise
    except OSError as error:
        refuse_hidden_interruption(error)
        raise os_error(error, path, doing) from error


def os_error(error: OSError, path: Path, doing: str = "write") -> EnvbuildError:
    """The envbuild error for an :class:`OSError` met while writing ``path``.

    Args:
        doing: what was tried: ``write``, ``read``, or ``use`` where that is not known.
    """
    # A quota that is used up is to its user a full disk.
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(path)
    # In a folder that is gone every relative path fails so.
    if error.errno == errno.ENOENT and not _directory_is_there():
        return MachineError(
            "the current directory does not exist any more",
            why="It was removed or replaced while this shell was in it.",
            fix="Change to a directory that is there (cd), and run the same command again.",
        )
    where = error.filename or path
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return MachineError(
            f"no permission to {doing} {where}",
            why=error.strerror or str(error),
            fix="Make the directory writable, or choose another one: ENVBUILD_CACHE_DIR for the store, the command's "
            "own option (--out, --out-dir, --into) for its results."
            if doing == "write"
            else "Make it readable for this account (each folder above it needs the right to enter), or run the "
            "command in another directory.",
        )
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return MachineError(
            f"cannot {doing} {where}",
            why=f"A file is where a folder is needed, or something else is there already ({error.strerror}).",
            fix="Name another place, or move away what is there.",
        )
    return MachineError(
        f"cannot {doing} {where}",
        why=error.strerror or str(error),
        fix="Look at the path named above: its disk, mount or file system refused the operation.",
    )


def _directory_is_there() -> bool:
    try:
        return Path.cwd().is_dir()
    except OSError as error:
        return error.errno != errno.ENOENT
