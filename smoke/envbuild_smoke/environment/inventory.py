"""What the environment consists of: Python, packages, files, GPUs."""

import importlib.util
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envbuild_smoke import cpu_shim
from envbuild_smoke.environment.distributions import distributions
from envbuild_smoke.plan.models import Device
from envbuild_smoke.results import Environment, EnvironmentGpu, Gpu

# Import names whose files are recorded: they show whether the host's packages were imported instead.
MODULES = {"torch": "torch", "megatron.core": "megatron-core"}


@dataclass(frozen=True, kw_only=True)
class ImportedModule:
    """A module that was really imported."""

    file: str | None
    version: str | None


def describe(
    device: Device, imported: Mapping[str, ImportedModule] | None = None, gpus: Sequence[Gpu] = ()
) -> Environment:
    """Return the environment; `imported` is what the fork server reported."""
    files = {name: find_file(name) for name in MODULES}
    # What was really imported counts for more than what would be.
    files.update({name: module.file for name, module in (imported or {}).items() if module.file})
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_count=len(os.sched_getaffinity(0)),
        versions={name: present[0] for name, present in versions().items()},
        files=files,
        device=device,
        gpus=tuple(EnvironmentGpu(name=gpu.name, memory=gpu.memory, driver=gpu.driver) for gpu in gpus),
        cuda_redirects=tuple(redirect.symbol for redirect in cpu_shim.PATCHED) if device == "cpu" else (),
    )


def versions() -> dict[str, list[str]]:
    """Return each installed distribution's versions by normalized name, the one in effect first."""
    by_name = {
        name: [each.version for each in installed if each.version] for name, installed in distributions().items()
    }
    return {name: present for name, present in by_name.items() if present}


def find_file(module: str) -> str | None:
    """Return the file a module would be imported from, without importing it; None if there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec else None
