"""What a base's file states, compared with its root file system."""

from __future__ import annotations

import json
import platform as machine
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import InvalidVersion, Version

from envbuild.catalog.base import Base
from envbuild.catalog.catalog import HostDistribution
from envbuild.catalog.fields import MACHINES
from envbuild.core import sandbox
from envbuild.core.errors import CheckRefusedError, MachineError
from envbuild.core.exit_status import tail
from envbuild.core.process import ProcessOptions, run
from envbuild.core.sandbox import Sandbox
from envbuild.image.scan.packages import DPKG_STATUS, debian_packages
from envbuild.image.variables import LANG, PLAIN_PATH

BINFMT = Path("/proc/sys/fs/binfmt_misc")
_LIBC = "libc.so.6"
# glibc prints it when it is run as a program. It is read from the file instead, so nothing of the base has to run.
_BANNER = re.compile(rb"GNU C Library [^\n\0]*version (\d+\.\d+)")
# The word e_machine of an ELF header (elf(5)), little-endian, at this place.
_MACHINE_AT, _MACHINES = 18, {62: "x86_64", 183: "aarch64"}
# As many as Linux follows in one path (path_resolution(7)).
_MOST_LINKS = 40
_PROBE_SECONDS = 120
# Prints the Python's version, and those of the packages in its arguments.
_PROBE = """
import json, sys
from importlib import metadata
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = None
print("\\n" + json.dumps({"version": "%d.%d" % sys.version_info[:2], "packages": versions}))
"""


def require_machine(base: Base, name: str, binfmt: Path = BINFMT) -> None:
    """Refuse to begin where the base's programs do not run.

    Raises:
        MachineError: it is for another processor, and nothing here emulates it.
    """
    wanted = MACHINES[base.platform]
    if machine.machine() == wanted or _emulates(binfmt, wanted):
        return
    raise MachineError(
        f"base {name} is for {base.platform}, and this machine is {machine.machine()}",
        why="Packages are installed, compiled to bytecode and imported inside the base, and nothing here runs its "
        f"programs ({binfmt} has no emulator for {wanted}).",
        fix=f"Build on a machine that is {wanted}; or have it emulated, which is slow: "
        "apt-get install qemu-user-static binfmt-support",
    )


def _emulates(binfmt: Path, wanted: str) -> bool:
    """Whether programs for another processor run here: an interpreter is registered that works in other roots (F)."""
    try:
        registered = (binfmt / f"qemu-{wanted}").read_text()
    except OSError:
        return False
    # Without the flag F (binfmt_misc) the kernel looks for the interpreter inside the base, where there is none.
    return registered.startswith("enabled") and bool(re.search(r"^flags:.*F", registered, re.MULTILINE))


def inside(root: Path, name: str) -> Path | None:
    """Where a path of a root file system leads: links are followed as a process in it would. None: to nothing."""
    parts, place = [part for part in name.split("/") if part][::-1], root
    links = 0
    while parts:
        part = parts.pop()
        if part in (".", ".."):
            # The parent of the root is the root itself (path_resolution(7)).
            place = place if part == "." or place == root else place.parent
            continue
        there = place / part
        if there.is_symlink():
            links += 1
            if links > _MOST_LINKS:
                return None
            target = str(there.readlink())
            parts += [piece for piece in target.split("/") if piece][::-1]
            place = root if target.startswith("/") else place
        elif there.exists():
            place = there
        else:
            return None
    return place


def packages_of(rootfs: Path) -> dict[str, str]:
    """The Debian packages of a root file system."""
    status = inside(rootfs, DPKG_STATUS)
    if status is None or not status.is_file():
        return {}
    packages = debian_packages(status.read_bytes(), {})
    return {package.name: package.version for package in packages}


def check(base: Base, name: str, rootfs: Path, variables: Mapping[str, str]) -> None:
    """Refuse a base that is not what its file states.

    Args:
        variables: those that its image sets.

    Raises:
        CheckRefusedError: names each difference.
    """
    differing = list(_differing(base, rootfs, variables))
    if not differing:
        # Last: of a base for another processor, no program runs.
        differing = list(_differing_python(base, rootfs, variables))
    if differing:
        raise CheckRefusedError(
            f"base {name} is not what its file states",
            why="\n".join(differing),
            fix=f"Correct envs/bases/{name}.toml, lock again on it, or take the image that was meant.",
        )


def _differing(base: Base, rootfs: Path, variables: Mapping[str, str]) -> Iterator[str]:
    release = inside(rootfs, "etc/os-release")
    if release is None or not release.is_file():
        yield "distribution: there is no /etc/os-release in it"
    else:
        is_, stated = HostDistribution.here(release), f"{base.distribution} {base.release}"
        if (is_.distribution, is_.release) != (base.distribution, base.release):
            yield f"distribution: {stated} in the file, {is_.distribution} {is_.release} in the base"
    libc = _libc(rootfs, MACHINES[base.platform])
    if libc is None:
        yield f"platform: no C library ({_LIBC}) for {base.platform} is in it"
    else:
        data = libc.read_bytes()
        machine = _MACHINES.get(int.from_bytes(data[_MACHINE_AT : _MACHINE_AT + 2], "little"), "another processor")
        if machine != MACHINES[base.platform]:
            yield f"platform: {base.platform} in the file, {machine} in the base"
        banner = _BANNER.search(data)
        glibc = banner[1].decode() if banner else "unknown"
        # One that is newer runs what was locked for an older one.
        if not banner or Version(glibc) < Version(base.glibc):
            yield f"glibc: {base.glibc} in the file, {glibc} in the base"
    # NVIDIA's images of CUDA state their toolkit in it, patch level included: 12.8.1.
    toolkit = ".".join(variables.get("CUDA_VERSION", "").split(".")[:2])
    if toolkit and toolkit != base.cuda:
        yield f"cuda: {base.cuda or 'none'} in the file, {toolkit} in the base (CUDA_VERSION)"
    python = inside(rootfs, base.python.executable)
    if python is None or not python.is_file() or not python.stat().st_mode & 0o100:
        yield f"python: there is no program {base.python.executable} in the base"


def _libc(rootfs: Path, processor: str) -> Path | None:
    # Debian and Ubuntu have a folder for each processor ("Multiarch" in their documentation); others have lib64.
    folders = [f"{top}/{processor}-linux-gnu" for top in ("lib", "usr/lib")] + ["lib64", "usr/lib64", "lib", "usr/lib"]
    paths = (inside(rootfs, f"{folder}/{_LIBC}") for folder in folders)
    return next((file for file in paths if file is not None and file.is_file()), None)


def _same_version(actual: str | None, stated: str) -> bool:
    """Whether two spellings are one version: NVIDIA's torch calls itself ``.nv25.09``, and its metadata ``.nv25.9``."""
    try:
        return actual is not None and Version(actual) == Version(stated)
    except InvalidVersion:
        return actual == stated


def _differing_python(base: Base, rootfs: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Ask the base's Python itself, in a sandbox without the network."""
    box = Sandbox(root=rootfs, environment={"PATH": PLAIN_PATH, "HOME": "/tmp", "LANG": LANG, **variables})  # noqa: S108
    finished = run(
        box.command(sandbox.probe(), [base.python.executable, "-c", _PROBE, *base.provides]),
        what="ask the base's Python for its version",
        check=False,
        options=ProcessOptions(env=box.process_environment(), timeout_seconds=_PROBE_SECONDS, error=MachineError),
    )
    try:
        # The last line: a base's sitecustomize, and Python's warnings, may print before it.
        facts = json.loads(finished.output.strip().splitlines()[-1])
        version, packages = facts["version"], facts["packages"]
    except (IndexError, ValueError, KeyError, TypeError):
        yield f"python: {base.python.executable} does not run: {tail(finished.output)}"
        return
    if version != base.python.version:
        yield f"python: {base.python.version} in the file, {version} in the base ({base.python.executable})"
    for name, stated in base.provides.items():
        if not _same_version(packages.get(name), stated):
            yield f"provides: {name} {stated} in the file, {packages.get(name) or 'none'} in the base"
