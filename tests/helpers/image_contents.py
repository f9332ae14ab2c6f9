"""What is in an image, read from its OCI layout with nothing but Python: for comparing what two builders made."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"


class Entry(NamedTuple):
    """A file, directory or link; ``content`` is a digest, or what a link points to."""

    kind: str
    mode: int
    owner: tuple[int, int]
    time: int
    content: str
    xattrs: tuple[tuple[str, str], ...]


def layers_of(layout: Path) -> Iterator[Path]:
    """The layers of a layout with one image, lowest first."""
    for layer in described(layout)[0]["layers"]:
        yield blob(layout, layer["digest"])


def described(layout: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest and the configuration of a layout with one image."""
    index = json.loads((layout / "index.json").read_bytes())
    manifest = json.loads(blob(layout, index["manifests"][0]["digest"]).read_bytes())
    return manifest, json.loads(blob(layout, manifest["config"]["digest"]).read_bytes())


def blob(layout: Path, digest: str) -> Path:
    return layout / "blobs/sha256" / digest.removeprefix("sha256:")


def contents(layout: Path) -> dict[str, Entry]:
    """Everything in an image by its path, as a container sees it; hard links are the file that they are of."""
    found: dict[str, Entry] = {}
    for layer in layers_of(layout):
        here: dict[str, Entry] = {}
        with tarfile.open(layer, "r|gz") as tar:
            for member in tar:
                name = member.name.removeprefix("./").strip("/")
                folder, _, last = name.rpartition("/")
                if last.startswith(WHITEOUT):
                    gone = folder if last == OPAQUE else f"{folder}/{last.removeprefix(WHITEOUT)}".strip("/")
                    own = last != OPAQUE
                    for path in [path for path in found if (own and path == gone) or path.startswith(f"{gone}/")]:
                        del found[path]
                    continue
                if name in ("", "."):
                    continue
                here[name] = entry_of(tar, member, here)
        found |= here
    return found


def entry_of(tar: tarfile.TarFile, member: tarfile.TarInfo, here: dict[str, Entry]) -> Entry:
    if member.islnk():
        return here[member.linkname.removeprefix("./")]
    content = member.linkname
    if member.isreg():
        content = hashlib.sha256(tar.extractfile(member).read()).hexdigest()
    kind = "directory" if member.isdir() else "link" if member.issym() else "file" if member.isreg() else "other"
    xattrs = tuple(sorted((key, value) for key, value in member.pax_headers.items() if key.startswith("SCHILY.xattr")))
    # Docker writes the kind of file into the mode too.
    mode = 0o777 if member.issym() else member.mode & 0o7777
    return Entry(kind, mode, (member.uid, member.gid), int(member.mtime), content, xattrs)


def differences(first: Path, second: Path) -> list[str]:
    """In what two images differ: paths, and how."""
    ours, theirs = contents(first), contents(second)
    found = [f"only in the first: {name}" for name in sorted(ours.keys() - theirs.keys())]
    found += [f"only in the second: {name}" for name in sorted(theirs.keys() - ours.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        for field, one, other in zip(Entry._fields, ours[name], theirs[name], strict=True):
            if one != other:
                found.append(f"{name}: {field} {one!r} != {other!r}")
    return found
