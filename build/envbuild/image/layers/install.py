"""Makes one layer of an environment: its packages installed over the layers below, compiled, and written as a tar."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from envbuild.catalog.site import Site
from envbuild.core.digests import short
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors, write_atomic
from envbuild.core.progress import Reporter
from envbuild.image.layers import network
from envbuild.image.layers.assembly import Assembly, link
from envbuild.image.layers.dist_info import conflicts, from_commit, infos, rows
from envbuild.image.layers.groups import Part
from envbuild.image.layers.policy import Layering
from envbuild.image.layers.sandbox import BUILT, INSIDE, LOGS, PREFIX, VENV, InstallSandbox
from envbuild.image.layers.strip import tidy
from envbuild.image.record import EnvironmentLayerRecord
from envbuild.lock.lockfile import LockDirectory, LockedComponent
from envbuild.lock.uv.torch_builds import locked_torch
from envbuild.rootfs.layer_writer import EPOCH, LayerWriter, plain_rights
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE, dump
from envbuild.sync.install import LATER, install_again, install_packages, make_venv
from envbuild.sync.install_target import InstallTarget
from envbuild.wheels.build.unpack import unpack
from envbuild.wheels.cache.wheelhouse import Built
from envbuild.wheels.git_archive import archive_of_commit

LAYER_FILE = "layer.tar.gz"
# The unpacked layer, hard links into uv's cache; the store does not seal a folder of this name.
TREE = "rootfs"
SOURCES = f"{INSIDE}/sources"


@dataclass(frozen=True, kw_only=True)
class LayerMaker:
    """Makes the layers of one environment, lowest first.

    Attributes:
        lock: a private copy, which nobody changes.
        assembly: the layers that are there already.
        executable: the base's interpreter.
        site_packages: relative to what becomes ``PREFIX``.
        wheels: wheels of the wheelhouse, by package.
        staged: a folder for sources.
    """

    bench: InstallSandbox
    lock: LockDirectory
    assembly: Assembly
    executable: str
    site_packages: str
    site: Site
    store: LocalStore
    reporter: Reporter
    rule: Layering
    wheels: Mapping[str, Built]
    staged: Path

    def make(self, part: Part, folder: Path) -> None:
        """Make the layer ``part`` and put it into ``folder``: tar, unpacked tree and record.

        Raises:
            BuildError: a package does not install.
            CheckRefusedError: packages bring different files of one name, or change those of another layer.
            NetworkError: an index cannot be reached.
        """
        logs = self.bench.logs / part.name
        with machine_errors(logs):
            logs.mkdir(parents=True, exist_ok=True)
        self._install(part, logs)
        tree = folder / TREE
        with self.reporter.step(f"compile layer {part.name} to bytecode"):
            self._take(tree)
            self.bench.compile(tree, self.executable, logs / "compile.log")
        place = PREFIX.lstrip("/")
        with self.reporter.step(f"write layer {part.name}"), LayerWriter(folder / LAYER_FILE, EPOCH) as writer:
            writer.add_directory(place)
            writer.add_tree(tree, place, rights=plain_rights)
        record = EnvironmentLayerRecord(
            schema="envbuild.environment-layer/1",
            key=part.key,
            layer=writer.record(part.name),
            packages=dict(part.packages),
        )
        write_atomic(folder / RECORD_FILE, dump(record))

    @cached_property
    def _access(self) -> network.Access:
        """The way to the network; looked for when the first layer has to be made."""
        return network.access(self.site, locked_torch(self.site, self.lock.lock), INSIDE)

    def _install(self, part: Part, logs: Path) -> None:
        """Install the packages of a layer, or make the bare environment, and remove what uv leaves."""
        trees = self._trees(part)
        ready = {name: (_seen(item), item.wheel) for name, item in self.wheels.items() if name in part.packages}
        ready |= {name: (f"{SOURCES}/{name}-{item.commit}", folder) for name, (item, folder) in trees.items()}
        runner = self.bench.installer(
            self.lock.path,
            self._access,
            logs,
            self.reporter,
            files=dict(ready.values()),
            variables={version_variable(name): item.version for name, (item, _) in trees.items()},
        )
        place = InstallTarget(
            uv=f"{INSIDE}/uv",
            lock=f"{INSIDE}/lock",
            python=self.executable,
            venv=VENV,
            run=runner,
            disk=self.bench.tree,
            logs=logs,
            logs_seen=LOGS,
        )
        if part.packages:
            paths = {name: seen for name, (seen, _) in ready.items()}
            paths |= {
                name: f"{paths[name]}/{item.subdirectory}" for name, (item, _) in trees.items() if item.subdirectory
            }
            self._install_packages(part, place, paths)
        else:
            with self.reporter.step("make the environment"):
                make_venv(place, sees_base=bool(self.lock.lock.base.provides))
        site_packages = self.bench.tree / self.site_packages
        for name, info in infos(site_packages, trees).items():
            item = trees[name][0]
            with machine_errors(info):
                from_commit(info, item.git or "", item.commit or "", item.subdirectory)
        tidy(self.bench.tree / "venv", site_packages)

    def _install_packages(self, part: Part, place: InstallTarget, ready: Mapping[str, str]) -> None:
        others = {name for name in self.lock.packages() if name not in part.packages}
        install_packages(
            self.lock,
            place,
            self._access.uv_args,
            self.reporter,
            wheels=ready,
            leave_out=others,
            label=f", layer {part.name}",
        )
        self._settle(part, place, others)

    def _trees(self, part: Part) -> dict[str, tuple[LockedComponent, Path]]:
        """The sources of packages that come from git: a base has no git, and needs none."""
        found = {}
        for name, item in self.lock.lock.components.items():
            if name in part.packages and item.git and item.commit and name not in self.wheels:
                archive = archive_of_commit(name, item.git, item.commit, self.store, self.reporter)
                found[name] = item, unpack(name, archive, self.staged / name)
        return found

    def _settle(self, part: Part, place: InstallTarget, others: Collection[str]) -> None:
        """Where packages of the layer bring one file each under the same name, decide whose it is.

        uv installs many at once, and leaves that to chance.
        """
        site_packages = self.bench.tree / self.site_packages
        listed = {name: rows(info) for name, info in infos(site_packages, part.packages).items()}
        winners = []
        for path, names in conflicts(listed):
            if self.rule.may_differ(path):
                winners.append(names[-1])
            elif not any(name in LATER for name in names):
                raise _differing(path, names)
        for name in sorted(set(winners)):
            install_again(self.lock, place, self._access.uv_args, name, others)

    def _take(self, tree: Path) -> None:
        """Put what was installed into a tree of its own."""
        with machine_errors(tree):
            tree.mkdir()
            for relative in self.assembly.added():
                (tree / relative).parent.mkdir(parents=True, exist_ok=True)
                link(self.bench.tree / relative, tree / relative)


def _seen(item: Built) -> str:
    """Where a wheel is seen while the environment is made: a path of its own, since uv's cache goes by paths."""
    return f"{BUILT}/{short(item.record.digest)}/{item.wheel.name}"


def version_variable(name: str) -> str:
    """setuptools-scm's variable for a package whose sources have no history to take a version from."""
    return "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_" + name.replace("-", "_").upper()


def _differing(path: str, names: list[str]) -> CheckRefusedError:
    return CheckRefusedError(
        f"{' and '.join(names)} bring different files of one name: {path}",
        why="One of them would run with a file of the other, and which one is chance.",
        fix="Leave one of them out of the stack, or choose versions that agree. Where it does not matter whose file it "
        "is, say so under overlaps in containers/native/layers.toml.",
    )
