"""Writes a lock as a folder with a Dockerfile and its context: what is installed, the base, wheels and sources."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.base import RegistryImage
from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.catalog.data import data_root
from envbuild.core.errors import ConfigurationError
from envbuild.core.files import clone_or_copy, machine_errors, remove_tree, replace_tree
from envbuild.image import node_requirements
from envbuild.image.base import StoredBase
from envbuild.image.build import hold_base
from envbuild.image.configuration import run_config, write_configuration
from envbuild.image.docker.compile import TOOLKIT_SCRIPT, SourceWriter
from envbuild.image.docker.dockerfile import BASE_FILE, CONFIGURATION_FILE, WRITTEN_BY, DockerfileSpec, render
from envbuild.image.inputs import ImageInputs, ImageParts, check_inputs
from envbuild.image.layers.environment import StoredEnvironment
from envbuild.image.output import image_tag
from envbuild.image.record import EnvironmentRecord
from envbuild.lock.lockfile import snapshot
from envbuild.lock.record.content import locked_content, packages_by_index
from envbuild.lock.requirement_lines import pinned_package, without_packages
from envbuild.lock.uv.program import uv_program
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX_BUILD
from envbuild.rootfs.gzip_writer import GzipWriter
from envbuild.rootfs.layer import LAYER_TYPE
from envbuild.rootfs.overlay import merged
from envbuild.rootfs.tar_writer import end, write_member
from envbuild.sync.install import over_others
from envbuild.wheels.plan import buildable, git_origin
from envbuild.wheels.sources import WheelSources

DOCKERFILE = "Dockerfile"


def export_dockerfile(inputs: ImageInputs, context: Context, folder: Path) -> None:
    """Write a folder that `docker build`, buildx, podman and kaniko build without envbuild.

    The base is made, or fetched, where the store does not have it: its variables go into the image's.

    Args:
        folder: replaced where it is such a folder already.

    Raises:
        ConfigurationError: the lock is for another base, or the folder holds something else.
        CheckRefusedError: the digest of the base was not resolved; or see :meth:`SourceWriter.compiled`.
        NetworkError: the base or sources cannot be fetched.
    """
    refuse_foreign(folder)
    check_inputs(inputs)
    with (
        hold_base(inputs, context) as base,
        context.store.staging("dockerfile") as work,
        machine_errors(folder),
    ):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Next to the folder, on the same disk: it appears by a rename.
        staged = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            # mkdtemp makes folders that no other account enters.
            staged.chmod(0o755)
            frozen = replace(inputs, lock=snapshot(inputs.lock, work / "lock"))
            export = _Export(context=context, inputs=frozen, base=base, staged=staged)
            with context.reporter.step("write the Dockerfile and its context"):
                # The specification first: it writes the sources, and toolkit.txt where one is needed.
                (staged / DOCKERFILE).write_text(render(export.spec(work)))
                export.write_files()
            replace_tree(staged, folder)
        finally:
            remove_tree(staged)


def refuse_foreign(folder: Path) -> None:
    """Refuse to replace a folder that is not such an export.

    Raises:
        ConfigurationError: it holds something else.
    """
    with machine_errors(folder, "read"), contextlib.suppress(FileNotFoundError):
        if not folder.is_symlink() and folder.is_dir():
            file = folder / DOCKERFILE
            if not any(folder.iterdir()) or (file.is_file() and file.read_text().startswith(WRITTEN_BY)):
                return
        # Where nothing is there, this ends it: FileNotFoundError is suppressed above.
        folder.lstat()
        raise ConfigurationError(
            f"{folder} would be replaced, and holds something else",
            why="It is not empty, and not a folder that `envbuild export --format dockerfile` wrote.",
            fix="Move it away, or name another folder with --output.",
        )


@dataclass(frozen=True, kw_only=True)
class _Export:
    context: Context
    inputs: ImageInputs
    base: StoredBase
    staged: Path

    def spec(self, work: Path) -> DockerfileSpec:
        """What the Dockerfile states; writes the sources of packages into the context."""
        directory, selection, wheels = self.inputs.lock, self.inputs.selection, self.inputs.wheels
        lock = directory.lock
        sources = WheelSources(
            base=selection.base, site=self.context.site, store=self.context.store, reporter=self.context.reporter
        )
        (self.staged / "lock").mkdir()
        writer = SourceWriter(lock=directory, selection=selection, sources=sources, folder=self.staged, work=work)
        built_here = buildable(directory)
        origins = {name: origin for name, origin in built_here.items() if name not in wheels}
        compiled = writer.compiled(origins) if origins else None
        # The packages from git that are built while they are installed.
        trees = [
            writer.tree(git_origin(name, component))
            for name, component in sorted(lock.components.items())
            if component.git and component.commit and name not in {*wheels, *built_here}
        ]
        done = {*wheels, *origins, *(tree.name for tree in trees)}
        config, carried = run_config(self.parts), self.base.record.config.environment
        phases, own = self._write_phases(done)
        return DockerfileSpec(
            title=f"{lock.stack} on {selection.base_name} for {node_requirements.hardware_of(selection.target)}",
            tag=image_tag(lock.stack, selection.base_name, selection.target_name),
            config=config,
            python=selection.base.python.executable,
            base=_reference(selection),
            sees_base=bool(lock.base.provides),
            torch_build=self._torch_build(),
            phases=phases,
            own=own,
            again=over_others(directory, "main"),
            wheels=sorted(wheels),
            compiled=compiled,
            trees=trees,
            builds=self._write_builds(),
            shared=directory.shared_builds,
            # A base in a tar brings no variables; one on a registry does, and the native image leaves some of them out.
            unset=sorted({*carried} - {*config.variables}) if _reference(selection) else (),
        )

    def write_files(self) -> None:
        """The files of the context besides sources and requirements."""
        write_configuration(self.staged / CONFIGURATION_FILE, self.parts)
        if not _reference(self.inputs.selection):
            write_base(self.base, self.staged / BASE_FILE)
        for built in self.inputs.wheels.values():
            clone_or_copy(built.wheel, self.staged / "wheels" / built.wheel.name)
        # envbuild's own uv, as a file: the steps need no registry that has an image with it.
        clone_or_copy(uv_program(), self.staged / "tools/uv")
        if (self.staged / "lock/toolkit.txt").exists():
            clone_or_copy(data_root() / TOOLKIT_SCRIPT, self.staged / "tools/toolkit.sh")
        # In the form of `uv pip list --format freeze`, with which a step compares them.
        lines = [f"{name}=={version}" for name, version in self.inputs.lock.packages().items()]
        (self.staged / "lock/packages.txt").write_text("".join(f"{line}\n" for line in sorted(lines)))

    @property
    def parts(self) -> ImageParts:
        """What the image is put together from."""
        # The environment is made by the Dockerfile: here it has packages, and no layers.
        packages = dict(sorted(self.inputs.lock.packages().items()))
        record = EnvironmentRecord(layers=(), packages=packages)
        environment = StoredEnvironment(record=record, layers=())
        return ImageParts(inputs=self.inputs, base=self.base, environment=environment)

    def _write_builds(self) -> str:
        """Write what isolated builds of phase git are held to; the name of the file, empty without one."""
        file = self.inputs.lock.builds
        if file is None:
            return ""
        (self.staged / "lock" / file.name).write_bytes(file.read_bytes())
        return file.name

    def _write_phases(self, done: Collection[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
        """Write the requirements of each phase that has more than what is installed from wheels and sources.

        Returns:
            The phases, and the files with what they have of an index of its own (``DockerfileSpec.own``).
        """
        phases: list[str] = []
        own: dict[str, dict[str, str]] = {}
        for phase in self.inputs.lock.lock.phases:
            file = self.inputs.lock.file(phase)
            if file is None or {*locked_content(self.inputs.lock, (phase,))} <= {*done}:
                continue
            text = file.read_text()
            if phase == "git":  # one line a package; uv would build a package from git again, wheel or not
                lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
                text = "".join(f"{line}\n" for line in lines if pinned_package(line) not in done)
            every = packages_by_index(self.inputs.lock, phase)
            for index, packages in every.items():
                others = {name for other in every.values() for name in other - packages}
                if others and packages <= {*done}:
                    continue
                name = f"{file.stem}.{index}.txt" if index else file.name
                (self.staged / "lock" / name).write_text(without_packages(text, others))
                if index:
                    own.setdefault(phase, {})[index] = name
                else:
                    phases.append(phase)
        return phases, own

    def _torch_build(self) -> str:
        """The lock's build of torch; empty where every package index has it."""
        lock = self.inputs.lock.lock
        if not lock.torch.version or lock.torch.build == PACKAGE_INDEX_BUILD or "torch" in lock.base.provides:
            return ""
        return lock.torch.build


def _reference(selection: Selection) -> str:
    """The base on its registry, by its digest; empty for other bases."""
    obtain = selection.base.obtain
    return f"{obtain.image.rpartition(':')[0]}@{obtain.digest}" if isinstance(obtain, RegistryImage) else ""


def write_base(base: StoredBase, file: Path) -> None:
    """Write a base as one tar: docker unpacks whiteouts of several layers as files."""
    if len(base.layers) == 1 and base.layers[0].record.media_type == LAYER_TYPE:
        clone_or_copy(base.layers[0].file, file)
        return
    with GzipWriter(file) as gzip:
        for member, content in merged([layer.blob for layer in base.layers]):
            write_member(gzip, member, content)
        end(gzip)
