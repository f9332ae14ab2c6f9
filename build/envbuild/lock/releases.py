"""Which release uv takes of a package by itself, and what is in it: asked before the whole is resolved."""

from __future__ import annotations

import io
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import tomlkit
from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.models import Base
from envbuild.core.errors import CheckRefusedError, ConfigurationError
from envbuild.core.files import machine_errors
from envbuild.lock import asof
from envbuild.lock.components import Chosen, Lead, Origin
from envbuild.lock.metadata import fetch_file
from envbuild.lock.project import Project, limits
from envbuild.lock.resolve import resolve, seconds_of
from envbuild.lock.torch_builds import TorchSource
from envbuild.lock.upstream import Companion
from envbuild.lock.workplace import Workplace


def look_up(
    packages: Mapping[str, str], base: Base, settings: Mapping[str, object], what: str, work: Workplace
) -> dict[str, Mapping[str, Any]]:
    """Lock packages by themselves, as if they needed nothing: finds versions, files, dates. By package name.

    Args:
        packages: specifiers by name.
        settings: keys of ``[tool.uv]`` besides the base's limits.
    """
    with machine_errors(work.folder):
        folder = Path(tempfile.mkdtemp(dir=work.folder, prefix="throw-away."))
    tables = tomlkit.aot()
    for name in packages:
        table = tomlkit.table()
        table["name"], table["requires-dist"] = name, []
        tables.append(table)
    document = tomlkit.document()
    document["project"] = {
        "name": "envbuild-throw-away",
        "version": "0",
        "requires-python": f"=={base.python.version}.*",
        "dependencies": [f"{name}{specifier}" for name, specifier in packages.items()],
    }
    document["tool"] = {"uv": {"package": False, **limits(base), **settings, "dependency-metadata": tables}}
    with machine_errors(folder):
        (folder / "pyproject.toml").write_text(tomlkit.dumps(document))
    resolution = resolve(folder, TorchSource("package-index", None), what, work.log, work.reporter.update)
    return {canonicalize_name(package["name"]): package for package in resolution.uv_lock["package"]}


def likely(
    project: Project, names: Sequence[str], keep: Mapping[str, str], what: str, work: Workplace
) -> dict[str, Mapping[str, Any]]:
    """The releases of components that a lock takes if nothing else holds them back, as uv.lock's tables by name.

    Args:
        names: components from the index.
        keep: versions that are going to be kept.
    """
    wanted = {name: f"=={keep[name]}" if name in keep else project.chosen[name].specifier for name in names}
    dates = {
        name: asof.timestamp(asof.end_of(day))
        for name in names
        if (own := project.chosen[name].spec.as_of) and (day := asof.parse_date(own))
    }
    settings = {"exclude-newer": project.as_of, "exclude-newer-package": dates}
    return look_up(wanted, project.base, settings, what, work)


class Releases:
    """What is known of components that are releases: which one uv takes as of a moment, and what belongs to it.

    Args:
        undecided: the components of which only a table could say something; without any, nothing is asked.
    """

    def __init__(
        self, catalog: Catalog, base: Base, as_of: str, dates: Mapping[str, str], undecided: set[str], work: Workplace
    ) -> None:
        self._catalog = catalog
        self._base = base
        self._settings = {"exclude-newer": as_of, "exclude-newer-package": dict(dates)}
        self._undecided = undecided
        self._work = work
        self._found: dict[str, Mapping[str, Any]] = {}

    def _package(self, chosen: Chosen) -> Mapping[str, Any]:
        if chosen.name not in self._found:
            wanted = {chosen.name: chosen.specifier}
            with self._work.reporter.step(f"look at {chosen.name} {chosen.asked}"):
                locked = look_up(wanted, self._base, self._settings, f"find {chosen.name}", self._work)
            self._found[chosen.name] = locked[canonicalize_name(chosen.name)]
        return self._found[chosen.name]

    def has_folder(self, chosen: Chosen, folder: str) -> bool:
        """Whether the release has files below ``folder``."""
        return has_folder(self._package(chosen), folder, self._work)

    def lead(self, chosen: Chosen) -> Lead:
        """What a table in envs/ says of the release.

        A range of releases is held to those that the table's entry is for, so that both stay together.
        """
        table = self._catalog.companions(canonicalize_name(chosen.name))
        if table is None or not table.names() & self._undecided:
            return Lead(chosen=chosen, companions={})
        entry = table.of(str(self._package(chosen)["version"]))
        if entry is None:
            return Lead(chosen=chosen, companions={})
        where = f"envs/companions/{canonicalize_name(chosen.name)}.toml"
        found = {name: Companion(package=name, where=where, specifier=text) for name, text in entry.components.items()}
        if not chosen.specifier.startswith("==") or "*" in chosen.specifier:
            chosen = replace(chosen, specifier=",".join(filter(None, (chosen.specifier, entry.versions))))
        return Lead(chosen=chosen, companions=found, origin=Origin.TABLE)


def uploaded_at(package: Mapping[str, Any]) -> datetime:
    """When a release was uploaded to the index: the first of its files.

    Args:
        package: its ``[[package]]`` table of a uv.lock.

    Raises:
        ConfigurationError: the index does not say.
    """
    files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    times = [seconds_of(file["upload-time"]) for file in files if "upload-time" in file]
    if not times:
        raise ConfigurationError(
            f"the index does not say when {package['name']} {package['version']} was uploaded",
            why="Its answers carry no upload times, so 'release' has no date to count from.",
            fix="Name the date yourself: --as-of YYYY-MM-DD",
        )
    return datetime.fromtimestamp(min(times), timezone.utc)


def has_folder(package: Mapping[str, Any], folder: str, work: Workplace) -> bool:
    """Whether a release has files below ``folder`` (``nemo/collections/llm``): its first wheel, else its sdist.

    Raises:
        NetworkError: the file cannot be downloaded.
        CheckRefusedError: it is no archive.
    """
    title = f"{package['name']} {package['version']}"
    files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    if not files:
        return False
    content, _ = fetch_file(files[0], title, work.folder, work.site, work.store)
    prefix = f"{folder.strip('/')}/"
    try:
        if content[:2] == b"PK":
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                names = archive.namelist()
            if "wheels" in package:
                return any(name.startswith(prefix) for name in names)
        else:
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:*") as tar:
                names = tar.getnames()
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise CheckRefusedError(
            f"the file of {title} cannot be read",
            why=f"It is no archive: {error}",
            fix="Try again; if it stays, the index or a proxy serves another file. Or choose another version.",
        ) from error
    # An sdist has one folder on top, and sources below src/ now and then.
    inside = [name.partition("/")[2].removeprefix("src/") for name in names]
    return any(name.startswith(prefix) for name in inside)
