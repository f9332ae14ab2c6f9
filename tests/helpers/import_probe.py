"""The import check's probe, on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from envbuild.catalog.data import data_root
from envbuild.core.process import Finished, ProcessOptions, run
from envbuild.sync.imports import PROBE, ImportProbe
from envbuild.sync.install_target import InconclusiveError


def here(argv: Sequence[str], *, what: str, log: Path, timeout_seconds: float | None = None) -> Finished:
    return run(
        argv,
        what=what,
        log=log,
        check=False,
        options=ProcessOptions(timeout_seconds=timeout_seconds, error=InconclusiveError),
    )


def probe_of(tmp_path: Path, python: str = sys.executable) -> ImportProbe:
    return ImportProbe(python=python, program=str(data_root() / PROBE), run=here, logs=tmp_path / "logs")
