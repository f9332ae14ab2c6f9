"""A CUDA toolkit made of the package index's packages: pinned for a lock, installed once, laid out as a CUDA_HOME."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import Field

from envbuild.catalog.fields import TomlModel
from envbuild.core.digests import Json, digest_of
from envbuild.core.errors import BuildError, CheckRefusedError, MachineError, NetworkError, ResolutionError
from envbuild.core.files import machine_errors, write_atomic
from envbuild.core.tomlread import Toml
from envbuild.lock.inputs.as_of import with_undated
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.record.content import Content, locked_content
from envbuild.lock.uv.package_index import PackageIndex
from envbuild.lock.uv.program import run_uv
from envbuild.lock.uv.torch_builds import locked_indexes, locked_torch
from envbuild.lock.uv_lock import ResolvedPackage
from envbuild.wheels.sources import WheelSources
from envbuild.wheels.toolchain.toolchain import cuda_version

LIST_KIND = "toolkit-lists"
LIST_FILE = "packages.json"
KIND = "toolkits"
# Raised when the same packages are laid out differently.
FORMAT = 1

NVCC = "nvidia-cuda-nvcc"
# The compiler: all of these are of the lock's CUDA, major.minor, whatever else the lock has them for.
COMPILER = (NVCC, "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl")
# What compiled code starts with: the lock's, else of the lock's CUDA.
RUNTIME = ("nvidia-cuda-runtime", "nvidia-nvtx", "nvidia-cuda-profiler-api")
# Libraries, which torch's headers include those of: the lock's or none, since a wheel must run with the lock's.
LIBRARIES = (
    "nvidia-cublas",
    "nvidia-cuda-cupti",
    "nvidia-cuda-nvrtc",
    "nvidia-cufft",
    "nvidia-cufile",
    "nvidia-curand",
    "nvidia-cusolver",
    "nvidia-cusparse",
    "nvidia-npp",
    "nvidia-nvfatbin",
    "nvidia-nvjitlink",
    "nvidia-nvjpeg",
    "nvidia-nvml-dev",
)


class Pinned(TomlModel):
    """A package of a toolkit."""

    name: str
    version: str
    hashes: tuple[str, ...] = Field(min_length=1, description="of its files, 'sha256:...'")


class PinnedList(TomlModel):
    """What the index was found to have for a lock; kept, so that the same lock gives the same toolkit."""

    packages: tuple[Pinned, ...]


def specifiers(cuda: str) -> dict[str, str]:
    """What a toolkit of version ``cuda`` (major.minor) needs of the index."""
    return dict.fromkeys((*COMPILER, *RUNTIME), f"=={cuda}.*")


def pinned_packages(lock: LockDirectory, cuda: str, sources: WheelSources) -> tuple[Pinned, ...]:
    """The packages of the toolkit for a lock, by name.

    What the lock has keeps its version; the rest is looked up once, as of the lock's own moment.

    Raises:
        ResolutionError: the index does not have them, or did not have them yet.
        NetworkError: the index cannot be reached.
    """
    main = locked_content(lock, ("main",))
    locked = [
        Pinned(name=name, version=main[name].version, hashes=tuple(sorted(main[name].hashes)))
        for name in (*COMPILER, *RUNTIME, *LIBRARIES)
        if _is_taken(name, main, cuda)
    ]
    have = {package.name for package in locked}
    absent = {name: text for name, text in specifiers(cuda).items() if name not in have}
    return tuple(sorted([*locked, *_looked_up(absent, lock, cuda, sources)], key=lambda package: package.name))


def _is_taken(name: str, main: Content, cuda: str) -> bool:
    """Whether the lock's version of a package is the toolkit's."""
    return name in main and (name not in COMPILER or main[name].version.startswith(f"{cuda}."))


def _looked_up(wanted: Mapping[str, str], lock: LockDirectory, cuda: str, sources: WheelSources) -> tuple[Pinned, ...]:
    if not wanted:
        return ()
    base, moment = lock.lock.base, lock.lock.inputs.as_of
    limits: dict[str, Json] = {"platform": base.platform, "python": base.python, "glibc": base.glibc}
    if own := {name: list[Json](packages) for name, packages in lock.lock.indexes.items() if {*packages} & {*wanted}}:
        limits["indexes"] = dict[str, Json](own)
    key = digest_of({"packages": dict(wanted), "as_of": moment, **limits})

    def ask(entry: Path) -> None:
        with sources.workplace("toolkit") as work, work.reporter.step(f"look for the CUDA toolkit {cuda} on the index"):
            what = f"find the CUDA toolkit {cuda} on the package index"
            # As of the lock's moment, so that the toolkit is the same on every machine and day.
            undated = with_undated({}, lock.lock.inputs.not_held)
            dates: dict[str, Toml] = {"exclude-newer": moment, "exclude-newer-package": undated}
            settings = dates if lock.lock.inputs.as_of_held else {}
            own = locked_indexes(sources.site, lock.lock.indexes, lock.lock.title)
            releases = PackageIndex(base=sources.base, context=work, own=own, settings=settings).find(wanted, what)
        packages = tuple(_pinned(name, releases[canonicalize_name(name)]) for name in sorted(wanted))
        (entry / LIST_FILE).write_text(PinnedList(packages=packages).model_dump_json(indent=1) + "\n")

    kept = sources.store.get_or_build(LIST_KIND, key, ask).path / LIST_FILE
    return PinnedList.model_validate_json(kept.read_bytes()).packages


def _pinned(name: str, release: ResolvedPackage) -> Pinned:
    hashes = sorted(wheel.digest for wheel in release.wheels if wheel.digest)
    if not hashes:
        raise CheckRefusedError(
            f"no hash is known of {name} {release.version}",
            why="The place that has it states none, so a replaced file could not be noticed.",
            fix="Serve it from an index that states hashes.",
        )
    return Pinned(name=name, version=release.version, hashes=tuple(hashes))


def install_toolkit(packages: Sequence[Pinned], lock: LockDirectory, sources: WheelSources) -> Path:
    """The CUDA_HOME made of packages, in the store; installed when it is not there.

    It stays where it was made, and is named by the packages and their hashes.

    Raises:
        NetworkError: a package cannot be downloaded.
        BuildError: a package does not install.
        MachineError: its nvcc does not run here, or the disk is full.
    """
    listed: list[Json] = [[package.name, package.version, *package.hashes] for package in packages]
    key = digest_of({"format": FORMAT, "packages": listed})
    version = next(package.version for package in packages if package.name == NVCC)
    inside = Path("packages", "nvidia", f"cu{version.partition('.')[0]}")

    def is_whole(folder: Path) -> bool:
        return bool(cuda_version(folder / inside))

    def make(folder: Path) -> None:
        title = f"install the CUDA toolkit {version} from the index: {len(packages)} packages"
        with sources.reporter.step(title):
            _install(packages, folder, lock, sources)
            _lay_out(folder / inside)
        _refuse_broken(folder / inside, version)

    return sources.store.make_in_place(KIND, key, "CUDA toolkit", is_whole, make) / inside


def _install(packages: Sequence[Pinned], folder: Path, lock: LockDirectory, sources: WheelSources) -> None:
    what = "install the CUDA toolkit from the package index"
    log = sources.store.root / "logs" / "wheels" / "toolkit.log"
    indexes: dict[str, list[Pinned]] = {}
    for pinned_package in packages:
        component = lock.lock.components.get(pinned_package.name)
        indexes.setdefault((component and component.index) or "", []).append(pinned_package)

    def install(index: str, pinned: Sequence[Pinned]) -> None:
        requirements = folder / f"{index}requirements.txt"
        hashes = {one: " ".join(f"--hash={digest}" for digest in one.hashes) for one in pinned}
        lines = [f"{one.name}=={one.version} {text}" for one, text in hashes.items()]
        write_atomic(requirements, "\n".join(lines) + "\n")
        arguments: list[str | Path] = ["pip", "install", "--target", folder / "packages", "--python", sys.executable]
        arguments += ["--no-deps", "--require-hashes", "--requirements", requirements]

        def uv(*more: str) -> None:
            run_uv([*arguments, *more], what=what, log=log, cwd=folder, on_line=sources.reporter.update)

        try:
            uv("--offline")  # versions and hashes are fixed: what the cache has is as good
        except (ResolutionError, NetworkError):
            uv(*locked_torch(sources.site, lock.lock).args_for(index))

    try:
        for index, pinned in indexes.items():
            install(index, pinned)
    except ResolutionError as error:
        raise BuildError(
            f"cannot {what}",
            why=error.why,
            fix="The lines above are uv's own. A hash that differs means that the index serves another file than the "
            "one that was pinned: find out who changed it.",
            log=log,
        ) from error


def _lay_out(home: Path) -> None:
    """Make the packages' folder what linkers, CMake and torch expect of a CUDA_HOME.

    nvcc's own settings (bin/nvcc.profile) go by where nvcc is, and need nothing.
    """
    with machine_errors(home):
        for program in [*(home / "bin").glob("*"), *(home / "nvvm/bin").glob("*")]:
            if program.is_file() and not os.access(program, os.X_OK):
                program.chmod(program.stat().st_mode | 0o111)
        # torch.utils.cpp_extension links with -L$CUDA_HOME/lib64.
        if (home / "lib").is_dir() and not (home / "lib64").exists():
            (home / "lib64").symlink_to("lib")
        # Packages have libcudart.so.13 alone; the linker looks for libcudart.so where it is told -lcudart.
        for library in sorted((home / "lib").glob("lib*.so.*")):
            plain = library.with_name(library.name.partition(".so.")[0] + ".so")
            if not plain.exists():
                plain.symlink_to(library.name)


def _refuse_broken(home: Path, version: str) -> None:
    if there := cuda_version(home):
        if there.split(".")[:2] == version.split(".")[:2]:
            return
        why = f"It is {NVCC} {version}, and its nvcc reports {there}."
    else:
        why = f"{home / 'bin/nvcc'} is not there, or does not run."
    raise MachineError(
        f"the CUDA toolkit {version} of the package index does not work on this machine",
        why=why,
        fix="If its disk is mounted noexec, point ENVBUILD_CACHE_DIR at another one. Or install the CUDA toolkit and "
        "point CUDA_HOME at it.",
    )
