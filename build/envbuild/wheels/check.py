"""A wheel is kept only when it is what was asked for: name, tag, architectures, glibc, libraries, symbols, import."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from envbuild.catalog.models import MACHINES
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.core.process import run
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.elf import Binary, read_wheel, version_key
from envbuild.wheels.planning import WheelPlan

# On every glibc system that runs the base (PEP 600's policies allow them), and NVIDIA's driver, which no wheel brings.
OF_THE_SYSTEM = re.compile(r"^(ld-linux\S*|lib(c|m|dl|rt|pthread|util|resolv|stdc\+\+|gcc_s|cuda|nvidia-ml))\.so\.\d+$")
_PLATFORM = re.compile(r"^(linux|manylinux_(?P<major>\d+)_(?P<minor>\d+))_(?P<machine>\w+)$")
LOAD_SECONDS = 600
# Loads every library with all its symbols bound, after torch where there is one, then imports modules.
_PROBE = """
import ctypes, importlib, json, os, sys
folder, libraries, modules = json.loads(sys.argv[1])
sys.path.insert(0, folder)
try:
    import torch
except ModuleNotFoundError:
    pass
found = {"libraries": {}, "modules": {}}
for name in libraries:
    try:
        ctypes.CDLL(os.path.join(folder, name), mode=os.RTLD_NOW)
    except OSError as error:
        found["libraries"][name] = str(error)
for name in modules:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        found["modules"][name] = ["missing", str(error), error.name or ""]
    except ImportError as error:
        found["modules"][name] = ["import", str(error), ""]
    except Exception as error:
        found["modules"][name] = ["other", f"{type(error).__name__}: {error}", ""]
print("\\n@found " + json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a wheel was found to be.

    Attributes:
        imported: modules that imported.
        not_imported: modules and libraries of which nothing is known yet, and why.
    """

    architectures: Architectures
    libraries: tuple[str, ...]
    glibc: str
    imported: tuple[str, ...]
    not_imported: Mapping[str, str]


def check_wheel(wheel: Path, plan: WheelPlan, environment: Path, scratch: Path, log: Path) -> Checked:
    """Check a wheel against its plan, in the environment with the lock's phase main.

    Args:
        scratch: a folder that the wheel is unpacked in.

    Raises:
        CheckRefusedError: it is not what was asked for; names everything that is wrong.
    """
    problems = list(_wrong_name(wheel, plan))
    binaries = read_wheel(wheel)
    site_packages = next(iter(sorted((environment / "lib").glob("python3.*/site-packages"))), environment)
    problems += _wrong_content(binaries, plan, _provided(site_packages))
    if not problems:
        loaded = _load(wheel, binaries, plan, environment, scratch, log)
        problems += loaded.problems
    if problems:
        raise CheckRefusedError(
            f"the wheel of {plan.name} is refused",
            why="\n".join(problems),
            fix="It was not kept. What makes the build do otherwise belongs into "
            f"envs/wheels/{plan.parts.package}.toml; the log has its compiler commands.",
            log=log,
        )
    return Checked(
        architectures=sum((item.architectures for item in binaries), Architectures()),
        libraries=tuple(sorted({name for item in binaries for name in item.libraries})),
        glibc=max((item.glibc for item in binaries), key=version_key, default=""),
        imported=tuple(name for name in plan.modules if name not in loaded.unknown),
        not_imported=loaded.unknown,
    )


def _wrong_name(wheel: Path, plan: WheelPlan) -> Iterable[str]:
    try:
        name, version, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        yield str(error)
        return
    parts = plan.parts
    if canonicalize_name(name) != parts.package or version != Version(parts.version):
        yield f"It is {name} {version}, not {plan.name}."
    for tag in tags:
        if tag.interpreter not in (parts.python, "py3") and not (
            tag.abi == "abi3" and _python(tag.interpreter) <= _python(parts.python)
        ):
            yield f"Its tag {tag} is not for {parts.python}."
        if tag.platform != "any":
            yield from _wrong_platform(tag.platform, plan)


def _python(tag: str) -> int:
    digits = tag.removeprefix("cp3")
    return int(digits) if digits.isdigit() else 1000


def _wrong_platform(platform: str, plan: WheelPlan) -> Iterable[str]:
    match = _PLATFORM.match(platform)
    if match is None or match["machine"] != MACHINES[plan.parts.platform]:
        yield f"Its platform tag {platform} is not for {plan.parts.platform}."
    elif match["major"] and (int(match["major"]), int(match["minor"])) > version_key(plan.parts.glibc):
        yield f"Its platform tag {platform} asks for a newer glibc than the base's {plan.parts.glibc}."


def _wrong_content(binaries: Sequence[Binary], plan: WheelPlan, provided: frozenset[str]) -> Iterable[str]:
    found = sum((item.architectures for item in binaries), Architectures())
    if found != plan.expected:
        yield f"It contains {found.text()}; asked for was {plan.expected.text()}."
    own = {Path(item.name).name for item in binaries}
    for item in binaries:
        if item.glibc and version_key(item.glibc) > version_key(plan.parts.glibc):
            yield f"{item.name} needs glibc {item.glibc}, and the base has {plan.parts.glibc}."
        absent = [name for name in item.libraries if name not in own | provided and not OF_THE_SYSTEM.match(name)]
        if absent:
            yield f"{item.name} needs {', '.join(absent)}, which the locked environment does not have."


def _provided(site_packages: Path) -> frozenset[str]:
    """The names of all shared libraries in an environment."""
    found: set[str] = set()
    for _, _, names in os.walk(site_packages):
        found.update(name for name in names if ".so" in name)
    return frozenset(found)


@dataclass(frozen=True)
class _Loaded:
    problems: list[str]
    unknown: dict[str, str]


def _load(
    wheel: Path, binaries: Sequence[Binary], plan: WheelPlan, environment: Path, scratch: Path, log: Path
) -> _Loaded:
    with machine_errors(scratch), zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
    job = json.dumps([str(scratch), [item.name for item in binaries], list(plan.modules)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_", "VIRTUAL_ENV"))}
    finished = run(
        [environment / "bin" / "python", "-I", "-c", _PROBE, job],
        what=f"load what {plan.name} contains",
        log=log,
        env=kept,
        cwd=scratch,
        timeout_seconds=LOAD_SECONDS,
        error=CheckRefusedError,
        fix="It was not kept. It ended the interpreter that loaded it, or did not come back.",
    )
    # Libraries may print, also when the interpreter ends.
    found = json.loads(finished.output.rpartition("\n@found ")[2].splitlines()[0])
    problems: list[str] = []
    unknown: dict[str, str] = {}
    for name, why in found["libraries"].items():
        if _of_driver(why) or is_foreign(why, plan.recipe.foreign_symbols):
            unknown[name] = why
        else:
            problems.append(f"{name} does not load: {why}")
    for name, (kind, why, missing) in found["modules"].items():
        # Another package of the compile phase, which is not installed here; the import check of `sync` has it.
        elsewhere = kind == "missing" and not (scratch / missing.split(".")[0]).exists()
        if elsewhere or kind == "other" or _of_driver(why):
            unknown[name] = why
        else:
            problems.append(f"module {name} does not import: {why}")
    return _Loaded(problems, unknown)


def is_foreign(why: str, beginnings: Sequence[str]) -> bool:
    """Whether a library did not load for want of a symbol that another package's library brings."""
    # A C++ function outside namespaces is _Z, the length of its name, and its name (Itanium C++ ABI, "Mangling").
    match = re.search(r"undefined symbol: (?:_Z\d+)?(\w+)", why)
    return match is not None and match[1].startswith(tuple(beginnings))


def _of_driver(why: str) -> bool:
    """Whether a library is missing that only a machine with NVIDIA's driver has."""
    return bool(re.search(r"lib(cuda|nvidia-ml)\.so\.1: cannot open shared object file", why))
