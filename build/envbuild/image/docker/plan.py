"""What each step of a docker build installs: a group of packages, its part of the lock, and uv's commands for it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.core.digests import Json, canonical_json, short
from envbuild.image.docker.streams import Content
from envbuild.image.layers.install import SOURCES, version_variable
from envbuild.image.layers.policy import layering, split
from envbuild.image.layers.sandbox import BUILT, INSIDE, VENV
from envbuild.lock.lockfile import PHASE_FILES, LockDirectory, LockedComponent
from envbuild.sync.install import HASHED_PHASES, LATER, SHARED_BUILD_PHASES, UV_OPTIONS
from envbuild.wheels.cache.wheelhouse import Built
from envbuild.wheels.plan import buildable

LOCK = f"{INSIDE}/lock"
TOOLS = f"{INSIDE}/tools"
# Wheels that a stage of the build makes, as steps of the image see them.
MADE = f"{INSIDE}/made"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Packages that are installed by one step: version by canonical name."""

    name: str
    packages: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Install:
    """A step that installs a group.

    Attributes:
        files: of the context: its part of the lock, and its wheels.
        commands: of the shell, one after the other.
        built: wheels of the wheelhouse are mounted for it.
        made: wheels that the stage ``wheels`` makes are mounted for it.
    """

    group: Group
    files: Mapping[str, Content]
    commands: tuple[str, ...]
    built: bool
    made: bool


def groups_of(lock: LockDirectory) -> tuple[Group, ...]:
    """The groups of a lock's packages, in the order in which they are installed: the layers of the native builder."""
    locked = {str(canonicalize_name(name)): version for name, version in lock.packages().items()}
    return tuple(
        Group(name=name, packages={package: locked[package] for package in packages})
        for name, packages in split(lock, layering()).items()
    )


def plan_install(lock: LockDirectory, group: Group, built: Mapping[str, Built], made: Collection[str]) -> Install:
    """The step that installs a group.

    Args:
        built: wheels of the wheelhouse, by package.
        made: packages whose wheels the stage ``wheels`` makes.
    """
    ready = {canonicalize_name(name): item for name, item in built.items() if canonicalize_name(name) in group.packages}
    own = sorted(name for name in made if name in group.packages and name not in ready)
    trees = {name: item for name, item in commits_of(lock, group.packages).items() if name not in {*ready, *own}}
    files: dict[str, Content] = {}
    commands, places = [], []
    for _, item in sorted(ready.items()):
        place = f"{short(item.record.digest)}/{item.wheel.name}"
        files[f"built/{group.name}/{place}"] = item.wheel
        places.append(f"{BUILT}/{place}")
    commits = commits_of(lock, own)
    places += [f"{MADE}/{name.replace('-', '_')}-*.whl" for name in commits]
    for package, tree in sorted(trees.items()):
        # Builds write into their sources.
        archive, place = f"{BUILT}/{package}.tar.gz", f"{SOURCES}/{package}-{tree.commit}"
        commands.append(f"mkdir -p {place} && tar -xzf {archive} -C {place} --strip-components=1")
        commands.append(f"export {version_variable(package)}={shlex.quote(tree.version)}")
        places.append(f"{place}/{tree.subdirectory or ''}".rstrip("/"))
    if places:
        isolation = ["--no-build-isolation"] if trees else []
        commands.append(uv("pip", "install", *_into(), "--no-index", "--offline", *isolation, *places))
    if pins := [shlex.quote(f"{name}=={group.packages[name]}") for name in own if name not in commits]:
        commands.append(uv("pip", "install", *_into(), "--no-index", "--offline", "--find-links", MADE, *pins))
    installs = _from_files(lock, group, {*ready, *own, *trees}, files)
    commands += installs
    step = f"{LOCK}/step.json"
    if installs and len(group.packages) > 1:
        commands.append(f"again=$(@PYTHON@ -S -s {TOOLS}/settle.py winners @SITE_PACKAGES@ {step})")
        commands += [f"for name in $again; do {text} --reinstall-package $name || exit 1; done" for text in installs]
    files[f"lock/{group.name}/step.json"] = step_file(lock, group.packages)
    return Install(group=group, files=files, commands=tuple(commands), built=bool(ready or trees), made=bool(own))


def _from_files(lock: LockDirectory, group: Group, done: Collection[str], files: dict[str, Content]) -> list[str]:
    """The commands that install what comes from an index, phase by phase; ``files`` gets their requirements."""
    commands = []
    for phase in PHASE_FILES:
        blocks = _blocks(lock, phase)
        wanted = [name for name in blocks if name in group.packages and name not in done]
        if not wanted:
            continue
        files[f"lock/{group.name}/{phase}.txt"] = "".join(blocks[name] for name in wanted).encode()
        options = ["--require-hashes"] if phase in HASHED_PHASES else []
        options += ["--no-build-isolation"] if phase in SHARED_BUILD_PHASES else []
        command = uv("pip", "install", *_into(), *options, '"$@"', "--requirements", f"{LOCK}/{phase}.txt")
        commands.append(command)
        commands += [f"{command} --reinstall-package {name}" for name in _again(group, wanted)]
    return commands


def step_file(lock: LockDirectory, packages: Collection[str]) -> bytes:
    """What settle.py has to know of a step."""
    commits: dict[str, Json] = {
        name: [item.git, item.commit, item.subdirectory] for name, item in commits_of(lock, packages).items()
    }
    return canonical_json(
        {
            "packages": tuple(sorted(packages)),
            "commits": commits,
            "overlaps": layering().overlaps,
            "later": tuple(LATER),
        }
    )


def commits_of(lock: LockDirectory, packages: Collection[str]) -> dict[str, LockedComponent]:
    """The packages that come from git, by canonical name."""
    known = {str(canonicalize_name(name)): item for name, item in lock.lock.components.items()}
    return {name: item for name, item in known.items() if name in packages and item.git and item.commit}


def requirements_of(lock: LockDirectory, phase: str) -> bytes:
    """The requirements file of a phase without its comments; empty where the phase is."""
    return "".join(_blocks(lock, phase).values()).encode()


def uv(*words: str) -> str:
    """A command of uv, as steps run it."""
    return " ".join([f"{TOOLS}/uv", *words, *UV_OPTIONS])


def _into() -> list[str]:
    return ["--python", f"{VENV}/bin/python", "--no-deps"]


def _again(group: Group, wanted: Iterable[str]) -> list[str]:
    """Packages that must be installed again over others: see LATER."""
    return [name for name in wanted if name in LATER and group.packages[name] in SpecifierSet(LATER[name])]


def _blocks(lock: LockDirectory, phase: str) -> dict[str, str]:
    """The lines of a phase's requirements file, by package."""
    file = lock.file(phase)
    if file is None:
        return {}
    found: dict[str, str] = {}
    for block in re.split(r"^(?=[A-Za-z0-9])", file.read_text(encoding="utf-8"), flags=re.MULTILINE):
        if block[:1].isalnum():
            lines = [line for line in block.splitlines(keepends=True) if not line.lstrip().startswith("#")]
            name = re.split(r"[\s\[=@;]", block, maxsplit=1)[0]
            found[canonicalize_name(name)] = "".join(lines)
    return found


def unbuilt(lock: LockDirectory, built: Collection[str]) -> dict[str, str]:
    """Packages of phase compile that come as sources and have no wheel yet: version by canonical name."""
    there = {canonicalize_name(name) for name in built}
    names = {canonicalize_name(name) for name in buildable(lock)}
    locked = {canonicalize_name(name): version for name, version in lock.packages().items()}
    return {name: version for name, version in sorted(locked.items()) if name in names - there}
