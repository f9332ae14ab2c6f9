"""Removes what uv leaves in an environment that depends on the building machine.

It imports nothing of envbuild: the docker builder runs this very file inside its steps, with the base's Python.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

# For uv's and backup programs' own use; the lock file's mode shows the builder's umask.
VENV_LEFTOVERS = (".lock", ".gitignore", "CACHEDIR.TAG")
# Where a wheel from a local folder came from: its time stamp there.
DIST_INFO_LEFTOVERS = ("uv_cache.json",)


def remove_leftovers(venv: Path, site_packages: Path) -> None:
    """Remove it, also from the lists of installed files."""
    for name in VENV_LEFTOVERS:
        (venv / name).unlink(missing_ok=True)
    for name in DIST_INFO_LEFTOVERS:
        for file in site_packages.glob(f"*.dist-info/{name}"):
            file.unlink()
            _forget(file.parent / "RECORD", f"{file.parent.name}/{name}")


def _forget(record: Path, name: str) -> None:
    """Take ``name`` out of a RECORD file (PEP 376: CSV with the path in the first column)."""
    rows = list(csv.reader(io.StringIO(record.read_text(encoding="utf-8"))))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(row for row in rows if row and row[0] != name)
    # Never in place: the file is a hard link into uv's cache.
    staged = record.with_name(f".{record.name}.new")
    staged.write_text(text.getvalue(), encoding="utf-8")
    staged.chmod(0o644)
    staged.replace(record)
