"""Versions that uv takes where they satisfy everything, in the place of the newest ones: a uv.lock made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tomlkit

from envbuild.core import tomlread
from envbuild.core.files import machine_errors
from envbuild.lock.lockfile import PROJECT_FILE, UV_LOCK

# uv wants a source of every package; it takes the version from whatever index has it. With Megatron-Bridge's lock of
# 2026-07-01 it kept 181 of 183 versions (0.13.8).
_SOURCE = {"registry": "https://index.invalid/simple"}


def prefer(folder: Path, versions: Mapping[str, str]) -> None:
    """Lay a uv.lock with these versions into a folder with a pyproject.toml: the next ``uv lock`` there prefers them.

    What a preference contradicts wins over it, silently: a constraint, a requirement, a moment, an index without that
    version. So a preference never makes a resolution fail (uv 0.13.8; test_preferences.py).

    Args:
        versions: by canonical name.
    """
    if not versions:
        return
    with machine_errors(folder):
        project = tomlread.loads((folder / PROJECT_FILE).read_text())
        document = tomlkit.document()
        document["version"], document["revision"] = 1, 3
        document["requires-python"] = project["project"]["requires-python"]
        # With other moments than the project's uv prefers the versions too, but locks other platforms with them.
        settings = project["tool"]["uv"]
        moments = {key: settings[key] for key in ("exclude-newer", "exclude-newer-package") if key in settings}
        if moments:
            document["options"] = moments
        tables = tomlkit.aot()
        for name, version in sorted(versions.items()):
            table = tomlkit.table()
            table["name"], table["version"] = name, version
            table["source"] = tomlkit.inline_table().append("registry", _SOURCE["registry"])
            tables.append(table)
        document["package"] = tables
        (folder / UV_LOCK).write_text(tomlkit.dumps(document))
