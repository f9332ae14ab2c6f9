"""What each step of a docker build installs: a group of packages, its part of the lock, and uv's commands for it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.core.digests import short
from envbuild.image.docker.streams import Content
from envbuild.image.environment import BUILT, INSIDE, VENV
from envbuild.lock.record import PHASE_FILES, LockDirectory
from envbuild.sync.install import GIT_PHASE, HASHED_PHASES, LATER, SHARED_BUILD_PHASES, UV_OPTIONS
from envbuild.wheels.keeping.wheelhouse import Built

LOCK = f"{INSIDE}/lock"
TOOLS = f"{INSIDE}/tools"
# Wheels that a stage of the build makes, as steps of the image see them.
MADE = f"{INSIDE}/made"
# A step of the Dockerfile for all packages.
WHOLE = "environment"


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
    """The groups of a lock's packages, in the order in which they are installed."""
    return (Group(name=WHOLE, packages=dict(sorted(lock.packages().items()))),)


def plan_install(lock: LockDirectory, group: Group, built: Mapping[str, Built], made: Collection[str]) -> Install:
    """The step that installs a group.

    Args:
        built: wheels of the wheelhouse, by package.
        made: packages whose wheels the stage ``wheels`` makes.
    """
    ready = {canonicalize_name(name): item for name, item in built.items() if canonicalize_name(name) in group.packages}
    own = sorted(name for name in made if name in group.packages and name not in ready)
    files: dict[str, Content] = {f"lock/{group.name}/.keep": b"", f"built/{group.name}/.keep": b""}
    commands = []
    for phase in PHASE_FILES:
        wanted = [name for name in _blocks(lock, phase) if name in group.packages and name not in {*ready, *own}]
        if not wanted:
            continue
        path = f"{phase}.txt"
        blocks = _blocks(lock, phase)
        files[f"lock/{group.name}/{path}"] = "".join(blocks[name] for name in wanted).encode()
        options = ["--require-hashes"] if phase in HASHED_PHASES else []
        options += ["--no-build-isolation"] if phase in SHARED_BUILD_PHASES else []
        command = uv("pip", "install", *_into(), *options, '"$@"', "--requirements", f"{LOCK}/{path}")
        commands.append(command)
        commands += [f"{command} --reinstall-package {name}" for name in _again(group, wanted)]
    offline = ["--no-index", "--offline"]
    if ready:
        places = []
        for _, item in sorted(ready.items()):
            name = f"{short(item.record.digest)}/{item.wheel.name}"
            files[f"built/{group.name}/{name}"] = item.wheel
            places.append(f"{BUILT}/{name}")
        commands.append(uv("pip", "install", *_into(), *offline, *places))
    if own:
        pins = [f"{name}=={group.packages[name]}" for name in own]
        commands.append(uv("pip", "install", *_into(), *offline, "--find-links", MADE, *map(shlex.quote, pins)))
    return Install(group=group, files=files, commands=tuple(commands), built=bool(ready), made=bool(own))


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
    """Packages that come as sources and have no wheel yet: version by canonical name."""
    from envbuild.wheels.planning import buildable

    there = {canonicalize_name(name) for name in built}
    names = {canonicalize_name(name) for name in buildable(lock)} | {*_blocks(lock, GIT_PHASE)}
    return {name: version for name, version in sorted(lock.packages().items()) if name in names - there}
