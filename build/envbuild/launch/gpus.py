"""The GPUs of this machine, and what of its driver must be seen inside an image.

An image has CUDA's libraries, and never the driver's: these belong to the kernel module that runs. A container runtime
mounts them; under bubblewrap we do. What is needed follows from the lists of libnvidia-container (its "utility" and
"compute" capabilities).
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.errors import CertificationCannotRunError
from envbuild.core.process import find_tool, run
from envbuild.core.sandbox import Bind

DEVICES = Path("/dev")
SYS = Path("/sys")
# Below /run, which is empty and private inside: the root is read-only and has no places for them.
INSIDE = "/run/nvidia"
# CUDA loads the first; nvidia-smi and NCCL, which asks for NVLink, the second.
NEEDED = ("libcuda.so.1", "libnvidia-ml.so.1")
_LIBRARY = re.compile(
    r"^lib(cuda|cudadebugger|nvidia-(ml|cfg|nvvm|ptxjitcompiler|gpucomp|allocator|opencl|fatbinaryloader|pkcs11\S*))"
    r"\.so(\.[\d.]+)?$"
)
_LISTED = re.compile(r"^\s+(?P<name>\S+) \((?P<kind>[^)]*)\) => (?P<path>/\S+)$", re.MULTILINE)
_KINDS = {"x86_64": "x86-64", "aarch64": "AArch64"}
_GPU = re.compile(r"^nvidia\d+$")
_OTHERS = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
QUERY = "index,name,driver_version"


@dataclass(frozen=True, kw_only=True)
class NvidiaDriver:
    """NVIDIA's driver on this machine: its devices, and its libraries by the names under which programs load them."""

    devices: tuple[Path, ...]
    libraries: Mapping[str, Path]
    programs: tuple[Path, ...]

    def binds(self) -> list[Bind]:
        """What to show inside."""
        shown = [Bind(source=device, target=str(device), device=True) for device in self.devices]
        shown += [Bind(source=path, target=f"{INSIDE}/lib/{name}") for name, path in self.libraries.items()]
        shown += [Bind(source=path, target=f"{INSIDE}/bin/{path.name}") for path in self.programs]
        # NCCL finds out there which GPUs are connected how.
        return [*shown, Bind(source=SYS, target=str(SYS))]

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """An image's variables, with the places of the driver in them."""
        environment = dict(variables)
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, (f"{INSIDE}/lib", variables.get("LD_LIBRARY_PATH"))))
        environment["PATH"] = ":".join(filter(None, (variables.get("PATH"), f"{INSIDE}/bin")))
        return environment


def find_driver(listed: str | None = None, devices: Path = DEVICES) -> NvidiaDriver:
    """The driver of this machine.

    Args:
        listed: what ``ldconfig -p`` prints.

    Raises:
        CertificationCannotRunError: there is none; reason ``no-driver``.
    """
    if listed is None:
        listed = run([find_tool("ldconfig", "libc-bin"), "-p"], what="list this machine's libraries").output
    libraries = driver_libraries(listed)
    missing = [name for name in NEEDED if name not in libraries]
    nodes = [path for path in sorted(devices.glob("nvidia*")) if _GPU.match(path.name)]
    if not nodes or not (devices / "nvidiactl").exists():
        raise no_driver(f"There is no GPU among the devices: {devices / 'nvidia0'} and {devices / 'nvidiactl'}.")
    if missing:
        raise no_driver(f"ldconfig does not know {' and '.join(missing)}, libraries of the driver.")
    others = [devices / name for name in _OTHERS if (devices / name).exists()]
    # Access to MIG instances goes by these (NVIDIA's MIG User Guide).
    others += sorted(devices.glob("nvidia-caps/*"))
    program = shutil.which("nvidia-smi")
    programs = (Path(program).resolve(),) if program else ()
    return NvidiaDriver(devices=(*nodes, *others), libraries=libraries, programs=programs)


def driver_libraries(listed: str) -> dict[str, Path]:
    """The driver's libraries among those that ``ldconfig -p`` lists for this processor."""
    kind = _KINDS.get(platform.machine(), "")
    libraries: dict[str, Path] = {}
    for line in _LISTED.finditer(listed):
        # ldconfig lists 32-bit libraries under the same names, without x86-64 in their kind; the loader takes the
        # first.
        if _LIBRARY.match(line["name"]) and kind in line["kind"].split(","):
            libraries.setdefault(line["name"], Path(line["path"]).resolve())
    return libraries


def no_driver(why: str) -> CertificationCannotRunError:
    """The error for a machine without GPUs that programs could use."""
    return CertificationCannotRunError(
        "this machine has no NVIDIA driver",
        why=why,
        fix="Run it on a machine with GPUs: `envbuild certify --plan-out DIR` writes what to run there, and "
        "`envbuild certify --judge DIR` judges what comes back. Or certify for target cpu.",
        reason="no-driver",
    )


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU of this machine, as nvidia-smi names it."""

    index: str
    name: str
    driver: str


def gpus_here() -> tuple[Gpu, ...]:
    """The GPUs of this machine; none without nvidia-smi, or where it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    finished = run([program, f"--query-gpu={QUERY}", "--format=csv,noheader"], what="ask for the GPUs", check=False)
    return parse_gpus(finished.output) if finished.status == 0 else ()


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """What nvidia-smi prints for ``QUERY``."""
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines() if line.strip()]
    return tuple(Gpu(index=row[0], name=row[1], driver=row[2]) for row in rows if len(row) == 3)
