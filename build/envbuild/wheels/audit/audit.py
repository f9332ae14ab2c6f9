"""A wheel is kept only when it is what was asked for: name, architectures, versions, libraries, symbols, imports."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from envbuild.catalog.fields import MACHINES
from envbuild.core.errors import CheckRefusedError
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.audit.binary import Binary, version_key
from envbuild.wheels.audit.elf import read_wheel
from envbuild.wheels.audit.load import load
from envbuild.wheels.audit.manylinux import OF_THE_DRIVER, Tag, too_new, true_tag
from envbuild.wheels.audit.prebuilt import site_packages_of
from envbuild.wheels.audit.retag import retagged
from envbuild.wheels.audit.symbols import missing_of_torch, shared_libraries
from envbuild.wheels.plan import WheelPlan

# On every glibc system that runs the base (PEP 600's policies allow them).
OF_THE_SYSTEM = re.compile(r"^(ld-linux\S*|lib(c|m|dl|rt|pthread|util|resolv|stdc\+\+|gcc_s))\.so\.\d+$")
_PLATFORM = re.compile(r"^(linux|manylinux_(?P<major>\d+)_(?P<minor>\d+))_(?P<machine>\w+)$")
# So many symbols are named; the others are counted.
SYMBOLS_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class AuditedWheel:
    """What a wheel was found to be.

    Attributes:
        wheel: the wheel with its true tag, which is the one to keep.
        glibc: the newest glibc whose symbols it uses; ``libstdcxx``: the newest GLIBCXX version.
        imported: modules that imported.
        not_imported: modules and libraries of which nothing is known yet, and why.
    """

    wheel: Path
    tag: Tag
    architectures: Architectures
    libraries: tuple[str, ...]
    glibc: str
    libstdcxx: str
    imported: tuple[str, ...]
    not_imported: Mapping[str, str]


def check_wheel(wheel: Path, plan: WheelPlan, environment: Path, scratch: Path, log: Path) -> AuditedWheel:
    """Check a wheel against its plan, in the environment with the lock's phase main, and give it its true tag.

    Args:
        scratch: a folder that the wheel is unpacked in; the one with another tag lies next to it.

    Raises:
        CheckRefusedError: it is not what was asked for; names everything that is wrong.
    """
    binaries = read_wheel(wheel)
    problems = [*_wrong_name(wheel, plan), *_wrong_members(wheel)]
    site_packages = site_packages_of(environment)
    provided = frozenset(path.name for path in shared_libraries(site_packages))
    problems += _wrong_content(binaries, plan, provided)
    problems += _wrong_torch(binaries, plan, site_packages)
    unknown: Mapping[str, str] = {}
    # Loading runs the wheel's own code: not of a wheel that is refused already.
    if not problems:
        loaded = load(wheel, [binary.name for binary in binaries if binary.machine], plan, environment, scratch, log)
        problems += loaded.problems
        unknown = loaded.unknown
    if problems:
        raise CheckRefusedError(
            f"the wheel of {plan.name} is refused",
            why="\n".join(problems),
            fix="It was not kept. What makes the build do otherwise belongs into "
            f"envs/wheels/{plan.parts.package}.toml; the log has its compiler commands.",
            log=log,
        )
    tag = true_tag(binaries, plan.parts.glibc, MACHINES[plan.parts.platform], provided) if binaries else _plain(wheel)
    return AuditedWheel(
        wheel=retagged(wheel, tag.platform, scratch.with_name(f"{scratch.name}-tagged")),
        tag=tag,
        architectures=sum((binary.architectures for binary in binaries), Architectures()),
        libraries=tuple(sorted({name for binary in binaries for name in binary.libraries})),
        glibc=max((binary.newest("GLIBC") for binary in binaries), key=version_key, default=""),
        libstdcxx=max((binary.newest("GLIBCXX") for binary in binaries), key=version_key, default=""),
        imported=tuple(name for name in plan.modules if name not in unknown),
        not_imported=unknown,
    )


def _plain(wheel: Path) -> Tag:
    """The tag that a wheel without compiled files has already."""
    return Tag(platform=wheel.stem.rpartition("-")[2], against=("it has no compiled files",))


def _wrong_members(wheel: Path) -> Iterable[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    # A zip file may hold names that lead out of the folder it is unpacked in.
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            yield f"{name} would be written outside of the environment."


def _wrong_name(wheel: Path, plan: WheelPlan) -> Iterable[str]:
    try:
        name, version, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        yield str(error)
        return
    parts = plan.parts
    # A local version counts too: 1.7.0+cu130 is another build than the 1.7.0 that was locked.
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
    # Of an abi3 wheel the tag is the oldest CPython that it runs on (PEP 425); other interpreters' tags fit none.
    digits = tag.removeprefix("cp3")
    return int(digits) if digits.isdigit() else 1000


def _wrong_platform(platform: str, plan: WheelPlan) -> Iterable[str]:
    match = _PLATFORM.match(platform)
    if match is None or match["machine"] != MACHINES[plan.parts.platform]:
        yield f"Its platform tag {platform} is not for {plan.parts.platform}."
    elif match["major"] and (int(match["major"]), int(match["minor"])) > version_key(plan.parts.glibc):
        yield f"Its platform tag {platform} asks for a newer glibc than the base's {plan.parts.glibc}."


def _wrong_content(binaries: Sequence[Binary], plan: WheelPlan, provided: frozenset[str]) -> Iterable[str]:
    actual = sum((binary.architectures for binary in binaries), Architectures())
    # Neither more nor less: a missing SM fails on the node, a foreign one makes the wheel and its build larger.
    if actual != plan.expected:
        yield f"It contains {actual.text()}; asked for was {plan.expected.text()}."
    own = {Path(binary.name).name for binary in binaries}
    machine = MACHINES[plan.parts.platform]
    for binary in binaries:
        if binary.machine not in ("", machine):
            yield f"{binary.name} is for {binary.machine}, not {machine}."
        # The machine that compiled it may have a newer glibc than the base.
        yield from too_new(binary, plan.parts.glibc, machine)
        absent = [name for name in binary.libraries if name not in own | provided and not _everywhere(name)]
        if absent:
            yield f"{binary.name} needs {', '.join(absent)}, which the locked environment does not have."


def _everywhere(library: str) -> bool:
    return bool(OF_THE_SYSTEM.match(library) or OF_THE_DRIVER.match(library))


def _wrong_torch(binaries: Sequence[Binary], plan: WheelPlan, site_packages: Path) -> Iterable[str]:
    missing = missing_of_torch(binaries, site_packages, plan.recipe.foreign_symbols)
    for file, names in missing.items():
        more = f" and {len(names) - SYMBOLS_NAMED} more" if len(names) > SYMBOLS_NAMED else ""
        yield (
            f"{file} was compiled against another torch: the locked one ({plan.parts.torch.version}) has no "
            f"{', '.join(names[:SYMBOLS_NAMED])}{more}."
        )
