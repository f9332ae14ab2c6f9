"""Makes environments: layers from the store or made anew, put together, compared with the lock, and tried."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.core import sandbox
from envbuild.core.background import interruptible
from envbuild.core.digests import digest_of, sha256_bytes, sha256_file, short
from envbuild.core.errors import CheckRefusedError
from envbuild.core.exit_status import describe_status, tail
from envbuild.core.files import machine_errors, make_private, remove_tree, write_atomic
from envbuild.core.progress import SilentReporter
from envbuild.core.sandbox import Bind
from envbuild.image.base import StoredBase
from envbuild.image.layers.dist_info import check_against, distributions
from envbuild.image.layers.groups import LayerPlan, plan_layers
from envbuild.image.layers.install import LAYER_FILE, TREE, LayerMaker
from envbuild.image.layers.sandbox import (
    INSIDE_LOADED,
    INSIDE_PROBE,
    INSIDE_RUNNER,
    LOADED_PROBE,
    VENV,
    InstallSandbox,
    builder_paths,
)
from envbuild.image.record import EnvironmentLayerRecord, EnvironmentRecord
from envbuild.image.scan.scan import scan_stored
from envbuild.lock.lockfile import LockDirectory, snapshot
from envbuild.rootfs.layer import Layer
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE, dump, load
from envbuild.sync.driver_start import DRIVER, MANAGEMENT, start_driver, stub_source
from envbuild.sync.imports import PROBE, ImportProbe, check_environment, fix_of, modules_of, try_imports
from envbuild.sync.install import add_files
from envbuild.sync.install_target import RunCommand, run_conclusively
from envbuild.sync.zipapp import smoke_bytes, smoke_file
from envbuild.wheels.cache.wheelhouse import Built

KIND = "environments"
LAYERS = "layers"
PYTHON = f"{VENV}/bin/python"
# Raised when something else is checked of an environment.
FORMAT = 3
MARK = "envbuild-loaded: "


@dataclass(frozen=True, kw_only=True)
class EnvironmentInputs:
    """What an environment is made from.

    Attributes:
        wheels: wheels of the wheelhouse for packages of phase compile, which are then not built.
    """

    selection: Selection
    lock: LockDirectory
    base: StoredBase
    wheels: Mapping[str, Built] = field(default_factory=dict)

    @property
    def driver(self) -> Driver:
        """The driver of the certification cases, which has to start."""
        return self.lock.lock.driver or self.selection.stack.driver

    @property
    def variables(self) -> dict[str, str]:
        """What is set while modules are imported."""
        return check_environment(self.selection.target) | self.lock.lock.variables(VENV)


@dataclass(frozen=True, kw_only=True)
class StoredEnvironment:
    """An environment in the store: its record, and its layers, lowest first."""

    record: EnvironmentRecord
    layers: tuple[Layer, ...]


def environment_key(inputs: EnvironmentInputs, plans: Sequence[LayerPlan]) -> str:
    """The key of an environment: its layers, the base under them, and what is checked."""
    lock = inputs.lock
    return digest_of(
        {
            "format": FORMAT,
            "layers": [plan.key for plan in plans],
            "packages": {**lock.packages()},
            "base": inputs.base.digest,
            "modules": {name: list(modules) for name, modules in modules_of(lock.lock).items()},
            "variables": {**inputs.variables},
            "files": {**lock.lock.files},
            "probes": [sha256_file(data_root() / name) for name in (PROBE, LOADED_PROBE)],
            "stubs": [sha256_file(stub_source(name)) for name in (DRIVER, MANAGEMENT)],
            "start": [inputs.driver.value, inputs.selection.target.device.value, sha256_bytes(smoke_bytes())],
        }
    )


def make_environment(inputs: EnvironmentInputs, context: Context) -> StoredEnvironment:
    """The environment of a lock on a base; layers that the store does not have are made.

    Raises:
        BuildError: a package does not install.
        CheckRefusedError: what is installed is not what is locked, or does not import.
        NetworkError: an index cannot be reached.
    """
    store = context.store
    plans = plan_layers(inputs.lock, inputs.selection.base, inputs.base, inputs.wheels)
    key = environment_key(inputs, plans)

    def build(folder: Path) -> None:
        logs = store.root / "logs" / f"environment-{short(key)}"
        remove_tree(logs)
        with open_maker(inputs, "environment", logs, context) as maker, interruptible(1) as scanner:
            # Layers are read while others are installed; what goes wrong with it is reported when the image is checked.
            def read(layer: Layer) -> None:
                scanner.submit(scan_stored, layer, builder_paths(store), LocalStore(store.root, SilentReporter()))

            for layer in inputs.base.layers:
                read(layer)
            for plan in plans:
                read(_add_layer(maker, plan, store))
            record = _tried(maker, plans, inputs)
        write_atomic(folder / RECORD_FILE, dump(record))

    entry = store.get_or_build(KIND, key, build)
    # The record may be older than a layer that was removed from the store since.
    if any(_find_layer(store, plan) is None for plan in plans):
        entry = store.rebuild(KIND, key, build)
    return StoredEnvironment(
        record=load(entry.path / RECORD_FILE, EnvironmentRecord),
        layers=tuple(_layer(store.path_of(LAYERS, plan.key)) for plan in plans),
    )


@contextlib.contextmanager
def open_maker(inputs: EnvironmentInputs, label: str, logs: Path, context: Context) -> Iterator[LayerMaker]:
    """What makes the layers of an environment, in a folder of the store that goes when the block is left."""
    # A store of its own: uv hard-links from its cache only what lies on the same mount, so the sandbox gets one folder
    # with both, and not the rest of the store.
    uv_store = LocalStore(context.store.root / "uv", context.reporter)
    with uv_store.staging(label) as staged:
        with machine_errors(uv_store.root):
            # Builds of packages write there: no other account may run what they leave.
            make_private(uv_store.root)
            (uv_store.root / "cache").mkdir(exist_ok=True)
        yield LayerMaker(
            sandbox=InstallSandbox(
                base=inputs.base, uv_root=uv_store.root, tree=staged / "tree", logs=logs, bwrap=sandbox.probe()
            ),
            lock=snapshot(inputs.lock, staged / "lock"),
            python=inputs.selection.base.python,
            wheels=inputs.wheels,
            staged=staged,
            context=context,
        )


def _add_layer(maker: LayerMaker, plan: LayerPlan, store: LocalStore) -> Layer:
    """Put a layer over those below it; made when it is not in the store."""
    # Removes a layer without its tree, so that it is made anew by the next line.
    _find_layer(store, plan)
    path = store.get_or_build(LAYERS, plan.key, partial(maker.make, plan)).path
    maker.assembly.add(plan.name, path / TREE)
    return _layer(path)


def _find_layer(store: LocalStore, plan: LayerPlan) -> Path | None:
    """A layer in the store, whole; its unpacked tree is not sealed."""
    path = store.find(LAYERS, plan.key)
    if path and not (path / TREE).is_dir():
        store.remove(LAYERS, plan.key)
        return None
    return path


def _layer(path: Path) -> Layer:
    return Layer(load(path / RECORD_FILE, EnvironmentLayerRecord).layer, path / LAYER_FILE)


def _tried(maker: LayerMaker, plans: Sequence[LayerPlan], inputs: EnvironmentInputs) -> EnvironmentRecord:
    """Compare the environment with its lock, import its modules and its driver, and see what torch loads."""
    lock, box, reporter = maker.lock, maker.sandbox, maker.context.reporter
    with reporter.step("compare with the lock"):
        packages = distributions(maker.site_packages)
        check_against(lock.packages(), packages)
    # In the image they are in its uppermost layer.
    add_files(lock, maker.site_packages)
    checker = box.checker(inputs.variables)
    probe = ImportProbe(
        python=PYTHON,
        program=INSIDE_PROBE,
        run=checker,
        logs=box.logs,
        run_with_stub=box.checker_with_stubs(inputs.variables, maker.staged / "driver", DRIVER),
    )
    imports = try_imports(modules_of(lock.lock), probe, reporter).refuse_failed(fix_of(lock.lock))
    not_checked = {outcome.module: outcome.reason for outcome in imports.not_checked}
    starts = inputs.driver is not Driver.NONE and "torch" in {*packages, *inputs.selection.base.provides}
    driver = inputs.driver if starts else None
    if driver and (reason := _not_started(driver, maker, inputs)):
        not_checked[f"driver {driver.value}"] = reason
    return EnvironmentRecord(
        layers=tuple(plan.key for plan in plans),
        packages=packages,
        driver=driver,
        not_checked=not_checked,
        loaded=_loaded_libraries(checker, box.logs),
    )


def _not_started(driver: Driver, maker: LayerMaker, inputs: EnvironmentInputs) -> str:
    """Start the driver of the stack; returns why that could not be checked, and nothing where it starts.

    Raises:
        CheckRefusedError: the driver does not import, or its imports start CUDA.
    """
    device, box, context = inputs.selection.target.device, maker.sandbox, maker.context
    runner = Bind(source=smoke_file(context.store)[0], target=INSIDE_RUNNER)
    if device is Device.CPU:
        # The runner hides the GPUs of such a machine, so nobody is asked for them.
        run: RunCommand | None = box.checker(inputs.variables, runner)
    else:
        folder = maker.staged / "driver-and-management"
        run = box.checker_with_stubs(inputs.variables, folder, DRIVER, MANAGEMENT, binds=(runner,))
    if run is None:
        return "there is no C compiler in the image, which a stub of the GPU's driver takes"
    with context.reporter.step(f"import driver {driver.value}"):
        return start_driver(driver, device, PYTHON, run, box.logs, INSIDE_RUNNER)


def _loaded_libraries(run: RunCommand, logs: Path) -> tuple[str, ...] | None:
    """The shared libraries of a process that imported torch; None where there is no torch.

    Raises:
        CheckRefusedError: torch does not import.
        InconclusiveError: its import did not end in time.
    """
    log = logs / "loaded.log"
    finished = run_conclusively(run, [PYTHON, "-I", INSIDE_LOADED, MARK], what="import torch", log=log)
    # By the mark: torch, and what it imports, may print before.
    for line in reversed(finished.output.splitlines()):
        if line.startswith(MARK):
            paths: Any = json.loads(line.removeprefix(MARK))
            return None if paths is None else tuple(sorted(str(path) for path in paths))
    raise CheckRefusedError(
        f"cannot read which libraries torch loads: its process {describe_status(finished.status)}",
        why=tail(finished.output),
        fix="See the log. If torch does not import, lock other versions.",
        log=log,
    )
