"""What a job costs whose 64 processes on one machine pull the same .sqsh of 3 GB, next to one process that pulls it.

Docker's registry on loopback has the image, with a certificate that a key of the trust file signed. Both runs begin
with an empty store; each process is an `envbuild pull` of its own with an output of its own.

Exits 1 when the 64 take more than 1.3 times as long as the one, or the registry was asked for the file more than once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.publish_world import PublishWorld, make_publish_world, with_record
from helpers.stores import docker_registry, registry_program

from envbuild.core.digests import sha256_file
from envbuild.image.output import SQSH_FILE
from envbuild.image.record import SqshRecord
from envbuild.publish.publish import publish
from envbuild.store import entry_index
from envbuild.store.record import RECORD_FILE, dump

RATIO_LIMIT = 1.3
PROCESSES = 64
GIGABYTES = 3.0
REPOSITORY = "bench/images"


@dataclass(frozen=True)
class Bench:
    """The registry with the image, and where the processes work."""

    work: Path
    reference: str
    trust: Path
    log: Path
    digest: str

    def pull(self, processes: int) -> dict[str, Any]:
        """So many processes that begin at once, with an empty store."""
        own = self.work / f"of-{processes}"
        environment = {**os.environ, "ENVBUILD_CACHE_DIR": str(own / "cache"), "TMPDIR": str(own), "NO_COLOR": "1"}
        own.mkdir()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        asked, began = self.downloads(), time.monotonic()
        words = [sys.executable, "-m", "envbuild", "pull", self.reference, "--trust", str(self.trust), "--quiet"]
        running = [
            subprocess.Popen([*words, "--output", str(own / f"{number}.sqsh")], env=environment)
            for number in range(processes)
        ]
        failed = [code for process in running if (code := process.wait())]
        seconds = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        files = {(own / f"{number}.sqsh").stat().st_ino for number in range(processes)} if not failed else set()
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found = {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "downloads": self.downloads() - asked,
            "failed": len(failed),
            "files": len(files),
        }
        shutil.rmtree(own)
        return found

    def downloads(self) -> int:
        """How often the registry was asked for the file."""
        return sum(f"blobs/{self.digest}" in line and '"GET ' in line for line in self.log.read_text().splitlines())


def make_large(world: PublishWorld, size_bytes: int) -> None:
    """Give the image a .sqsh of this size, whose bytes do not repeat."""
    file = world.image.path / SQSH_FILE
    with file.open("wb") as stream:
        for _ in range(size_bytes >> 20):
            stream.write(os.urandom(1 << 20))
    record = SqshRecord(digest=sha256_file(file), size_bytes=file.stat().st_size, packed_by="bench", compression="zstd")
    world.image = with_record(world.image, sqsh=record)
    (world.image.path / RECORD_FILE).write_bytes(dump(world.image.record))
    entry_index.write_index(world.image.path)


def measure(work: Path, gigabytes: float, processes: int) -> dict[str, Any]:
    os.environ |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    world = make_publish_world(work / "project")
    make_large(world, int(gigabytes * 1e9))
    world.certify()
    folder = work / "registry"
    with docker_registry(registry_program(work / "program"), folder) as address:
        place = f"{address.removeprefix('http://')}/{REPOSITORY}"
        publication = publish(world.request(place), world.context).publication
        world.image.sqsh().unlink()  # the registry has it
        assert publication.sqsh is not None
        trust = world.project / "trust.toml"
        bench = Bench(work, f"{place}:{publication.tag}", trust, folder / "log", publication.sqsh.digest)
        bench.pull(1)  # what is read for the first time comes from the disk
        one, many = bench.pull(1), bench.pull(processes)
    return {
        "bytes": publication.sqsh.size_bytes,
        "processes": processes,
        "one": one,
        "many": many,
        "ratio": many["seconds"] / one["seconds"],
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def missed(found: dict[str, Any]) -> list[str]:
    """The limits that were not kept, in words."""
    many = found["many"]
    problems = [f"{many['failed']} processes failed"] if many["failed"] else []
    if found["ratio"] > RATIO_LIMIT:
        problems.append(f"{found['processes']} processes take {found['ratio']:.2f} times one; the limit: {RATIO_LIMIT}")
    if many["downloads"] != 1 or many["files"] != 1:
        problems.append(f"{many['downloads']} downloads, {many['files']} files; there is to be one of each")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="has room for 3 times the file; default: a temporary one")
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES)
    parser.add_argument("--processes", type=int, default=PROCESSES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="envbuild-bench-", dir=arguments.work) as folder:
        found = measure(Path(folder), arguments.gigabytes, arguments.processes)
    print(json.dumps(found, indent=2))
    problems = missed(found)
    for problem in problems:
        print(f"MISSED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
