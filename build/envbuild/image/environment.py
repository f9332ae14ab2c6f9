"""Environments: a lock installed at its final path inside a base, compiled, checked, and written as a layer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.catalog import Selection
from envbuild.catalog.data import data_root
from envbuild.catalog.site import Site
from envbuild.core import sandbox
from envbuild.core.digests import digest_of, sha256_file, short
from envbuild.core.errors import BuildError, CheckRefusedError
from envbuild.core.files import machine_errors, remove_tree, write_atomic
from envbuild.core.process import Finished, run
from envbuild.core.progress import Reporter
from envbuild.core.sandbox import Bind, Sandbox
from envbuild.image import gzips, network, running
from envbuild.image.bases import OWN_PLACE, MadeBase
from envbuild.image.layers import Layer, LayerWriter, plain_mode
from envbuild.image.record import RECORD_FILE, EnvironmentRecord, dump, load
from envbuild.image.tidy import check_against, distributions, tidy
from envbuild.lock.record import LockDirectory, snapshot
from envbuild.lock.torch_builds import locked_torch
from envbuild.lock.uv import uv_program, uv_version
from envbuild.store.local import LocalStore
from envbuild.sync.imports import PROBE, Imports, check_environment, modules_of, try_imports
from envbuild.sync.install import install
from envbuild.sync.place import Place
from envbuild.wheels.keeping.wheelhouse import NO_BUILT, Built, digests_of

KIND = "environments"
# Raised when an environment made from the same inputs would come out differently.
FORMAT = 1
LAYER_FILE = "layer.tar.gz"
PREFIX = f"/{OWN_PLACE}"
VENV = f"{PREFIX}/venv"
# Where things are seen while the environment is made; none of it is in the image.
INSIDE = "/run/envbuild"
BUILT = f"{INSIDE}/built"
INSIDE_PROBE = f"{INSIDE}/probe/import_module.py"
COMPILER = "containers/native/compile_tree.py"
PLAIN_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108 - inside


@dataclass(frozen=True, kw_only=True)
class MadeEnvironment:
    """An environment in the store."""

    path: Path
    record: EnvironmentRecord
    built: bool

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Its layers, lowest first."""
        return (Layer(self.record.layer, self.path / LAYER_FILE),)


def environment_key(lock: LockDirectory, base_digest: str, wheels: Mapping[str, Built] = NO_BUILT) -> str:
    """The key of an environment: the lock, the very base it is installed in, and what installs and packs it.

    Args:
        wheels: wheels of the wheelhouse that it is installed with, by package.
    """
    return digest_of(
        {
            "format": FORMAT,
            "lock": lock.lock.digest,
            "modules": {name: list(modules) for name, modules in modules_of(lock.lock).items()},
            "epoch": lock.lock.source_date_epoch,
            "base": base_digest,
            "prefix": VENV,
            "uv": uv_version(),
            "gzip": gzips.ENCODER,
            "compiler": sha256_file(data_root() / COMPILER),
            # An environment without them has the key that it had before there were any.
            **({"wheels": digests_of(wheels)} if wheels else {}),
        }
    )


def make_environment(
    selection: Selection,
    lock: LockDirectory,
    base: MadeBase,
    site: Site,
    store: LocalStore,
    reporter: Reporter,
    wheels: Mapping[str, Built] = NO_BUILT,
) -> MadeEnvironment:
    """The environment of a lock on a base; made when it is not in the store.

    Args:
        wheels: wheels of the wheelhouse for packages of phase compile, which are then not built.

    Raises:
        BuildError: a package does not install.
        CheckRefusedError: what is installed is not what is locked, or does not import.
        NetworkError: an index cannot be reached.
    """
    key = environment_key(lock, base.digest, wheels)

    def build(folder: Path) -> None:
        logs = store.root / "logs" / f"environment-{short(key)}"
        remove_tree(logs)
        # A store of its own: uv hard-links from its cache only what lies on the same mount, so the sandbox gets one
        # folder with both, and not the rest of the store.
        workshop = LocalStore(store.root / "uv", reporter)
        with workshop.staging("environment") as staged:
            bench = _Bench(
                base=base,
                workshop=workshop.root,
                tree=staged / "tree",
                logs=logs,
                bwrap=sandbox.probe(),
                wheels={_seen(item): item.wheel for item in wheels.values()},
            )
            built = {name: _seen(item) for name, item in wheels.items()}
            packages, imports = _fill(bench, selection, snapshot(lock, staged / "lock"), site, built, reporter)
            place = PREFIX.lstrip("/")
            with (
                reporter.step("write the layer of the environment"),
                LayerWriter(folder / LAYER_FILE, lock.lock.source_date_epoch) as writer,
            ):
                writer.add_directory(place)
                writer.add_tree(bench.tree, place, mode=plain_mode)
        layer = writer.record("environment")
        record = EnvironmentRecord(
            schema="envbuild.environment/1",
            layer=layer,
            packages=packages,
            not_checked={item.module: item.reason for item in imports.not_checked},
        )
        write_atomic(folder / RECORD_FILE, dump(record))

    entry = store.get_or_build(KIND, key, build)
    record = load(entry.path / RECORD_FILE, EnvironmentRecord)
    return MadeEnvironment(path=entry.path, record=record, built=entry.built)


def _seen(item: Built) -> str:
    """Where a wheel is seen while the environment is made: a path of its own, since uv's cache goes by paths."""
    return f"{BUILT}/{short(item.record.digest)}/{item.wheel.name}"


def _fill(
    bench: _Bench,
    selection: Selection,
    lock: LockDirectory,
    site: Site,
    built: Mapping[str, str],
    reporter: Reporter,
) -> tuple[dict[str, str], Imports]:
    """Make the environment on the bench; returns its packages, and what the import check found."""
    python = selection.base.python
    access = network.access(site, locked_torch(site, lock.lock), INSIDE)
    with machine_errors(bench.tree):
        bench.tree.mkdir()
        (bench.workshop / "cache").mkdir(exist_ok=True)
    place = Place(
        uv=f"{INSIDE}/uv",
        lock=f"{INSIDE}/lock",
        python=python.executable,
        venv=VENV,
        run=bench.installer(lock.path, access, reporter),
        disk=bench.tree,
        logs=bench.logs,
    )
    install(lock, place, access.uv_args, reporter, wheels=built)
    venv = bench.tree / "venv"
    site_packages = venv / "lib" / f"python{python.version}" / "site-packages"
    with reporter.step("compare with the lock, compile to bytecode"):
        tidy(venv, site_packages)
        packages = distributions(site_packages)
        check_against(lock.packages(), packages)
        bench.compile(python.executable)
    checker = bench.checker(check_environment(selection.target) | lock.lock.variables(VENV))
    found = try_imports(modules_of(lock.lock), place.venv_python, checker, bench.logs, reporter, probe=INSIDE_PROBE)
    return packages, found.refuse_failed()


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """Where an environment is made: folders of this machine, and ways to run things in the base.

    Attributes:
        wheels: built wheels by the path at which they are seen in the base.
    """

    base: MadeBase
    workshop: Path
    tree: Path
    logs: Path
    bwrap: Path
    wheels: Mapping[str, Path]

    def installer(self, lock: Path, access: network.Access, reporter: Reporter) -> _Runner:
        """Runs uv: with the network, uv's cache and the environment's folder, which its final path points to."""
        seen_workshop = f"{INSIDE}/workshop"
        box = Sandbox(
            root=self.base.rootfs,
            opened=(PREFIX.rsplit("/", 1)[0],),
            binds=(
                Bind(source=self.workshop, target=seen_workshop, writable=True),
                Bind(source=uv_program().resolve(), target=f"{INSIDE}/uv"),
                Bind(source=lock.resolve(), target=f"{INSIDE}/lock"),
                *access.binds,
                *(Bind(source=file.resolve(), target=target) for target, file in self.wheels.items()),
            ),
            # A link and no second mount, across which uv could not hard-link.
            links=((PREFIX, f"{seen_workshop}/{self.tree.relative_to(self.workshop)}"),),
            environment={
                **PLAIN_ENVIRONMENT,
                **access.environment,
                "UV_CACHE_DIR": f"{seen_workshop}/cache",
                "UV_LINK_MODE": "hardlink",
                "UV_COMPILE_BYTECODE": "0",
                "UV_NO_PROGRESS": "1",
                "UV_PYTHON_DOWNLOADS": "never",
            },
            network=True,
        )
        return _Runner(self.bwrap, box, reporter)

    def checker(self, variables: dict[str, str]) -> _Runner:
        """Runs programs of the finished environment, which they cannot change; no network."""
        box = Sandbox(
            root=self.base.rootfs,
            opened=(PREFIX.rsplit("/", 1)[0],),
            binds=(Bind(source=self.tree, target=PREFIX), Bind(source=data_root() / PROBE, target=INSIDE_PROBE)),
            environment={**PLAIN_ENVIRONMENT, **self._variables(variables)},
        )
        return _Runner(self.bwrap, box, None)

    def _variables(self, own: Mapping[str, str]) -> dict[str, str]:
        """The image's variables, as far as they are known here."""
        return running.environment(VENV, self.base.record.config.environment, {}, own)

    def compile(self, python: str) -> None:
        """Compile the environment's sources with the base's Python."""
        script = data_root() / COMPILER
        box = Sandbox(
            root=self.base.rootfs,
            opened=(PREFIX.rsplit("/", 1)[0],),
            binds=(
                Bind(source=self.tree, target=PREFIX, writable=True),
                Bind(source=script, target=f"{INSIDE}/compile/{script.name}"),
            ),
            environment={**PLAIN_ENVIRONMENT, "PYTHONHASHSEED": "0"},
        )
        run(
            box.command(
                self.bwrap,
                [python, "-S", "-s", f"{INSIDE}/compile/{script.name}", VENV, str(os.cpu_count() or 1)],
            ),
            what="compile the environment to bytecode",
            env=box.process_environment(),
            log=self.logs / "compile.log",
            error=BuildError,
            working_on=self.tree,
        )


@dataclass(frozen=True)
class _Runner:
    """A :class:`envbuild.sync.place.Run` inside a sandbox."""

    bwrap: Path
    box: Sandbox
    reporter: Reporter | None

    def __call__(self, argv: Sequence[str], *, what: str, log: Path, timeout_seconds: float | None = None) -> Finished:
        return run(
            self.box.command(self.bwrap, argv),
            what=what,
            log=log,
            env=self.box.process_environment(),
            on_line=self.reporter.update if self.reporter else None,
            check=False,
            timeout_seconds=timeout_seconds,
            error=CheckRefusedError,
        )
