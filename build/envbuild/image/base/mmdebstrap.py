"""Bases that mmdebstrap makes from a distribution's packages: the root file system and its one layer."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

from envbuild.catalog.base import Base
from envbuild.catalog.data import data_root
from envbuild.core.digests import Json
from envbuild.core.errors import BuildError, EnvbuildError, MachineError, NetworkError, disk_full
from envbuild.core.exit_status import describe_status, ran_out_of_space, tail
from envbuild.core.files import remove_tree, space_is_low
from envbuild.core.process import Finished, ProcessOptions, answer, find_tool, run
from envbuild.core.progress import Reporter
from envbuild.image.base import apt
from envbuild.rootfs import gzip_writer
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.layer import Layer
from envbuild.rootfs.layer_writer import EPOCH, LayerWriter, Rights, kept_rights
from envbuild.rootfs.overlay import Entry, Overlay, merged
from envbuild.rootfs.unpack import write_members
from envbuild.store.local import place_with_devices, temporary_store

ROOTFS = "rootfs"
LAYER_FILE = "layer.tar.gz"
ARCHITECTURES = {"linux/amd64": "amd64", "linux/arm64": "arm64"}
# apt has no exit status of its own for "cannot reach"; these are its words for it.
_NETWORK = re.compile(
    r"Temporary failure resolving|Could not resolve|Could not connect|Connection (failed|refused|timed out)"
    r"|Network is unreachable|Failed to fetch|Certificate verification failed",
    re.IGNORECASE,
)
_ENVIRONMENT = ("PATH", "http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy", "NO_PROXY")


@cache
def mmdebstrap_version() -> str:
    """``mmdebstrap 1.3.5``."""
    return answer([find_tool("mmdebstrap", "mmdebstrap"), "--version"], what="ask mmdebstrap for its version")


def inputs() -> dict[str, Json]:
    """What makes such a base, besides its definition; but not the day on which it is made."""
    return {"tool": mmdebstrap_version(), "gzip": gzip_writer.ENCODER, "scrub": list(scrub_patterns())}


def require_tools() -> None:
    """Refuse to begin without the programs that make such a base.

    Raises:
        MachineError: one is missing.
    """
    find_tool("mmdebstrap", "mmdebstrap")
    find_tool("unshare", "util-linux")


def build(folder: Path, base: Base, name: str, mirror: str | None, log: Path, reporter: Reporter) -> Layer:
    """Make the base ``name`` in ``folder``: its root file system in ``rootfs``, and its layer.

    Raises:
        ConfigurationError: this machine has no apt sources for it.
        NetworkError: the archive cannot be reached.
        BuildError: mmdebstrap failed.
    """
    sources = apt.sources_for(base, name, mirror)
    archive = folder.parent / "rootfs.tar"
    rootfs, file = folder / ROOTFS, folder / LAYER_FILE
    # As root it works in a folder with set-user-ID programs and devices: outside of the store, whose disk may be of
    # any kind, and closed to other accounts.
    place = place_with_devices() if os.geteuid() == 0 else None
    with (
        reporter.step(f"make base {name} with {mmdebstrap_version()}"),
        temporary_store(within=place).staging("base") if place else nullcontext(folder.parent) as work,
    ):
        _mmdebstrap(Making(archive, work, log), base, name, sources, reporter)
    with reporter.step(f"unpack and scrub base {name}"):
        rights: dict[str, Rights] = {}
        blob = LayerBlob(file=archive, called=f"the tar of base {name}")
        rootfs.mkdir()
        write_members(with_rights(merged([blob], Overlay(emptied=("dev",))), rights), rootfs)
        archive.unlink()
        scrub(rootfs, scrub_patterns())
    with reporter.step(f"write the layer of base {name}"), LayerWriter(file, EPOCH) as writer:
        # What was unpacked has neither owners nor set-user-ID bits; the layer has the tar's.
        writer.add_tree(rootfs, rights=lambda path, info: rights.get(path) or kept_rights(path, info))
    return Layer(writer.record("base"), file)


class Making(NamedTuple):
    """Where mmdebstrap writes: the tar, its own root file system (as root), and the log."""

    archive: Path
    work: Path
    log: Path


def _mmdebstrap(to: Making, base: Base, name: str, sources: apt.AptSources, reporter: Reporter) -> None:
    as_root = os.geteuid() == 0
    words: list[str | Path] = []
    environment = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
    environment |= {key: value for key, value in sources.proxies.items() if key not in environment}
    # With SOURCE_DATE_EPOCH, mmdebstrap writes the same tar for the same packages (mmdebstrap(1); two runs compared).
    environment |= {"SOURCE_DATE_EPOCH": str(EPOCH), "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    if as_root:
        # Namespaces of its own: whatever ends envbuild also ends apt and dpkg, and no mount of theirs stays behind.
        words += [find_tool("unshare", "util-linux"), "--mount", "--propagation", "private"]
        words += ["--pid", "--fork", "--kill-child", "--mount-proc"]
        # mmdebstrap makes its root file system there (mmdebstrap(1), "FORMATS").
        environment["TMPDIR"] = str(to.work)
    words += [find_tool("mmdebstrap", "mmdebstrap"), "--mode=root" if as_root else "--mode=unshare"]
    words += ["--variant=minbase", "--format=tar", f"--architectures={ARCHITECTURES[base.platform]}"]
    # No translated package descriptions: an index for each language, and nothing in the image reads them.
    words += ["--include=" + ",".join(base.archive.packages), '--aptopt=Acquire::Languages "none"']
    words += [f"--aptopt={option}" for option in sources.options]
    # A power cut costs the whole attempt anyway, so dpkg need not wait for the disk after each file.
    words.append("--dpkgopt=force-unsafe-io")
    finished = run(
        # "-": the sources come by stdin (mmdebstrap(1), MIRROR).
        [*words, base.archive.suite, to.archive, "-"],
        what=f"make base {name}",
        log=to.log,
        on_line=reporter.update,
        check=False,
        options=ProcessOptions(env=environment, stdin=sources.text()),
    )
    if finished.status != 0:
        raise failure(finished, name, base, to)


def failure(finished: Finished, name: str, base: Base, to: Making) -> EnvbuildError:
    """The error for an mmdebstrap that failed: a full disk, missing keys, an archive out of reach, or its own words."""
    for disk in (to.archive.parent, to.work):
        if space_is_low(disk):
            return disk_full(disk)
    if ran_out_of_space(finished.output, to.work):
        return disk_full(to.work)
    # mmdebstrap's last lines are about its cleaning up; what went wrong is in those that apt and it mark as errors.
    marked = [line for line in finished.output.splitlines() if line.startswith(("E:", "W:", "Err:"))]
    why = "\n".join(marked[:20]) or tail(finished.output)
    # apt's word for an archive whose key it lacks. It also calls that a failure to fetch.
    if "NO_PUBKEY" in why:
        package = apt.KEYRINGS[base.distribution].package
        return BuildError(
            f"cannot make base {name}: this machine lacks the keys of its package archive",
            why=why,
            fix=f"Install the keys of {base.distribution}, or newer ones: apt-get install {package}. "
            "Keys of a mirror's own go into "
            "its source: ENVBUILD_APT_MIRROR='deb [signed-by=/FILE] URL SUITE COMPONENTS'.",
            log=to.log,
        )
    if _NETWORK.search(why):
        return NetworkError(
            f"cannot make base {name}: the package archive cannot be reached",
            why=why,
            fix="Check the network, the proxy and the machine's apt sources (`apt-get update` must work), or name "
            "another mirror with ENVBUILD_APT_MIRROR.",
            log=to.log,
        )
    return BuildError(
        f"cannot make base {name}: mmdebstrap {describe_status(finished.status)}",
        why=why,
        fix="See the log. mmdebstrap works as root, or as an ordinary user with entries in /etc/subuid and "
        "/etc/subgid and user namespaces allowed.",
        log=to.log,
    )


def with_rights(entries: Iterator[Entry], rights: dict[str, Rights]) -> Iterator[Entry]:
    """The same members; mode, owner and group of each are noted."""
    for member, content in entries:
        rights[member.name] = Rights(member.mode, member.uid, member.gid)
        yield member, content


@cache
def scrub_patterns() -> tuple[str, ...]:
    """The patterns of containers/native/scrub.txt."""
    lines = (data_root() / "containers/native/scrub.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def scrub(rootfs: Path, patterns: tuple[str, ...]) -> None:
    """Remove what ``patterns`` (relative to the root) name. Links are removed, never followed."""
    for pattern in patterns:
        for path in sorted(rootfs.glob(pattern)):
            if _inside(path.parent, rootfs):
                remove_tree(path)


def _inside(folder: Path, rootfs: Path) -> bool:
    # A pattern's middle part may go through a link (var/run -> /run); what lies there is not the base's.
    return folder.resolve().is_relative_to(rootfs.resolve())


# One range of this size maps every ID of a distribution; usermod(8) gives new accounts as much, from here on.
RANGE = 65536
FIRST = 100000


def require_subids(etc: Path = Path("/etc")) -> None:
    """Refuse to begin where mmdebstrap could not map IDs for this account.

    Raises:
        MachineError: the programs that map are missing, or the account has no IDs of its own.
    """
    find_tool("newuidmap", "uidmap")
    find_tool("newgidmap", "uidmap")
    try:
        # As mmdebstrap asks: by name, and in these files alone.
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise MachineError(
            f"user {os.getuid()} has no name, so no subordinate IDs either",
            why="The password database does not know the account; mmdebstrap maps IDs by its name.",
            fix="Run envbuild as an account of this machine, or as root.",
        ) from None
    options = {"subuid": "--add-subuids", "subgid": "--add-subgids"}
    ranges = {name: _ranges(etc / name) for name in options}
    if missing := [name for name in options if user not in {entry[0] for entry in ranges[name]}]:
        words = []
        for name in missing:
            # Behind all ranges of other accounts: who shares IDs can change the other's files.
            first = max([FIRST, *(start + count for _, start, count in ranges[name])])
            words += [options[name], f"{first}-{first + RANGE - 1}"]
        raise MachineError(
            f"account {user} has no subordinate IDs, which mmdebstrap needs as an ordinary user",
            why=f"There is no line of {user} in {' and '.join(str(etc / name) for name in missing)}.",
            fix=f"As root: usermod {' '.join(words)} {user}\nOr run envbuild as root.",
        )


def _ranges(file: Path) -> list[tuple[str, int, int]]:
    """Name, first ID and number of IDs of each line."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # mmdebstrap finds no entry then
    ranges = []
    for line in lines:
        match line.strip().split(":"):
            case [name, start, count] if start.isdigit() and count.isdigit():
                ranges.append((name, int(start), int(count)))
    return ranges
