"""Makes one layer of an environment: its packages installed over the layers below, compiled, and written as a tar."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from envbuild.catalog import knowledge
from envbuild.catalog.base import BasePython
from envbuild.catalog.context import Context
from envbuild.core.digests import short
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import link, machine_errors, write_atomic
from envbuild.git.checkout import archive_of_commit
from envbuild.image.base.standalone import compile_tree
from envbuild.image.layers import network
from envbuild.image.layers.assembly import Assembly
from envbuild.image.layers.dist_info import conflicts, from_commit, infos, remove_leftovers, rows
from envbuild.image.layers.groups import LayerPlan, layer_policy
from envbuild.image.layers.sandbox import BUILT, INSIDE, LOGS, PREFIX, VENV, InstallSandbox
from envbuild.image.record import EnvironmentLayerRecord
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.models import LockedComponent
from envbuild.lock.uv.torch_builds import locked_torch
from envbuild.rootfs.layer_writer import EPOCH, LayerWriter, plain_rights
from envbuild.store.record import RECORD_FILE, dump
from envbuild.sync.install import InstallScope, install_again, install_packages, make_venv
from envbuild.sync.install_target import InstallTarget
from envbuild.wheels.build.unpack import unpack
from envbuild.wheels.cache.wheelhouse import Built
from envbuild.wheels.sources import version_variables

LAYER_FILE = "layer.tar.gz"
# The unpacked layer, hard links into uv's cache; the store does not seal a folder of this name.
TREE = "rootfs"
SOURCES = f"{INSIDE}/sources"


@dataclass(frozen=True, kw_only=True)
class LayerMaker:
    """Makes the layers of one environment, lowest first.

    Attributes:
        lock: a private copy that does not change.
        python: the base's.
        wheels: wheels of the wheelhouse, by package.
        staged: a folder for sources.
    """

    sandbox: InstallSandbox
    lock: LockDirectory
    python: BasePython
    wheels: Mapping[str, Built]
    staged: Path
    context: Context

    @cached_property
    def assembly(self) -> Assembly:
        """The layers so far, in the folder that becomes ``PREFIX``."""
        tree, policy = self.sandbox.tree, layer_policy()
        prefix = f"{self.site_packages.relative_to(tree)}/"

        def may_differ(path: str) -> bool:
            return path.startswith(prefix) and policy.may_differ(path.removeprefix(prefix))

        return Assembly(tree, may_differ)

    @property
    def site_packages(self) -> Path:
        """The folder of this machine with the installed packages."""
        return self.sandbox.tree / f"venv/lib/python{self.python.version}/site-packages"

    def make(self, plan: LayerPlan, folder: Path) -> None:
        """Make a layer and put it into ``folder``: tar, unpacked tree and record.

        Raises:
            BuildError: a package does not install.
            CheckRefusedError: packages bring different files of one name, or change those of another layer.
            NetworkError: an index cannot be reached.
        """
        logs, reporter = self.sandbox.logs / plan.name, self.context.reporter
        with machine_errors(logs):
            logs.mkdir(parents=True, exist_ok=True)
        assembly = self.assembly
        self.install(plan, logs)
        tree = folder / TREE
        with reporter.step(f"compile layer {plan.name} to bytecode"):
            self._copy(assembly.added(), tree)
            # By itself, in a folder of its own: its bytecode does not depend on the layers below.
            rootfs = self.sandbox.base.rootfs
            compile_tree(rootfs, tree, PREFIX, VENV, self.python.executable, logs / "compile.log")
        prefix = PREFIX.lstrip("/")
        with reporter.step(f"write layer {plan.name}"), LayerWriter(folder / LAYER_FILE, EPOCH) as writer:
            writer.add_directory(prefix)
            writer.add_tree(tree, prefix, rights=plain_rights)
        record = EnvironmentLayerRecord(
            key=plan.key,
            layer=writer.record(plan.name),
            packages=dict(plan.packages),
        )
        write_atomic(folder / RECORD_FILE, dump(record))

    @cached_property
    def _access(self) -> network.Access:
        """The access to the network; determined when the first layer has to be made."""
        site = self.context.site
        return network.access(site, locked_torch(site, self.lock.lock), INSIDE)

    def install(self, plan: LayerPlan, logs: Path, *, settles_conflicts: bool = True) -> None:
        """Install the packages of a layer, or make the bare environment, and remove what uv leaves.

        Args:
            settles_conflicts: of files that several packages bring, the same ones are there each time.

        Raises:
            BuildError: a package does not install.
            CheckRefusedError: packages bring different files of one name, and which one is right is not known.
            NetworkError: an index cannot be reached.
        """
        trees = self._source_trees(plan)
        ready = {
            name: (_path_inside(origin), origin.wheel) for name, origin in self.wheels.items() if name in plan.packages
        }
        # With the commit in the path: uv caches builds by it.
        ready |= {name: (f"{SOURCES}/{name}-{origin.commit}", folder) for name, (origin, folder) in trees.items()}
        runner = self.sandbox.installer(
            self.lock.path,
            self._access,
            logs,
            self.context.reporter,
            files=dict(ready.values()),
            variables={
                key: value
                for name, (origin, tree) in trees.items()
                for key, value in version_variables(name, origin.version, tree / (origin.subdirectory or "")).items()
            },
        )
        target = InstallTarget(
            uv=f"{INSIDE}/uv",
            lock=f"{INSIDE}/lock",
            python=self.python.executable,
            venv=VENV,
            run=runner,
            disk=self.sandbox.tree,
            logs=logs,
            logs_seen=LOGS,
        )
        if plan.packages:
            paths = {name: path for name, (path, _) in ready.items()}
            paths |= {
                name: f"{paths[name]}/{origin.subdirectory}"
                for name, (origin, _) in trees.items()
                if origin.subdirectory
            }
            others = {name for name in self.lock.packages() if name not in plan.packages}
            install_packages(
                self.lock,
                target,
                self._access.source,
                self.context.reporter,
                InstallScope(wheels=paths, leave_out=others),
                label=f", layer {plan.name}",
            )
            if settles_conflicts:
                self._settle_conflicts(plan, target, others)
        else:
            with self.context.reporter.step("make the environment"):
                make_venv(target, sees_base=bool(self.lock.lock.base.provides))
        # uv saw a folder of the sandbox; PEP 610 wants the origin, which `pip freeze` prints.
        for name, info in infos(self.site_packages, trees).items():
            origin = trees[name][0]
            with machine_errors(info):
                from_commit(info, origin.git or "", origin.commit or "", origin.subdirectory)
        remove_leftovers(self.sandbox.tree / "venv", self.site_packages)

    def _source_trees(self, plan: LayerPlan) -> dict[str, tuple[LockedComponent, Path]]:
        """The sources of packages that come from git: a base has no git, and needs none."""
        trees = {}
        for name, component in self.lock.lock.components.items():
            if name in plan.packages and component.git and component.commit and name not in self.wheels:
                archive = archive_of_commit(name, component.git, component.commit, self.context.store)
                trees[name] = component, unpack(name, archive, self.staged / name)
        return trees

    def _settle_conflicts(self, plan: LayerPlan, target: InstallTarget, others: Collection[str]) -> None:
        """Install one package again over the others where several bring a file under the same name.

        uv installs many packages at once, and which file stays is chance.
        """
        policy = layer_policy()
        listed = {name: rows(info) for name, info in infos(self.site_packages, plan.packages).items()}
        again = {known.package for known in knowledge.packages().over_others}
        winners = []
        for path, names in conflicts(listed):
            if policy.may_differ(path):
                # The last in the alphabet, as containers/native/layers.toml states: any rule would do that is the same
                # everywhere.
                winners.append(names[-1])
            elif again.isdisjoint(names):
                raise _conflict(path, names)
        for name in sorted(set(winners)):
            install_again(self.lock, target, self._access.source, name, others)

    def _copy(self, added: list[str], tree: Path) -> None:
        """Put the files that were installed into a tree of their own, as hard links."""
        with machine_errors(tree):
            tree.mkdir()
            for relative in added:
                (tree / relative).parent.mkdir(parents=True, exist_ok=True)
                link(self.sandbox.tree / relative, tree / relative)


def _path_inside(built: Built) -> str:
    """The path of a wheel inside the sandbox: one for each digest, since uv's cache goes by paths."""
    return f"{BUILT}/{short(built.record.digest)}/{built.wheel.name}"


def _conflict(path: str, names: list[str]) -> CheckRefusedError:
    return CheckRefusedError(
        f"{' and '.join(names)} bring different files of one name: {path}",
        why="One of them would run with a file of the other, and which one is chance.",
        fix="Leave one of them out of the stack, or choose versions that agree. Where either file will do, list it "
        "under overlaps in containers/native/layers.toml.",
    )
