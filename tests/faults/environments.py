"""Environments to break: copies of the one with the stack, in which only what is changed takes room."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from faults.kinds import Edit

SWITCH = Path(__file__).with_name("switch") / "envbuild_fault.py"


@dataclass(frozen=True)
class Environment:
    """A virtual environment of a test's own."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (folder,) = self.folder.glob("lib/python3.*/site-packages")
        return folder

    @property
    def versions(self) -> dict[str, str]:
        """Of each installed package, as a lock would have it."""
        installed = {}
        for metadata in self.site_packages.glob("*.dist-info/METADATA"):
            fields = dict(
                line.split(": ", 1) for line in metadata.read_text().split("\n\n")[0].splitlines() if ": " in line
            )
            installed[fields["Name"]] = fields["Version"]
        return installed

    def copy(self, folder: Path) -> Environment:
        """The same environment elsewhere. Its files are shared: change one by putting a new one in its place."""
        subprocess.run(["cp", "-al", self.folder, folder], check=True)
        return Environment(folder)

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    def edit(self, edit: Edit) -> None:
        """Change lines of a package, and its entry in RECORD."""
        path = self.site_packages / edit.file
        text = path.read_text()
        for old, new in edit.changes:
            assert text.count(old) == 1, f"{edit.file} has {text.count(old)} times: {old}"
            text = text.replace(old, new)
        new_file(path, text.encode())
        self.record(edit.file)

    def record(self, file: str) -> None:
        """Have the RECORD of a file's package say what the file is now."""
        content = (self.site_packages / file).read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        records = 0
        for path in self.site_packages.glob("*.dist-info/RECORD"):
            rows = list(csv.reader(io.StringIO(path.read_text())))
            if not any(row[0] == file for row in rows):
                continue
            records += 1
            changed = [[file, f"sha256={digest}", str(len(content))] if row[0] == file else row for row in rows]
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(changed)
            new_file(path, text.getvalue().encode())
        assert records == 1, f"{file} is in {records} RECORDs"

    def add_switch(self) -> None:
        """Have every interpreter of this environment import the switch as it starts.

        A package of the lock lists it: what runs without being listed is found for that, and would hide whether the
        check that is named for a fault finds it.
        """
        name = SWITCH.stem
        new_file(self.site_packages / SWITCH.name, SWITCH.read_bytes())
        new_file(self.site_packages / f"{name}.pth", f"import {name}\n".encode())
        (record,) = self.site_packages.glob("psutil-*.dist-info/RECORD")
        new_file(record, record.read_bytes() + f"{name}.py,,\n{name}.pth,,\n".encode())


def new_file(path: Path, content: bytes) -> None:
    """Put a new file in the place of one that other environments share."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)
