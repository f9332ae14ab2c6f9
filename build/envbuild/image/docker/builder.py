"""The docker builder: from a lock to an image in a daemon, and from there to the same outputs as the native builder's.

The native builder's result is canonical: this one has the same files, modes, owners, times, links and configuration, in
other layers, and so under another digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.site import Site
from envbuild.core.digests import Json, canonical_json, digest_of, sha256_bytes, short
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors, remove_tree, write_atomic
from envbuild.core.process import find_tool
from envbuild.core.progress import Reporter
from envbuild.image import gzips, requirements
from envbuild.image.bases import MadeBase, find_base
from envbuild.image.docker.checking import check_imports
from envbuild.image.docker.compiling import Compiling, Material, plan_compiling
from envbuild.image.docker.dockerfile import START, Recipe, render, tools
from envbuild.image.docker.engine import Engine
from envbuild.image.docker.loading import put_into
from envbuild.image.docker.places import HOSTS, extra_hosts, outside
from envbuild.image.docker.plan import groups_of, plan_install, unbuilt
from envbuild.image.docker.running import run_build
from envbuild.image.docker.saved import unpack_saved
from envbuild.image.docker.streams import Content, tar_stream
from envbuild.image.environment import VENV
from envbuild.image.native import BuiltImage, Contents, check_lock, held_base, run_config, write_configuration
from envbuild.image.oci import OciImage, RunConfig, with_manifest, write_layout
from envbuild.image.outputs import OCI_DIR, SQSH_FILE
from envbuild.image.record import RECORD_FILE, DockerRecord, ImageRecord, LayerRecord, SqshRecord, dump
from envbuild.image.squashfs import COMPRESSION, mksquashfs_version, write_sqsh
from envbuild.lock.record import LockDirectory, snapshot
from envbuild.lock.torch_builds import locked_torch
from envbuild.lock.uv import uv_program, uv_version
from envbuild.store.local import LocalStore
from envbuild.wheels.keeping.wheelhouse import Built, digests_of
from envbuild.wheels.sources import Sources

KIND = "docker-images"
# Raised when an image made from the same inputs would come out differently.
FORMAT = 1
KEY_LABEL = "envbuild.docker.key"
CONFIGURATION = "configuration.tar.gz"
# The digest of a base that a printed Dockerfile is for, where nobody made it yet.
NOT_MADE = "known when the base is made"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is sent to a daemon.

    Attributes:
        context: the build context, by names.
        digests: of what of it decides the image; how the network is reached does not.
        layers: what the layers of the image are called, lowest first.
        installed: what each step installs from the network or from local folders: version by name.
    """

    dockerfile: str
    context: Mapping[str, Content]
    digests: Mapping[str, Json]
    layers: tuple[str, ...]
    installed: Mapping[str, Mapping[str, str]]

    @property
    def key(self) -> str:
        """The key of the image."""
        return digest_of({"format": FORMAT, "dockerfile": self.dockerfile, "context": dict(self.digests)})


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of the docker builder: what is built, and with what."""

    selection: Selection
    lock: LockDirectory
    site: Site
    store: LocalStore
    reporter: Reporter
    catalog: Catalog
    wheels: Mapping[str, Built] = field(default_factory=dict)

    def contents(self, base: MadeBase | None) -> Contents:
        """What the image holds."""
        return Contents(
            selection=self.selection,
            lock=self.lock,
            base_digest=base.digest if base else NOT_MADE,
            base_packages=base.record.packages if base else {},
            packages=dict(sorted(self.lock.packages().items())),
        )

    @property
    def material(self) -> Material:
        """What wheels are made of."""
        sources = Sources(base=self.selection.base, site=self.site, store=self.store, reporter=self.reporter)
        return Material(selection=self.selection, lock=self.lock, catalog=self.catalog, sources=sources)


def image_tag(lock_name: str, base: str, target: str) -> str:
    """The name of an image in a daemon: ``<lock>:<base>-<target>``; a lock has its stack's name, or one of its own."""
    return f"{lock_name}:{base}-{target}"


def plan_build(job: Job, base: MadeBase | None, staged: Path) -> Plan:
    """The Dockerfile and the build context of an image.

    Args:
        base: None where it is not made yet, and only the Dockerfile is of interest.
        staged: a folder for files of the context that are made for it.
    """
    lock, selection = job.lock, job.selection
    contents = job.contents(base)
    layers = base.layers if base else ()
    missing = unbuilt(lock, job.wheels)
    compiling = plan_compiling(job.material, missing, staged) if missing else Compiling()
    installs = [plan_install(lock, group, job.wheels, missing) for group in groups_of(lock)]
    context: dict[str, Content] = {**tools(uv_program()), **compiling.files}
    context["lock/all/packages.json"] = canonical_json(dict(contents.packages))
    installed = {START: {}, **compiling.steps, **{item.group.name: item.group.packages for item in installs}}
    context |= {f"lock/{step}/.keep": b"" for step in installed}
    for install in installs:
        context |= install.files
    recipe = Recipe(
        title=f"{lock.lock.stack} on {selection.base_name} for {requirements.in_words(selection.target)}",
        python=selection.base.python.executable,
        python_version=selection.base.python.version,
        epoch=lock.lock.source_date_epoch,
        config=run_config(contents),
        installs=installs,
        base=[f"base/{layer.record.name}.tar.gz" for layer in layers] or ["base/base.tar.gz"],
        compile=compiling.stages,
    )
    digests: dict[str, Json] = {name: sha256_bytes(item) for name, item in context.items() if isinstance(item, bytes)}
    configuration = write_configuration(staged / CONFIGURATION, contents)
    digests |= {"base": [layer.record.digest for layer in layers], "configuration": configuration.diff_id}
    digests |= {"uv": uv_version(), "wheels": digests_of(job.wheels), **compiling.digests}
    context |= {f"base/{layer.record.name}.tar.gz": layer.file for layer in layers}
    context |= compiling.outside
    context[CONFIGURATION] = staged / CONFIGURATION
    names = ["base", START, *(item.group.name for item in installs), "configuration", "times"]
    return Plan(dockerfile=render(recipe), context=context, digests=digests, layers=tuple(names), installed=installed)


def dockerfile_of(job: Job) -> str:
    """The Dockerfile that would be built; no daemon is asked."""
    with job.store.staging("docker-context") as staged:
        return plan_build(job, find_base(job.selection.base, job.store), staged).dockerfile


def build_with_docker(
    job: Job,
    engine: Engine,
    tag: str,
    *,
    formats: Collection[str] = ("oci", "sqsh"),
    refresh_base: bool = False,
) -> BuiltImage:
    """The image of a job in the daemon, under ``tag``, and in the store; made where they do not have it.

    The tag comes last: an image that it names was built to its end, and what the stack names imports in it.

    Raises:
        MachineError: the daemon is not there, went away or has no space; a tool is missing.
        BuildError: a step failed.
        CheckRefusedError: the environment is not what was locked, or does not import.
        NetworkError: an index or a registry cannot be reached.
    """
    check_lock(job.selection, job.lock)
    if "sqsh" in formats:
        find_tool("mksquashfs", "squashfs-tools")
    store, reporter = job.store, job.reporter
    with (
        held_base(job.selection, job.site, store, reporter, refresh=refresh_base) as base,
        store.staging("docker-context") as staged,
    ):
        frozen = replace(job, lock=snapshot(job.lock, staged / "lock"))
        plan = plan_build(frozen, base, staged)
        key = _entry_key(plan, with_sqsh="sqsh" in formats)
        maker = _Maker(job=frozen, engine=engine, tag=tag, plan=plan, base=base, key=key)

        def fill(folder: Path) -> None:
            maker.fill(folder, with_sqsh="sqsh" in formats)

        entry = store.get_or_build(KIND, key, fill)
    record = ImageRecord.load(entry.path / RECORD_FILE)
    restored = put_into(engine, entry.path, record, tag, reporter)
    found = record.model_copy(update={"target": job.selection.target_name})
    return BuiltImage(path=entry.path, record=found, built=entry.built or restored)


def _entry_key(plan: Plan, *, with_sqsh: bool) -> str:
    sqsh: Json = [mksquashfs_version(), *COMPRESSION] if with_sqsh else None
    return digest_of({"image": plan.key, "sqsh": sqsh, "gzip": gzips.ENCODER})


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Makes a store entry."""

    job: Job
    engine: Engine
    tag: str
    plan: Plan
    base: MadeBase
    key: str

    def fill(self, folder: Path, *, with_sqsh: bool) -> None:
        """Build the image where the daemon does not have it, check it, tag it, and take it out of the daemon."""
        job, engine, lock = self.job, self.engine, self.job.lock.lock
        logs = job.store.root / "logs" / f"docker-{short(self.plan.key)}"
        with machine_errors(logs):
            remove_tree(logs)
            logs.mkdir(parents=True)
        image_id = engine.find_labelled(KEY_LABEL, self.plan.key) or self._build(logs / "build.log")
        try:
            imports = check_imports(engine, image_id, lock, job.selection.target, logs, job.reporter)
        except CheckRefusedError:
            engine.remove(image_id)
            raise
        engine.tag(image_id, self.tag)
        with job.reporter.step("take the image out of the daemon, write the OCI layout"):
            saved = unpack_saved(engine.save(image_id), image_id, folder.parent, self.plan.layers)
            records = [layer.record for layer in saved.layers]
            image = with_manifest(saved.config, records, dict(self._config().labels))
            write_layout(folder / OCI_DIR, image, saved.layers, tag=lock.stack)
        sqsh: SqshRecord | None = None
        if with_sqsh:
            with job.reporter.step("pack the .sqsh"):
                files = [layer.file for layer in saved.layers]
                provenance = f"oci:{image.digest}"
                target, epoch = folder / SQSH_FILE, lock.source_date_epoch
                sqsh = write_sqsh(target, files, self._config(), provenance, epoch, logs / "sqsh.log")
        record = self._record(image, records, sqsh, image_id)
        not_checked = {item.module: item.reason for item in imports.not_checked}
        write_atomic(folder / RECORD_FILE, dump(record.model_copy(update={"not_checked": not_checked})))

    def _config(self) -> RunConfig:
        return run_config(self.job.contents(self.base))

    def _build(self, log: Path) -> str:
        job = self.job
        what = f"build stack {job.lock.lock.stack} with docker"
        way = outside(job.site, locked_torch(job.site, job.lock.lock), os.environ)
        context = {"Dockerfile": self.plan.dockerfile.encode(), **self.plan.context, **way.files}
        for step, versions in self.plan.installed.items():
            context |= way.for_step(step, versions)
        with machine_errors(HOSTS, "read"):
            hosts = extra_hosts(HOSTS.read_text()) if HOSTS.is_file() else []
        parameters: dict[str, Json] = {
            "dockerfile": "Dockerfile",
            "networkmode": "host",
            "platform": job.selection.base.platform,
            "labels": json.dumps({KEY_LABEL: self.plan.key}),
            "extrahosts": json.dumps(hosts) if hosts else "",
            "rm": "1",
            "forcerm": "1",
        }
        with job.reporter.step(f"build the image with {self.engine.version}"):
            return run_build(self.engine, tar_stream(context), parameters, what, log, job.reporter)

    def _record(
        self, image: OciImage, layers: Sequence[LayerRecord], sqsh: SqshRecord | None, image_id: str
    ) -> ImageRecord:
        job, lock = self.job, self.job.lock.lock
        return ImageRecord(
            schema="envbuild.image/1",
            key=self.key,
            stack=lock.stack,
            base=job.selection.base_name,
            target=job.selection.target_name,
            lock_digest=lock.digest,
            source_date_epoch=lock.source_date_epoch,
            oci_digest=image.digest,
            config_digest=image.config_digest,
            layers=tuple(layers),
            sqsh=sqsh,
            python=f"{VENV}/bin/python",
            environment=self._config().environment,
            base_digest=self.base.digest,
            base_made_by=self.base.record.made_by,
            base_packages=self.base.record.packages,
            packages=dict(sorted(job.lock.packages().items())),
            wheels={name: item.record.digest for name, item in job.wheels.items()},
            uv=uv_version(),
            gzip=gzips.ENCODER,
            builder="docker",
            docker=DockerRecord(
                engine=self.engine.version,
                api_version=self.engine.api_version,
                image_id=image_id,
                dockerfile_digest=sha256_bytes(self.plan.dockerfile.encode()),
            ),
        )
