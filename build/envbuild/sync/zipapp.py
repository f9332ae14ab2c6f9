"""The smoke runner as one file: a zipapp whose bytes depend on its sources alone."""

from __future__ import annotations

import io
import zipfile
from functools import cache
from pathlib import Path

import envbuild_smoke
from envbuild.catalog.data import data_root
from envbuild.core.digests import sha256_bytes
from envbuild.store.local import LocalStore

# The first moment that a zip can hold.
FIXED_TIME = (1980, 1, 1, 0, 0, 0)
FILE_NAME = "smoke.pyz"


@cache
def smoke_bytes(source: Path | None = None) -> bytes:
    """The zipapp of ``smoke/`` (or of another folder with a ``__main__.py`` and the package), read once a process."""
    entry = (source or data_root() / "smoke") / "__main__.py"
    # An installed envbuild has the package next to its own.
    package = source / envbuild_smoke.__name__ if source else Path(envbuild_smoke.__file__).parent
    # The order of a folder's entries depends on the file system.
    files = {
        path.relative_to(package.parent).as_posix(): path
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix in (".py", ".json", ".jsonl")
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, path in {"__main__.py": entry, **files}.items():
            info = zipfile.ZipInfo(name, FIXED_TIME)
            # The upper 16 bits are the Unix mode.
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_STORED  # deflate's bytes differ between zlib versions
            archive.writestr(info, path.read_bytes())
    return buffer.getvalue()


def smoke_file(store: LocalStore) -> tuple[Path, str]:
    """The zipapp in the store, and its digest."""
    data = smoke_bytes()
    digest = sha256_bytes(data)
    entry = store.get_or_build("smoke", digest, lambda folder: _write(folder / FILE_NAME, data))
    return entry.path / FILE_NAME, digest


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o444)
