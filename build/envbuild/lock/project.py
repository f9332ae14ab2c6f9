"""The uv project of a lock: a pyproject.toml that plain ``uv sync`` understands too."""

from __future__ import annotations

import re
from collections.abc import Mapping

import tomlkit

from envbuild.catalog.models import Base, Phase, Stack
from envbuild.core.errors import ConfigurationError
from envbuild.lock.torch_builds import PACKAGE_INDEX_BUILD, TorchSource

TORCH_INDEX_NAME = "torch-builds"


def requirement_of(name: str, version: str, extras: tuple[str, ...] = ()) -> str:
    """A PEP 508 requirement."""
    return f"{name}[{','.join(extras)}]{version}" if extras else f"{name}{version}"


def torch_specifier(version: str, build: str) -> str:
    """The specifier that takes one build only: ``==2.13.0`` and ``cpu`` give ``==2.13.0+cpu``.

    Raises:
        ConfigurationError: the version is a range; PEP 440 has no builds of ranges.
    """
    if build == PACKAGE_INDEX_BUILD:
        return version
    if not re.fullmatch(r"==[^*,+]+", version.replace(" ", "")):
        raise ConfigurationError(
            f"the stack asks for torch {version or 'of any version'} and the base for its +{build} build",
            why="Only an exact version can be taken in a named build.",
            fix="Write torch's version in the stack's file like '==2.13.0', or take the package index's own build: "
            "--torch-build index",
        )
    return f"{version.strip()}+{build}"


def render_project(
    *,
    name: str,
    stack: Stack,
    base: Base,
    torch_build: str,
    as_of: str,
    pins: Mapping[str, str] | None = None,
    source: TorchSource | None = None,
) -> str:
    """The text of pyproject.toml.

    Args:
        pins: every transitive version, as constraints, once they are known.
        source: where torch's build is; given only for the working copy, since a lock names no index.
    """
    phases: dict[Phase, list[str]] = {phase: [] for phase in Phase}
    for component, spec in stack.components.items():
        version = torch_specifier(spec.version, torch_build) if component == "torch" else spec.version
        phases[spec.phase].append(requirement_of(component, version, spec.extras))
    for package, requirement in stack.requirements.items():
        phases[Phase.MAIN].append(requirement_of(package, requirement.version))

    document = tomlkit.document()
    document.add(tomlkit.comment("Written by `envbuild lock`: the uv project of this lock, for plain `uv sync`."))
    if torch_build != PACKAGE_INDEX_BUILD:
        document.add(tomlkit.comment(f"Add --find-links with a place that has torch's +{torch_build} build."))
    document["project"] = {
        "name": f"envbuild-{name}",
        "version": "0",
        "requires-python": f"=={base.python.version}.*",
        "dependencies": _lines(phases[Phase.MAIN]),
        "optional-dependencies": {"compile": _lines(phases[Phase.COMPILE])},
    }
    machine = "x86_64" if base.platform == "linux/amd64" else "aarch64"
    marker = f"sys_platform == 'linux' and platform_machine == '{machine}' and implementation_name == 'cpython'"
    uv: dict[str, object] = {
        "package": False,
        "environments": [marker],
        "minimum-libc-version": {"glibc": base.glibc},
        "exclude-newer": as_of,
    }
    if torch_build != PACKAGE_INDEX_BUILD:
        # Wheels in a folder have no upload time; the exact version and its hash pin them instead.
        uv["exclude-newer-package"] = {"torch": False}
    if pins:
        uv["constraint-dependencies"] = _lines([f"{package}=={version}" for package, version in sorted(pins.items())])
    if source is not None and source.kind == "torch-index":
        uv["index"] = [{"name": TORCH_INDEX_NAME, "url": source.location, "explicit": True}]
        uv["sources"] = {"torch": {"index": TORCH_INDEX_NAME}}
    document["tool"] = {"uv": uv}
    return tomlkit.dumps(document)


def _lines(items: list[str]) -> tomlkit.items.Array:
    array = tomlkit.array()
    array.extend(items)
    return array.multiline(len(items) > 1)
