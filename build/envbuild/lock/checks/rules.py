"""Checks before a lock is accepted: what resolves need not install, import or train.

Each check has a code. A finding refuses the lock unless ``--allow`` lets it pass, and then the record says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envbuild.catalog import knowledge
from envbuild.catalog.base import Base
from envbuild.catalog.conflict import Conflict, baselines, known_wrong
from envbuild.catalog.matrix import Matrix
from envbuild.catalog.models import Target
from envbuild.lock.checks.findings import CheckFinding
from envbuild.lock.components.downloads import base_tags, tags_of
from envbuild.lock.uv.cuda_packages import cuda_packages
from envbuild.lock.uv.program import KNOW_THE_KEYS
from envbuild.lock.uv_lock import ResolvedPackage

_NVIDIA_FOLDER = re.compile(r"^\{site_packages\}/nvidia/(\w+)(?:/(.*))?$")
# Folders below nvidia/ that one package brings.
_OWN_FOLDERS = frozenset(["cublas", "cuda_cupti", "cuda_nvrtc", "cuda_runtime", "cudnn", "cufft", "nccl", "nvjitlink"])


@dataclass(frozen=True, kw_only=True)
class CheckInput:
    """What the checks look at.

    Attributes:
        packages: those of uv.lock, without the project itself.
        conflicts: known conflicts, by code.
        torch_build: the build of torch that was asked for.
        targets: those that the stack names the base for.
        asked: the specifiers of the stack, by package.
        variables: what the stack sets in the finished environment.
        bases: all bases that the stack names.
        driver_problem: what the stack's driver misses, for people; empty: nothing.
        ignored_settings: uv's message about the settings of the project that it dropped; empty: it dropped none.
        matrix: the stack's.
    """

    packages: tuple[ResolvedPackage, ...]
    base: Base
    targets: Mapping[str, Target]
    conflicts: Mapping[str, Conflict]
    torch_build: str
    asked: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, Base] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    driver_problem: str = ""
    ignored_settings: str = ""
    matrix: Matrix | None = None

    def version(self, name: str) -> str | None:
        """The locked version of a package, or the one that the base provides."""
        for package in self.packages:
            if package.name == name:
                return package.version or "0"
        return self.base.provides.get(name)


def check_installable(lock: CheckInput) -> Iterable[CheckFinding]:
    """A package must have an sdist, or a wheel for the base's Python, platform and glibc."""
    # uv 0.13.8 looks at the platform of a wheel and not at its ABI: one for a Python without its global lock is enough
    # for it (test_each_check_refuses_what_uv_resolves_and_its_code_allows_it).
    tags = base_tags(lock.base)
    for package in lock.packages:
        wheels = [wheel.name for wheel in package.wheels]
        if not wheels or package.sdist is not None or any(tags_of(name) & tags for name in wheels):
            continue
        newest = _needed_glibc(wheels)
        why = f"its wheels need glibc {newest}" if newest else "no wheel is for its Python and platform"
        yield CheckFinding(
            code="glibc",
            what=f"{package.title} cannot be installed on the base (glibc {lock.base.glibc}, "
            f"Python {lock.base.python.version}): {why}, and it has no sdist",
            fix="Hold it back under [requirements] of the stack, or choose a base with a newer glibc.",
            packages=(package.name,),
        )


def _needed_glibc(wheels: list[str]) -> str | None:
    minors = [int(minor) for name in wheels for minor in re.findall(r"manylinux_2_(\d+)_", name)]
    return f"2.{min(minors)}" if minors else None


def check_cuda_mix(lock: CheckInput) -> Iterable[CheckFinding]:
    """One CUDA major version in an environment."""
    by_major = cuda_packages(lock.packages)
    wanted = lock.base.cuda_major
    majors = set(by_major) | ({wanted} if wanted else set())
    # The package index's torch on a base without CUDA is a choice of the user's; a cpu build among CUDA is a mistake.
    if len(majors) > 1 or (by_major and lock.torch_build == "cpu"):
        held = "; ".join(f"CUDA {major}: {', '.join(sorted(names)[:6])}" for major, names in sorted(by_major.items()))
        fitting = [name for name, base in lock.bases.items() if base.cuda_major in by_major]
        other = f"another base (the stack names {', '.join(fitting)})" if fitting else "another base"
        yield CheckFinding(
            code="cuda-mixed",
            what=f"packages for CUDA {' and '.join(sorted(by_major))} on a base with CUDA {lock.base.cuda or 'none'}: "
            f"{held}",
            fix=f"Choose versions (of torch, of Transformer Engine's core extra) for the base's CUDA, or {other}.",
            packages=_needing(lock, {name for major in majors - {wanted} for name in by_major.get(major, ())}),
            subject=" ".join(sorted(majors)),
        )


def _needing(lock: CheckInput, wrong: set[str]) -> tuple[str, ...]:
    """The packages that need these, of which another version may need others: those that need most come first."""
    counted = {
        package.name: len(wrong.intersection(needed.name for needed in package.needs))
        for package in lock.packages
        if package.name not in wrong
    }
    needing = sorted((name for name, count in counted.items() if count), key=lambda name: -counted[name])
    return tuple(needing) or tuple(sorted(wrong))


def check_targets(lock: CheckInput) -> Iterable[CheckFinding]:
    """The CUDA of torch must know each target's SMs and run on its fleet's driver."""
    # torch brings its CUDA: up to 2.10 as nvidia-cuda-runtime-cu12, from 2.11 as cuda-toolkit.
    cuda = lock.version("cuda-toolkit") or lock.version("nvidia-cuda-runtime-cu12") or lock.base.cuda
    if cuda is None:
        return
    for name, target in lock.targets.items():
        for sm in target.sm:
            # 90a and 100f are SM 90 and 100 with what only this architecture, or its family, has.
            if (problem := sm_problem(sm.rstrip("af"), cuda)) is not None:
                yield CheckFinding(
                    code="sm-floor",
                    what=f"target {name} has SM {sm}, which CUDA {cuda} (torch {lock.version('torch')}) does not know; "
                    f"{problem}",
                    fix="Choose a torch for another CUDA, or leave the target out of the stack.",
                    packages=("torch",),
                    subject=f"{name} {sm}",
                )
        oldest = knowledge.cuda().oldest_driver.get(cuda.split(".")[0])
        if target.driver and oldest and Version(target.driver) < Version(oldest):
            yield CheckFinding(
                code="driver",
                what=f"CUDA {cuda} takes driver {oldest} or newer; the fleet of target {name} has {target.driver}",
                fix="Choose a torch for an older CUDA, or update the fleet's driver and the target's file.",
                packages=("torch",),
                subject=name,
            )


def sm_problem(sm: str, cuda: str) -> str | None:
    first_cuda = knowledge.cuda().first_cuda
    first, without = first_cuda.get(sm), knowledge.cuda().dropped_by.get(sm)
    if first is None:
        return f"envbuild knows {', '.join(sorted(first_cuda, key=int))}"
    if Version(cuda) < Version(first):
        return f"it takes {first} or newer"
    if without is not None and Version(cuda) >= Version(without):
        return f"{without} dropped it"
    return None


def check_variables(lock: CheckInput) -> Iterable[CheckFinding]:
    """A variable that names a folder of NVIDIA's wheels names one that the locked packages bring."""
    for variable, value in lock.variables.items():
        for folder in value.split(":"):
            if (brings := _bringing(folder)) and not any(
                brings.match(f"{package.name} {package.version or '0'}") for package in lock.packages
            ):
                yield CheckFinding(
                    code="variable-folder",
                    what=f"{variable} names {folder}, and no package of the lock brings that folder",
                    fix=f"Correct [environment.{variable}] of the stack: value_for_cuda has a value for each CUDA; "
                    "CUDA 12's headers are in nvidia/cuda_runtime/include, 13's in nvidia/cu13/include.",
                    subject=f"{variable} {folder}",
                )


def _bringing(folder: str) -> re.Pattern[str] | None:
    """What packages that bring a folder look like as ``NAME VERSION``; None: nothing is known of the folder."""
    if (match := _NVIDIA_FOLDER.match(folder)) is None:
        return None
    part, inside = match[1], match[2] or ""
    # From CUDA 13 on all wheels of the toolkit share one folder; before, and of other libraries, each has its own
    # (read in the wheels of torch 2.7.0, 2.10.0 and 2.11.0).
    if joint := re.fullmatch(r"cu(\d\d)", part):
        name = "cuda-runtime" if inside.startswith("include") else r"(cublas|cuda-\w+)"
        return re.compile(rf"nvidia-{name} {joint[1]}\.")
    return re.compile(rf"nvidia-{part.replace('_', '-')}-cu\d\d ") if part in _OWN_FOLDERS else None


def check_provided(lock: CheckInput) -> Iterable[CheckFinding]:
    """What the base brings is what the stack asks for."""
    for name, specifier in lock.asked.items():
        version = provided_version(lock.base, name)
        if version is None or SpecifierSet(specifier).contains(version, prereleases=True):
            continue
        yield CheckFinding(
            code="base-provides",
            what=f"the base brings {name} {lock.version(name)}, which no lock replaces, and the stack asks for "
            f"{name}{specifier}",
            fix="Choose a base that brings such a version, or relax the stack's.",
            subject=name,
        )


def provided_version(base: Base, name: str) -> str | None:
    """The release that a package of the base counts as; None for what it does not bring.

    A vendor's 2.9.0a0+50eac81 is its build of 2.9.0.
    """
    version = base.provides.get(name)
    return None if version is None else Version(version).base_version


def check_conflicts(lock: CheckInput) -> Iterable[CheckFinding]:
    """Pairs known not to work although their metadata allows them (envs/conflicts/)."""
    for code, conflict in lock.conflicts.items():
        versions = {name: lock.version(name) for name in conflict.packages}
        if not conflict.cases and conflict.is_about(versions):
            pair = " with ".join(f"{name} {version}" for name, version in versions.items())
            yield CheckFinding(
                code=code,
                what=f"{pair}: {conflict.summary} (evidence: {conflict.evidence})",
                fix=conflict.fix,
                packages=tuple(conflict.packages),
            )


def check_baselines(lock: CheckInput) -> Iterable[CheckFinding]:
    """The stack's matrix has a baseline that these versions are not known to train wrongly."""
    versions = {name: lock.version(name) for conflict in lock.conflicts.values() for name in conflict.packages}
    entries = known_wrong(lock.conflicts, versions)
    trained = list(baselines(lock.matrix)) if lock.matrix and entries else []
    wrong = [[code for code, entry in entries.items() if entry.affects(values)] for values in trained]
    if not wrong or not all(wrong):
        return
    for code in dict.fromkeys(code for codes in wrong for code in codes):
        entry = entries[code]
        packages = ", ".join(f"{name} {versions[name]}" for name in entry.packages)
        yield CheckFinding(
            code=code,
            what=f"{packages} trains every baseline of the stack's matrix wrongly: {entry.summary} (evidence: "
            f"{entry.evidence})",
            fix=entry.fix,
            packages=tuple(entry.packages),
        )


def check_forks(lock: CheckInput) -> Iterable[CheckFinding]:
    """A package is there in one version."""
    versions: dict[str, list[str]] = {}
    for package in lock.packages:
        versions.setdefault(package.name, []).append(package.version or "0")
    for name, locked in versions.items():
        if len(locked) < 2:
            continue
        needing = [
            package.name
            for package in lock.packages
            # uv.lock states the version of an edge only where a package is there more than once.
            if any(needed.name == name and needed.version for needed in package.dependencies)
        ]
        who = f" (needed by {', '.join(needing)})" if needing else ""
        yield CheckFinding(
            code="forks",
            what=f"{name} is locked {len(locked)} times, {', '.join(locked)}, each under a marker{who}: which one is "
            "installed is decided by the machine and not by the lock",
            fix=f"Hold {name} to one version under [requirements] of the stack, or choose another version of what "
            "needs both.",
            packages=(name, *needing),
            subject=name,
        )


def check_settings(lock: CheckInput) -> Iterable[CheckFinding]:
    """Uv took all settings of the project."""
    if lock.ignored_settings:
        yield CheckFinding(
            code="uv-settings",
            what="uv dropped settings of the project, the as-of moment among them (it does so when it does not know a "
            f"key of [tool.uv]):\n{lock.ignored_settings}",
            fix=KNOW_THE_KEYS,
        )


def check_collection(lock: CheckInput) -> Iterable[CheckFinding]:
    """Driver ``nemo`` needs NeMo's LLM collection, which 3.0 removed."""
    if lock.driver_problem:
        yield CheckFinding(
            code="driver-collection",
            what=f"the stack's driver is nemo, and {lock.driver_problem}: its recipes are not there",
            fix='Take a nemo-toolkit before 3.0, or driver = "bridge" with megatron-bridge.',
            packages=("nemo-toolkit",),
        )


CHECKS: tuple[Callable[[CheckInput], Iterable[CheckFinding]], ...] = (
    check_installable,
    check_cuda_mix,
    check_targets,
    check_variables,
    check_provided,
    check_conflicts,
    check_baselines,
    check_forks,
    check_settings,
    check_collection,
)


def run_checks(lock: CheckInput) -> tuple[CheckFinding, ...]:
    """The findings of all checks, in their order."""
    return tuple(finding for check in CHECKS for finding in check(lock))
