"""What packing an image of about 3 GB into a .sqsh costs, against mksquashfs of an unpacked directory in the same run.

The image is torch's CPU build four times over, in a layer each. mksquashfs keeps equal files once, so in each copy the
bytes are others (each combined with a number by exclusive or): they compress as well, and are not equal.

    benchmarks/bench_sqsh.py [--repeats N] [--keep DIR]

`--keep` takes the image from that directory, or leaves it there.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import stat
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from envbuild.image.squashfs.compression import DEFAULT
from envbuild.image.squashfs.pack import SqshSource, write_sqsh
from envbuild.oci.models import RunConfig
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.layer_writer import LayerWriter, walk
from envbuild.rootfs.unpack import unpack

EPOCH = 1_700_000_000
# Looking costs processor time that is counted too.
SAMPLE_SECONDS = 0.5
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
COPIES = (0x00, 0x5A, 0xA5, 0x33)
LIMIT_SECONDS = 15.0
LIMIT_RATIO = 0.55
LIMIT_MEMORY_BYTES = 1 << 30
# `enroot import` of an image of this size on 2 processors, from a registry; and how much faster is asked for.
ENROOT_SECONDS = 59.0
ENROOT_FACTOR = 4.0


def torch_environment(folder: Path) -> Path:
    venv = folder / "venv"
    subprocess.run(["uv", "venv", "--quiet", venv], check=True)
    install = ["uv", "pip", "install", "--quiet", "--link-mode", "copy", "--python", venv / "bin/python"]
    # What pip finds links in, uv is told of here; without either, the wheel is on PyTorch's own index.
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or TORCH_INDEX
    subprocess.run([*install, "--find-links", links, TORCH], check=True)
    return venv


def write_layer(path: Path, tree: Path, copy: int, number: int) -> None:
    table = bytes(byte ^ number for byte in range(256))
    with LayerWriter(path, EPOCH) as writer:
        for file, relative, info in walk(tree):
            name = f"opt/copy{copy}/{relative}"
            if stat.S_ISDIR(info.st_mode):
                writer.add_directory(name)
            elif stat.S_ISREG(info.st_mode):
                writer.add_bytes(name, file.read_bytes().translate(table), stat.S_IMODE(info.st_mode))


def image(folder: Path) -> list[Path]:
    layers = [folder / f"layer{copy}.tar.gz" for copy in range(len(COPIES))]
    if not all(layer.is_file() for layer in layers):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            tree = torch_environment(Path(scratch))
            for copy, (layer, number) in enumerate(zip(layers, COPIES, strict=True)):
                write_layer(layer, tree, copy, number)
    return layers


class Watch(threading.Thread):
    """The most memory that this process and its children have at a time, and the most disk that a folder takes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self._over = threading.Event()
        self.memory_bytes = 0
        self.disk_bytes = 0

    def run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.memory_bytes = max(self.memory_bytes, sum(resident(process) for process in family()))
            self.disk_bytes = max(self.disk_bytes, occupied(self._folder))

    def stop(self) -> None:
        self._over.set()
        self.join()


def family() -> list[int]:
    """This process and all below it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found = [os.getpid()]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def occupied(folder: Path) -> int:
    try:
        return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
    except OSError:
        return 0  # something went while it was looked at


def processor_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def timed(action: Callable[[], object]) -> tuple[float, float]:
    wall, processor = time.perf_counter(), processor_seconds()
    action()
    return time.perf_counter() - wall, processor_seconds() - processor


def pack(target: Path, layers: list[Path], log: Path) -> str:
    blobs = [LayerBlob(file=layer) for layer in layers]
    source = SqshSource(layers=blobs, config=RunConfig(), provenance="bench", epoch=EPOCH)
    return write_sqsh(target, source, log).digest


def peer(target: Path, tree: Path) -> None:
    words = [
        "mksquashfs",
        tree,
        target,
        *DEFAULT.options(),
        "-all-root",
        "-no-xattrs",
        "-noappend",
        "-no-progress",
        "-quiet",
    ]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder = options.keep or work / "image"
        folder.mkdir(parents=True, exist_ok=True)
        layers = image(folder)
        tree = work / "tree"
        tree.mkdir()
        members = unpack([LayerBlob(file=layer) for layer in layers], tree)
        size = sum(info.st_size for _, _, info in walk(tree) if stat.S_ISREG(info.st_mode))
        out = work / "out"
        ours, theirs, digests, memory, disk = [], [], set(), 0, 0
        for _ in range(options.repeats):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            watch = Watch(out)
            watch.start()
            ours.append(timed(lambda: digests.add(pack(out / "i.sqsh", layers, work / "log"))))
            watch.stop()
            memory, disk = max(memory, watch.memory_bytes), max(disk, watch.disk_bytes)
            packed = (out / "i.sqsh").stat().st_size
            theirs.append(timed(lambda: peer(work / "peer.sqsh", tree)))
            (work / "peer.sqsh").unlink()
        return report(members, size, packed, ours, theirs, memory, disk, len(digests))


def report(
    members: int,
    size: int,
    packed: int,
    ours: list[tuple[float, float]],
    theirs: list[tuple[float, float]],
    memory: int,
    disk: int,
    digests: int,
) -> int:
    wall, processor = (statistics.median(column) for column in zip(*ours, strict=True))
    peer_wall, peer_processor = (statistics.median(column) for column in zip(*theirs, strict=True))
    print(f"image: {size / 1e6:.0f} MB in {members} files and directories")
    print(
        f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}: with other work beside it, look at processor time"
    )
    rows = [
        ("layers to .sqsh, wall", wall, "s", LIMIT_SECONDS),
        ("published enroot import / that", ENROOT_SECONDS / wall, "", -ENROOT_FACTOR),
        (".sqsh / image", packed / size, "", LIMIT_RATIO),
        ("memory of all processes", memory / (1 << 20), "MiB", LIMIT_MEMORY_BYTES / (1 << 20)),
        ("disk / .sqsh", disk / packed, "", 1.01),
        ("different .sqsh in all repeats", digests, "", 1),
    ]
    missed = 0
    for name, value, unit, limit in rows:
        bad = value < -limit if limit < 0 else value > limit
        missed += bad
        bound = f"at least {-limit:g}" if limit < 0 else f"at most {limit:g}"
        print(f"{name:34} {value:8.2f} {unit:4} ({bound}){'  MISSED' if bad else ''}")
    print(f"processor time {processor:.1f} s")
    print(f"peer, mksquashfs of the unpacked directory: {peer_wall:.1f} s, {peer_processor:.1f} s of processor time")
    print(f"ratio of processor time to that peer {processor / peer_processor:.2f}, of wall time {wall / peer_wall:.2f}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
