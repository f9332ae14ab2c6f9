"""Small wheels, and a package index on loopback that serves them."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import http.server
import urllib.parse
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from helpers.loopback import serving


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    tags: str,
    requires: tuple[str, ...] = (),
    *,
    extras: tuple[str, ...] = (),
    module: str = "",
    python: str = "",
    headers: tuple[str, ...] = (),
    sources: Mapping[str, str | bytes] | None = None,
) -> Path:
    """A wheel with the metadata given, one module, which is empty or has this source, and more files.

    Args:
        headers: lines of METADATA before the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = "".join(f"{line}\n" for line in ("Metadata-Version: 2.1", *headers))
    metadata += f"Name: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    metadata += f"Requires-Python: {python}\n" if python else ""
    metadata += "".join(f"Provides-Extra: {extra}\n" for extra in extras)
    files: dict[str, str | bytes] = {
        f"{name}/__init__.py": module,
        **(sources or {}),
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tags}\n",
    }
    contents = {file: text if isinstance(text, bytes) else text.encode() for file, text in files.items()}
    rows = [f"{file},sha256={record_digest(content)},{len(content)}" for file, content in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    wheel = folder / f"{name}-{version}-{tags}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, content in contents.items():
            archive.writestr(zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0)), content)
    return wheel


def record_digest(content: bytes) -> str:
    """As a RECORD has it, computed here: the code's own is under test."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def write_index(root: Path, project: str, wheels: list[Path]) -> Path:
    """A PEP 503 index under ``root`` with the files of one project; ``+`` is quoted, as the public ones do."""
    page = root / project / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    links = []
    for wheel in wheels:
        (page.parent / wheel.name).write_bytes(wheel.read_bytes())
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        links.append(f'<a href="{urllib.parse.quote(wheel.name)}#sha256={digest}">{wheel.name}</a>')
    page.write_text("<!DOCTYPE html><html><body>" + "<br>".join(links) + "</body></html>")
    return root


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback; gives its URL."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with serving(handler) as server:
        yield f"http://127.0.0.1:{server.server_port}"
