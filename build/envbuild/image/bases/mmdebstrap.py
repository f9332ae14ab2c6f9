"""Bases that mmdebstrap makes from a distribution's packages: the root file system and its one layer."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from envbuild.catalog.data import data_root
from envbuild.catalog.models import Base
from envbuild.core.digests import Json
from envbuild.core.errors import BuildError, EnvbuildError, MachineError, NetworkError, disk_full
from envbuild.core.files import remove_tree
from envbuild.core.outcome import describe_status, ran_out_of_space, tail
from envbuild.core.process import Finished, find_tool, run
from envbuild.core.progress import Reporter
from envbuild.image import gzips
from envbuild.image.bases import apt
from envbuild.image.layers import EPOCH, Layer, LayerWriter, Owner
from envbuild.image.tars import read_members

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
    tool = find_tool("mmdebstrap", "mmdebstrap")
    return run([tool, "--version"], what="ask mmdebstrap for its version", error=MachineError).output.strip()


def inputs() -> dict[str, Json]:
    """What makes such a base, besides its definition; but not the day on which it is made."""
    return {"tool": mmdebstrap_version(), "gzip": gzips.ENCODER, "scrub": list(scrub_patterns())}


def require_tools() -> None:
    """Refuse to begin without the programs that make such a base.

    Raises:
        MachineError: one is missing.
    """
    find_tool("mmdebstrap", "mmdebstrap")
    find_tool("tar", "tar")
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
    with reporter.step(f"make base {name} with {mmdebstrap_version()}"):
        _mmdebstrap(archive, base, name, sources, log, reporter)
    with reporter.step(f"unpack and scrub base {name}"):
        owners = read_owners(archive)
        rootfs.mkdir()
        run(
            [
                find_tool("tar", "tar"),
                *("--extract", "--file", str(archive), "--directory", str(rootfs)),
                *("--preserve-permissions", "--no-same-owner", "--exclude=./dev/*"),
            ],
            what=f"unpack base {name}",
            log=log,
            working_on=folder,
        )
        archive.unlink()
        scrub(rootfs, scrub_patterns())
    with reporter.step(f"write the layer of base {name}"), LayerWriter(file, EPOCH) as writer:
        writer.add_tree(rootfs, owner=lambda path: owners.get(path, (0, 0)))
    return Layer(writer.record("base"), file)


def _mmdebstrap(archive: Path, base: Base, name: str, sources: apt.Sources, log: Path, reporter: Reporter) -> None:
    as_root = os.geteuid() == 0
    words: list[str | Path] = []
    environment = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
    environment |= {key: value for key, value in sources.proxies.items() if key not in environment}
    environment |= {"SOURCE_DATE_EPOCH": str(EPOCH), "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    if as_root:
        # Namespaces of its own: whatever ends envbuild also ends apt and dpkg, and no mount of theirs stays behind.
        words += [find_tool("unshare", "util-linux"), "--mount", "--propagation", "private"]
        words += ["--pid", "--fork", "--kill-child", "--mount-proc"]
        environment["TMPDIR"] = str(archive.parent)
    words += [find_tool("mmdebstrap", "mmdebstrap"), "--mode=root" if as_root else "--mode=unshare"]
    words += ["--variant=minbase", "--format=tar", f"--architectures={ARCHITECTURES[base.platform]}"]
    words += ["--include=" + ",".join(base.archive.packages), '--aptopt=Acquire::Languages "none"']
    words += [f"--aptopt={option}" for option in sources.options]
    # A power cut costs the whole attempt anyway, so dpkg need not wait for the disk after each file.
    words.append("--dpkgopt=force-unsafe-io")
    finished = run(
        [*words, base.archive.suite, archive, "-"],
        what=f"make base {name}",
        log=log,
        env=environment,
        stdin=sources.text(),
        on_line=reporter.update,
        check=False,
    )
    if finished.status != 0:
        raise failure(finished, name, archive, log)


def failure(finished: Finished, name: str, archive: Path, log: Path) -> EnvbuildError:
    """The error for an mmdebstrap that failed."""
    if ran_out_of_space(finished.output, archive.parent):
        return disk_full(archive.parent)
    # mmdebstrap's last lines are about its cleaning up; what went wrong is in those that apt and it mark as errors.
    marked = [line for line in finished.output.splitlines() if line.startswith(("E:", "W:", "Err:"))]
    why = "\n".join(marked[:20]) or tail(finished.output)
    if _NETWORK.search(why):
        return NetworkError(
            f"cannot make base {name}: the package archive cannot be reached",
            why=why,
            fix="Check the network, the proxy and the machine's apt sources (`apt-get update` must work), or name "
            "another mirror with ENVBUILD_APT_MIRROR.",
            log=log,
        )
    return BuildError(
        f"cannot make base {name}: mmdebstrap {describe_status(finished.status)}",
        why=why,
        fix="See the log. mmdebstrap works as root, or as an ordinary user with entries in /etc/subuid and "
        "/etc/subgid and user namespaces allowed.",
        log=log,
    )


def read_owners(archive: Path) -> dict[str, Owner]:
    """Owner and group of every member of a tar that does not belong to root."""
    owners: dict[str, Owner] = {}
    for member, _ in read_members(archive):
        if member.uid or member.gid:
            owners[member.name.removeprefix("./")] = (member.uid, member.gid)
    return owners


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
