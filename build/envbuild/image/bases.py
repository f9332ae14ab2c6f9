"""Bases: a distribution's root file system as a directory to run in and as a layer, made by mmdebstrap."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from envbuild.catalog.catalog import Selection, definition_digest
from envbuild.catalog.data import data_root
from envbuild.catalog.models import Base
from envbuild.catalog.site import Site
from envbuild.core.digests import digest_of, short
from envbuild.core.errors import BuildError, EnvbuildError, MachineError, NetworkError, disk_full
from envbuild.core.files import remove_tree, write_atomic
from envbuild.core.process import Finished, describe_status, find_tool, ran_out_of_space, run, tail
from envbuild.core.progress import Reporter
from envbuild.image import apt, gzips
from envbuild.image.layers import Layer, LayerWriter, Owner
from envbuild.image.record import RECORD_FILE, BaseRecord, dump, load
from envbuild.image.tars import read_members
from envbuild.store.local import LocalStore

KIND = "bases"
# Raised when a base made from the same inputs would come out differently.
FORMAT = 1
# Every file of a base has this time (2000-01-01). It is the base's own and no lock's, so that locks share the layer.
EPOCH = 946684800
ROOTFS = "rootfs"
LAYER_FILE = "layer.tar.gz"
# Files that a sandbox mounts the machine's own over, where a base has none. They are not in the layer.
MOUNT_POINTS = ("etc/resolv.conf", "etc/hosts")
ARCHITECTURES = {"linux/amd64": "amd64"}
# apt has no exit status of its own for "cannot reach"; these are its words for it.
_NETWORK = re.compile(
    r"Temporary failure resolving|Could not resolve|Could not connect|Connection (failed|refused|timed out)"
    r"|Network is unreachable|Failed to fetch|Certificate verification failed",
    re.IGNORECASE,
)
_ENVIRONMENT = ("PATH", "http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy", "NO_PROXY")


@dataclass(frozen=True, kw_only=True)
class MadeBase:
    """A base in the store."""

    path: Path
    record: BaseRecord
    built: bool

    @property
    def rootfs(self) -> Path:
        """The root file system as a directory; owners in it mean nothing."""
        return self.path / ROOTFS

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Its layers, lowest first."""
        return (Layer(self.record.layer, self.path / LAYER_FILE),)

    @property
    def digest(self) -> str:
        """The digest by which what is built on it knows the base: that of the tar of its root file system."""
        return self.record.layer.diff_id


@cache
def mmdebstrap_version() -> str:
    """``mmdebstrap 1.3.5``."""
    tool = find_tool("mmdebstrap", "mmdebstrap")
    return run([tool, "--version"], what="ask mmdebstrap for its version", error=MachineError).output.strip()


def base_key(base: Base) -> str:
    """The key of a base: what it is defined as and what makes it, but not the day on which it is made."""
    return digest_of(
        {
            "format": FORMAT,
            "definition": definition_digest(base),
            "tool": mmdebstrap_version(),
            "gzip": gzips.ENCODER,
            "scrub": list(scrub_patterns()),
        }
    )


def find_base(base: Base, store: LocalStore) -> MadeBase | None:
    """The base as it was made last, if it was."""
    path = store.find(KIND, base_key(base))
    return _read(path, built=False) if path else None


def make_base(
    selection: Selection, site: Site, store: LocalStore, reporter: Reporter, *, refresh: bool = False
) -> MadeBase:
    """The base of ``selection``; made when it is not in the store, or when ``refresh`` asks for today's packages.

    Raises:
        ConfigurationError: this machine has no apt sources for it.
        NetworkError: the archive cannot be reached.
        BuildError: mmdebstrap failed.
    """
    base = selection.base
    key = base_key(base)

    def build(folder: Path) -> None:
        _build(folder, base, selection.base_name, site, store.root / "logs", reporter)

    entry = store.rebuild(KIND, key, build) if refresh else store.get_or_build(KIND, key, build)
    return _read(entry.path, built=entry.built)


def _read(path: Path, *, built: bool) -> MadeBase:
    return MadeBase(path=path, record=load(path / RECORD_FILE, BaseRecord), built=built)


def _build(folder: Path, base: Base, name: str, site: Site, logs: Path, reporter: Reporter) -> None:
    sources = apt.sources_for(base, name, site.apt_mirror)
    log = logs / f"base-{name}-{short(base_key(base))}.log"
    log.unlink(missing_ok=True)
    archive = folder.parent / "rootfs.tar"
    rootfs = folder / ROOTFS
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
    with reporter.step(f"write the layer of base {name}"):
        with LayerWriter(folder / LAYER_FILE, EPOCH) as writer:
            writer.add_tree(rootfs, owner=lambda path: owners.get(path, (0, 0)))
        record = BaseRecord(
            schema="envbuild.base/1",
            layer=writer.record("base"),
            made_by=mmdebstrap_version(),
            packages=installed_packages((rootfs / "var/lib/dpkg/status").read_text(encoding="utf-8")),
        )
    for place in MOUNT_POINTS:
        (rootfs / place).touch()
    write_atomic(folder / RECORD_FILE, dump(record))


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


def installed_packages(status: str) -> dict[str, str]:
    """Version by package name from dpkg's status file."""
    found = {}
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Status): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status") == "install ok installed":
            found[fields["Package"]] = fields["Version"]
    return dict(sorted(found.items()))
