"""Makes environments: layers from the store or made anew, put together, compared with the lock, and tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.catalog import Selection
from envbuild.catalog.data import data_root
from envbuild.catalog.site import Site
from envbuild.core import sandbox
from envbuild.core.digests import digest_of, sha256_file, short
from envbuild.core.files import machine_errors, make_private, remove_tree, write_atomic
from envbuild.core.progress import Reporter
from envbuild.image.base import StoredBase
from envbuild.image.checks.loaded_libraries import PROBE as LOADED_PROBE
from envbuild.image.checks.loaded_libraries import loaded_libraries
from envbuild.image.layers.assembly import Assembly
from envbuild.image.layers.groups import Part, plan_parts
from envbuild.image.layers.install import LAYER_FILE, TREE, LayerMaker
from envbuild.image.layers.policy import layering
from envbuild.image.layers.sandbox import INSIDE_LOADED, INSIDE_PROBE, VENV, InstallSandbox
from envbuild.image.layers.strip import check_against, distributions
from envbuild.image.record import EnvironmentLayerRecord, EnvironmentRecord
from envbuild.lock.lockfile import LockDirectory, snapshot
from envbuild.rootfs.layer import Layer
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE, dump, load
from envbuild.sync.imports import PROBE, Imports, check_environment, modules_of, try_imports
from envbuild.wheels.cache.wheelhouse import NO_BUILT, Built

KIND = "environments"
LAYERS = "layers"
# Raised when something else is checked of an environment.
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class StoredEnvironment:
    """An environment in the store: what is known of it, and its layers, lowest first."""

    record: EnvironmentRecord
    layers: tuple[Layer, ...]
    built: bool


def environment_key(selection: Selection, lock: LockDirectory, base_digest: str, parts: Sequence[Part]) -> str:
    """The key of an environment: its layers, the very base under them, and what is checked."""
    return digest_of(
        {
            "format": FORMAT,
            "layers": [part.key for part in parts],
            "packages": {**lock.packages()},
            "base": base_digest,
            "modules": {name: list(modules) for name, modules in modules_of(lock.lock).items()},
            "variables": {**_variables(selection, lock)},
            "probes": [sha256_file(data_root() / name) for name in (PROBE, LOADED_PROBE)],
        }
    )


def make_environment(
    selection: Selection,
    lock: LockDirectory,
    base: StoredBase,
    site: Site,
    store: LocalStore,
    reporter: Reporter,
    wheels: Mapping[str, Built] = NO_BUILT,
) -> StoredEnvironment:
    """The environment of a lock on a base; what of it is not in the store is made.

    Args:
        wheels: wheels of the wheelhouse for packages of phase compile, which are then not built.

    Raises:
        BuildError: a package does not install.
        CheckRefusedError: what is installed is not what is locked, or does not import.
        NetworkError: an index cannot be reached.
    """
    parts = plan_parts(lock, selection.base, base, wheels)
    key = environment_key(selection, lock, base.digest, parts)

    def build(folder: Path) -> None:
        logs = store.root / "logs" / f"environment-{short(key)}"
        remove_tree(logs)
        # A store of its own: uv hard-links from its cache only what lies on the same mount, so the sandbox gets one
        # folder with both, and not the rest of the store.
        workshop = LocalStore(store.root / "uv", reporter)
        with workshop.staging("environment") as staged:
            with machine_errors(workshop.root):
                # Builds of packages write there: nobody else runs what they leave.
                make_private(workshop.root)
                (workshop.root / "cache").mkdir(exist_ok=True)
            maker = _maker(selection, lock, base, site, store, reporter, wheels, staged, logs)
            for part in parts:
                _put_together(maker, part, store)
            packages, imports, loaded = _check(maker, selection)
        record = EnvironmentRecord(
            schema="envbuild.environment/2",
            layers=tuple(part.key for part in parts),
            packages=packages,
            not_checked={item.module: item.reason for item in imports.not_checked},
            loaded=loaded,
        )
        write_atomic(folder / RECORD_FILE, dump(record))

    entry = store.get_or_build(KIND, key, build)
    if any(_find_layer(store, part) is None for part in parts):
        entry = store.rebuild(KIND, key, build)
    return StoredEnvironment(
        record=load(entry.path / RECORD_FILE, EnvironmentRecord),
        layers=tuple(_layer(store.path_of(LAYERS, part.key)) for part in parts),
        built=entry.built,
    )


def _variables(selection: Selection, lock: LockDirectory) -> dict[str, str]:
    """What is set while modules are imported."""
    return check_environment(selection.target) | lock.lock.variables(VENV)


def _maker(
    selection: Selection,
    lock: LockDirectory,
    base: StoredBase,
    site: Site,
    store: LocalStore,
    reporter: Reporter,
    wheels: Mapping[str, Built],
    staged: Path,
    logs: Path,
) -> LayerMaker:
    python = selection.base.python
    rule = layering()
    site_packages = f"venv/lib/python{python.version}/site-packages"

    def may_differ(path: str) -> bool:
        return path.startswith(f"{site_packages}/") and rule.may_differ(path.removeprefix(f"{site_packages}/"))

    tree = staged / "tree"
    return LayerMaker(
        bench=InstallSandbox(base=base, workshop=staged.parents[1], tree=tree, logs=logs, bwrap=sandbox.probe()),
        lock=snapshot(lock, staged / "lock"),
        assembly=Assembly(tree, may_differ),
        executable=python.executable,
        site_packages=site_packages,
        site=site,
        store=store,
        reporter=reporter,
        rule=rule,
        wheels=wheels,
        staged=staged,
    )


def _put_together(maker: LayerMaker, part: Part, store: LocalStore) -> None:
    """Put a layer over those below it; made when it is not in the store."""

    def build(folder: Path) -> None:
        maker.make(part, folder)

    _find_layer(store, part)
    path = store.get_or_build(LAYERS, part.key, build).path
    maker.assembly.add(part.name, path / TREE)


def _find_layer(store: LocalStore, part: Part) -> Path | None:
    """A layer in the store, whole; its unpacked tree is not sealed."""
    path = store.find(LAYERS, part.key)
    if path and not (path / TREE).is_dir():
        store.remove(LAYERS, part.key)
        return None
    return path


def _layer(path: Path) -> Layer:
    return Layer(load(path / RECORD_FILE, EnvironmentLayerRecord).layer, path / LAYER_FILE)


def _check(maker: LayerMaker, selection: Selection) -> tuple[dict[str, str], Imports, tuple[str, ...] | None]:
    """Compare the environment with its lock and import its modules; its packages, what was found, what torch loads."""
    lock, bench = maker.lock, maker.bench
    with maker.reporter.step("compare with the lock"):
        packages = distributions(bench.tree / maker.site_packages)
        check_against(lock.packages(), packages)
    checker = bench.checker(_variables(selection, lock))
    python = f"{VENV}/bin/python"
    found = try_imports(modules_of(lock.lock), python, checker, bench.logs, maker.reporter, probe=INSIDE_PROBE)
    imports = found.refuse_failed()
    return packages, imports, loaded_libraries(python, checker, bench.logs, INSIDE_LOADED)
