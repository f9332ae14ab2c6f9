"""`envbuild status` and `envbuild report` over a ledger of 100 nights, each with a certified and published image.

A night has a lock that moved, an image, 88 cases of 5 steps, a certificate and a publication, as one of certify-full on
the CPU has. Prints wall and processor seconds; exits 1 when wall seconds (medians) are above 0.5 and 10.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.core.digests import digest_of
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import (
    CaseRow,
    CertificateRow,
    ImageRow,
    LockedPart,
    LockRow,
    NightRow,
    PublicationRow,
    Row,
    StepRow,
)

NIGHTS, CASES, REPEATS = 100, 88, 5
LIMITS = {"status": 0.5, "report": 10.0}
STEPS = ("lock", "wheels", "image", "certify", "publish")


def night(number: int, began: datetime) -> Iterator[Row]:
    """The rows of a night in which everything was done."""
    at = began.strftime(MOMENT_FORMAT)
    lock, image, certificate = (digest_of({kind: number}) for kind in ("lock", "image", "certificate"))
    place = {"stack": "mcore", "base": "debian12", "target": "cpu"}
    part = LockedPart(version=f"0.16.{number}", asked="main", commit=f"{number:040x}", follows=True)
    packages = {f"package-{index}": f"1.{number if index == number % 40 else 0}" for index in range(40)}
    yield NightRow(stack="mcore", id=f"night-{number:03}", targets=("cpu",), started_at=at)
    yield LockRow(
        stack="mcore", base="debian12", digest=lock, name="mcore", components={"megatron-core": part},
        packages=packages, seen_at=at,
    )  # fmt: skip
    yield ImageRow(**place, oci_digest=image, lock_digest=lock, size_bytes=700_000_000, built_at=at)
    for index in range(CASES):
        yield CaseRow(
            **place, run=certificate, case=f"gpt-fp32-case{index}", lock_digest=lock, oci_digest=image, passed=True,
            seconds=3.0, step_seconds=0.1, measured_at=at, loss=(7.7, 7.6, 7.4, 7.3, 7.2), grad_norm=(1.0,) * 5,
        )  # fmt: skip
    yield CertificateRow(
        **place, digest=certificate, certificate_key=digest_of({"key": number}), lock_digest=lock, keyid="k",
        matrix="certify-full", matrix_digest=digest_of("matrix"), matrix_is_shipped=True, whole_matrix=True,
        cases=CASES, measured_at=at, issued_at=at,
    )  # fmt: skip
    yield PublicationRow(
        **place, repository="registry.example/team/envs", tag=f"mcore-{lock[7:19]}-cpu", moving_tag="mcore-cpu",
        lock_name="mcore", lock_digest=lock, oci_digest=image, size_bytes=700_000_000, certificate_digest=certificate,
        keyid="k", certified_at=at, measured_at=at, published_at=at,
    )  # fmt: skip
    for name in STEPS:
        target = "" if name == "lock" else "cpu"
        yield StepRow(
            stack="mcore", night=f"night-{number:03}", target=target, name=name, state="done", started_at=at,
            seconds=60.0, lock_digest=lock,
        )  # fmt: skip


def timed(words: list[str], folder: Path, env: dict[str, str]) -> tuple[float, float]:
    """Run envbuild; return wall and processor seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "envbuild", *words], cwd=folder, env=env, capture_output=True, check=False
    )
    wall = time.perf_counter() - began
    # 14: an image is older than the policy allows.
    if done.returncode not in (0, 14):
        raise SystemExit(done.stderr.decode())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    missed = 0
    with tempfile.TemporaryDirectory(prefix="envbuild-bench-") as name:
        folder = Path(name)
        env = {**os.environ, "ENVBUILD_STATE_DIR": str(folder / "state"), "ENVBUILD_CACHE_DIR": str(folder / "cache")}
        # As installed: with compiled modules, which the first call writes.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        now = datetime.now(timezone.utc)
        with Ledger.open(folder / "state" / "ledger.sqlite") as ledger:
            for number in range(NIGHTS):
                ledger.record(*night(number, now - timedelta(days=NIGHTS - number)))
        for command, words in (("status", ["status"]), ("report", ["report", "--html", str(folder / "site")])):
            runs = [timed(words, folder, env) for _ in range(REPEATS + 1)][1:]
            wall, processor = (statistics.median(values) for values in zip(*runs, strict=True))
            print(f"{command:7} {wall:5.2f} s, {processor:5.2f} s of processor time  (at most {LIMITS[command]:g} s)")
            missed += wall > LIMITS[command]
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
