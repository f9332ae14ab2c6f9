"""Gives a wheel another platform tag: its name, the tags inside, and the digest of what they are written in.

auditwheel and ``wheel tags`` do this too; the one through the current directory, SOURCE_DATE_EPOCH and the umask of the
process, the other is private to its command line. Here the bytes that come out depend on the wheel alone.
"""

from __future__ import annotations

import csv
import io
import zipfile
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from envbuild.core.digests import record_digest
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors

# Signatures of RECORD (PEP 427), which is written anew.
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")


def retagged(wheel: Path, platform: str, folder: Path) -> Path:
    """The wheel with another platform tag, in ``folder``; the wheel itself where it has that tag already.

    Raises:
        CheckRefusedError: it has no metadata of wheels.
    """
    _, _, _, tags = parse_wheel_filename(wheel.name)
    # A name may have several platforms, joined by dots (PEP 425, "Compressed Tag Sets").
    if {tag.platform for tag in tags} == {platform}:
        return wheel
    wanted = sorted({str(Tag(tag.interpreter, tag.abi, platform)) for tag in tags})
    # Name and version with a dash between; a build number, interpreter and ABI follow.
    name = f"{wheel.name.rpartition('-')[0]}-{platform}.whl"
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    made = folder / name
    with machine_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(made, "w") as new:
            changed = _changed(old, _info(old, info, wheel), wanted)
            for member in old.infolist():
                if not member.filename.endswith(_SIGNATURES):
                    content = changed.get(member.filename)
                    new.writestr(_like(member), old.read(member) if content is None else content)
    return made


def _info(archive: zipfile.ZipFile, expected: str, wheel: Path) -> str:
    """The folder of metadata; its name need not be spelled as the wheel's."""
    names = archive.namelist()
    folders = [name.partition("/")[0] for name in names if name.endswith(".dist-info/WHEEL")]
    if len(folders) != 1 or f"{folders[0]}/RECORD" not in names:
        raise CheckRefusedError(
            f"{wheel.name} is not a wheel",
            why=f"It should have one folder like {expected}, with the files WHEEL and RECORD; it has {len(folders)}.",
            fix="It was not kept. The package's build is wrong; choose another version and lock again.",
        )
    return folders[0]


def _changed(archive: zipfile.ZipFile, info: str, tags: list[str]) -> dict[str, bytes]:
    """The files that name the tags, and the list that has their digests."""
    about, record = f"{info}/WHEEL", f"{info}/RECORD"
    lines = archive.read(about).decode().splitlines()
    kept = [line for line in lines if line.strip() and not line.startswith("Tag:")]
    text = "".join(f"{line}\n" for line in [*kept, *(f"Tag: {tag}" for tag in tags)]).encode()
    rows = csv.reader(io.StringIO(archive.read(record).decode()))
    # RECORD has the digest of WHEEL: after a change of its tags installers would refuse the wheel.
    listed = io.StringIO()
    csv.writer(listed, lineterminator="\n").writerows(
        [about, f"sha256={record_digest(text)}", str(len(text))] if row[0] == about else row
        for row in rows
        if row and not row[0].endswith(_SIGNATURES)
    )
    return {about: text, record: listed.getvalue().encode()}


def _like(member: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """The same place, time, mode and packing; nothing of this machine."""
    made = zipfile.ZipInfo(member.filename, member.date_time)
    made.external_attr, made.create_system = member.external_attr, member.create_system
    made.compress_type = member.compress_type
    return made
