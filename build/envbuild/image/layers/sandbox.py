"""The sandbox in which an environment is made: folders of this machine, and ways to run programs inside the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.data import data_root
from envbuild.core.files import machine_errors
from envbuild.core.process import Finished, ProcessOptions, run
from envbuild.core.progress import Reporter
from envbuild.core.sandbox import Bind, Sandbox
from envbuild.image.base import OWN_PLACE, StoredBase
from envbuild.image.layers.network import Access
from envbuild.image.variables import image_variables
from envbuild.lock.uv.program import uv_program
from envbuild.store.local import LocalStore
from envbuild.sync.driver_start import make_stub, variables_with_stub
from envbuild.sync.imports import PROBE
from envbuild.sync.install_target import InconclusiveError

PREFIX = f"/{OWN_PLACE}"
VENV = f"{PREFIX}/venv"
# Paths inside while the environment is made; none of them is in the image.
INSIDE = "/run/envbuild"
BUILT = f"{INSIDE}/built"
LOGS = f"{INSIDE}/logs"
INSIDE_PROBE = f"{INSIDE}/probe/import_module.py"
INSIDE_LOADED = f"{INSIDE}/probe/loaded_libraries.py"
INSIDE_RUNNER = f"{INSIDE}/probe/smoke.pyz"
INSIDE_STUBS = f"{INSIDE}/stubs"
LOADED_PROBE = "containers/native/loaded_libraries.py"
PLAIN_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108 - inside

# A shorter path is a word that files may have for their own reasons (/cache, /root).
MIN_PARTS = 3


def _probes() -> tuple[Bind, ...]:
    """The programs that try the finished environment from inside."""
    places = {PROBE: INSIDE_PROBE, LOADED_PROBE: INSIDE_LOADED}
    return tuple(Bind(source=data_root() / source, target=target) for source, target in places.items())


def builder_paths(store: LocalStore) -> tuple[str, ...]:
    """Folders of the building machine that no file of an image may name."""
    root = store.root.resolve()
    return (INSIDE, *([str(root)] if len(root.parts) >= MIN_PARTS else []))


@dataclass(frozen=True, kw_only=True)
class InstallSandbox:
    """Runs uv, the compiler and the checks over a base.

    Attributes:
        uv_root: the folder with uv's cache and the staged environment: uv hard-links only within one mount, so the
            sandbox gets both as one, and not the rest of the store.
        tree: what becomes ``PREFIX``; below ``uv_root``.
        logs: the folder for the logs.
    """

    base: StoredBase
    uv_root: Path
    tree: Path
    logs: Path
    bwrap: Path

    def installer(
        self,
        lock: Path,
        access: Access,
        logs: Path,
        reporter: Reporter,
        *,
        files: Mapping[str, Path],
        variables: Mapping[str, str],
    ) -> Runner:
        """Runs uv: with the network, uv's cache and the environment's folder, which its final path points to.

        Args:
            logs: the folder in which requirement files are handed over.
            files: files and folders of this machine by their path inside; folders are writable.
            variables: for builds.
        """
        work = f"{INSIDE}/work"
        box = Sandbox(
            root=self.base.rootfs,
            # The root is read-only, and a base has no PREFIX: the place for the link is made on a tmpfs over /opt.
            opened=(PREFIX.rsplit("/", 1)[0],),
            binds=(
                Bind(source=self.uv_root, target=work, writable=True),
                Bind(source=uv_program().resolve(), target=f"{INSIDE}/uv"),
                Bind(source=lock.resolve(), target=f"{INSIDE}/lock"),
                Bind(source=logs, target=LOGS),
                *access.binds,
                *(Bind(source=file.resolve(), target=path, writable=file.is_dir()) for path, file in files.items()),
            ),
            # A link: uv could not hard-link into a second mount.
            links=((PREFIX, f"{work}/{self.tree.relative_to(self.uv_root)}"),),
            environment={
                **PLAIN_ENVIRONMENT,
                **access.environment,
                **variables,
                "UV_CACHE_DIR": f"{work}/cache",
                # One copy of a package for all environments of the machine; what a build changes in it, Assembly.added
                # refuses.
                "UV_LINK_MODE": "hardlink",
                "UV_COMPILE_BYTECODE": "0",
                "UV_NO_PROGRESS": "1",
                "UV_PYTHON_DOWNLOADS": "never",
                # Bytecode is written by our own compiler alone.
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            network=True,
        )
        return Runner(self.bwrap, box, reporter)

    def checker(self, variables: Mapping[str, str], *binds: Bind, writable: bool = False) -> Runner:
        """Runs programs of the finished environment, without a network.

        Args:
            binds: what it sees besides.
            writable: imports may write into it (bytecode, caches). In an image that would be in the layers.
        """
        box = Sandbox(
            root=self.base.rootfs,
            opened=(PREFIX.rsplit("/", 1)[0],),
            binds=(Bind(source=self.tree, target=PREFIX, writable=writable), *_probes(), *binds),
            environment={
                **PLAIN_ENVIRONMENT,
                **image_variables(VENV, self.base.record.config.environment, {}, variables),
            },
        )
        return Runner(self.bwrap, box, None)

    def checker_with_stubs(
        self,
        variables: Mapping[str, str],
        folder: Path,
        *names: str,
        binds: Sequence[Bind] = (),
        writable: bool = False,
    ) -> Runner | None:
        """The same with stubs of the driver's libraries (:mod:`envbuild.sync.driver_start`); None without a compiler.

        Args:
            folder: for the stubs, outside of ``tree``: they are in no image.
        """
        with machine_errors(folder):
            folder.mkdir()
        compiler = self.checker(variables, Bind(source=folder, target=INSIDE_STUBS, writable=True))
        log = self.logs / "driver-stub.log"
        if not all(make_stub(compiler, folder, INSIDE_STUBS, log, name) for name in names):
            return None
        stubbed = variables_with_stub(variables, INSIDE_STUBS)
        return self.checker(stubbed, Bind(source=folder, target=INSIDE_STUBS), *binds, writable=writable)


@dataclass(frozen=True)
class Runner:
    """A :class:`envbuild.sync.install_target.RunCommand` inside a sandbox."""

    bwrap: Path
    box: Sandbox
    reporter: Reporter | None

    def __call__(self, argv: Sequence[str], *, what: str, log: Path, timeout_seconds: float | None = None) -> Finished:
        return run(
            self.box.command(self.bwrap, argv),
            what=what,
            log=log,
            on_line=self.reporter.update if self.reporter else None,
            check=False,
            options=ProcessOptions(
                env=self.box.process_environment(), timeout_seconds=timeout_seconds, error=InconclusiveError
            ),
        )
