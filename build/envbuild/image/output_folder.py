"""Output directories: what may be replaced in one, whether it can be written, and the modes of what is put there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from pathlib import Path

from envbuild.core.errors import ConfigurationError
from envbuild.core.files import machine_errors
from envbuild.image.record import CYCLONEDX_FILE, PROVENANCE_FILE, SPDX_FILE
from envbuild.store.entry_index import ENTRY_INDEX_FILE
from envbuild.store.record import RECORD_FILE

SCHEMA = "envbuild.image/"
# What images of any version have, whether their seal is there or not.
_FILES = frozenset(
    {
        RECORD_FILE,
        ENTRY_INDEX_FILE,
        "image.sqsh",
        CYCLONEDX_FILE,
        SPDX_FILE,
        PROVENANCE_FILE,
        "oci/oci-layout",
        "oci/index.json",
    }
)
_FOLDERS = frozenset({"oci", "oci/blobs", "oci/blobs/sha256"})
_BLOB = re.compile(r"oci/blobs/sha256/[0-9a-f]{64}")


def refuse_foreign(path: Path) -> None:
    """Refuse to put an image where something else is.

    Raises:
        ConfigurationError: ``path`` is not a folder, or holds something and no image of envbuild.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        what = "a link" if path.is_symlink() else "not a folder"
        raise _in_the_way(path, f"It is {what}; envbuild puts a folder there.")
    with machine_errors(path, "read"):
        names = sorted(entry.name for entry in path.iterdir())
        if names and not _is_image(path):
            raise _in_the_way(path, f"It is not an image that envbuild put there, and holds {_some(names)}.")


def refuse_extra(path: Path) -> None:
    """Refuse to replace a placed image as long as it holds other files.

    Raises:
        ConfigurationError: there is; or see :func:`refuse_foreign`.
    """
    refuse_foreign(path)
    if not path.is_dir():
        return
    listed = _sealed(path)
    own = {*listed, *_FILES}
    folders = {*_FOLDERS, *(str(parent) for name in listed for parent in Path(name).parents)}
    extra = []
    with machine_errors(path, "read"):
        # Without onerror, os.walk passes over a folder that it cannot list; what is in it would be lost.
        for folder, below, names in os.walk(path, onerror=_raise):
            inside = Path(folder).relative_to(path)
            paths = [str(inside / name) for name in names]
            extra += [name for name in paths if name not in own and not _BLOB.fullmatch(name)]
            extra += [f"{inside / name}/" for name in below if str(inside / name) not in folders]
            # os.walk goes only into what is left in its list: a foreign folder is named once, whatever is in it.
            below[:] = [name for name in below if str(inside / name) in folders]
    if extra:
        raise _in_the_way(path, f"It is replaced as a whole, and besides the image's files it holds {_some(extra)}.")


def make_readable(folder: Path) -> None:
    """Give a folder and what is in it the modes of files that everybody may read: 0755 and 0644.

    Links into a store share their modes with it; those of a store of another account stay as they are.
    """
    with machine_errors(folder):
        for inside, _, names in os.walk(folder):
            Path(inside).chmod(0o755)
            for file in (Path(inside, name) for name in names):
                if stat.S_IMODE(file.stat().st_mode) != 0o644:
                    with contextlib.suppress(PermissionError):
                        file.chmod(0o644)


def _is_image(path: Path) -> bool:
    """Whether the record or the seal is one of envbuild's; the other may be damaged."""
    return RECORD_FILE in _sealed(path) or str(_read(path / RECORD_FILE).get("schema", "")).startswith(SCHEMA)


def _sealed(path: Path) -> list[str]:
    return [name for name in _read(path / ENTRY_INDEX_FILE) if isinstance(name, str)]


def _read(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_bytes()) if file.is_file() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _raise(error: OSError) -> None:
    raise error


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if names[5:] else "")


def _in_the_way(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"no image is put at {path}: something that envbuild did not put there would be lost",
        why=why,
        fix="Move it away, or name another folder (--out-dir), and run the same command again.",
    )
