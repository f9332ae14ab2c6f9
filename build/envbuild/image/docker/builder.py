"""The docker builder: from a lock to an image in a daemon, and from there to the same outputs as the native builder's.

The native builder's result is canonical: this one has the same files, modes, owners, times, links and configuration, in
other layers, and so under another digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.core.digests import Json, digest_of, sha256_bytes, short
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors, remove_tree
from envbuild.image.base import StoredBase
from envbuild.image.build import BuiltImage, ImageParts, Put, check_lock, finish, held_base, run_config
from envbuild.image.checks import check
from envbuild.image.docker.checking import Tried, try_image
from envbuild.image.docker.engine import Engine
from envbuild.image.docker.job import Job, Plan, is_made, plan_build, reference_of
from envbuild.image.docker.loading import load_image, put_into
from envbuild.image.docker.places import HOSTS, extra_hosts, outside
from envbuild.image.docker.running import run_build
from envbuild.image.docker.saved import unpack_saved
from envbuild.image.docker.streams import tar_stream
from envbuild.image.layers.environment import StoredEnvironment
from envbuild.image.output import OCI_DIR
from envbuild.image.record import DockerRecord, EnvironmentRecord, ImageRecord
from envbuild.image.sbom import write
from envbuild.image.scan import scan
from envbuild.image.squashfs.pack import Packing, check_base, find_mksquashfs
from envbuild.lock.lockfile import snapshot
from envbuild.lock.uv.torch_builds import locked_torch
from envbuild.oci.write import make_oci, with_manifest, write_layout
from envbuild.rootfs import gzip_writer
from envbuild.store.record import RECORD_FILE

KIND = "docker-images"
KEY_LABEL = "envbuild.docker.key"


def build_with_docker(job: Job, engine: Engine, tag: str, *, formats: Collection[str] = ("oci", "sqsh")) -> BuiltImage:
    """The image of a job in the daemon, under ``tag``, and in the store; made where they do not have it.

    The tag comes last: an image that it names was built to its end, and what the stack names imports in it.

    Raises:
        MachineError: the daemon is not there, went away or has no space; a tool is missing.
        BuildError: a step failed.
        CheckRefusedError: the environment is not what was locked, or does not import; a check refuses the image.
        NetworkError: an index or a registry cannot be reached.
    """
    selection, store = job.selection, job.store
    selection.base.refuse_unresolved(selection.base_name)
    check_lock(selection, job.lock)
    packing = job.packing if "sqsh" in formats else None
    if packing is not None:
        find_mksquashfs()
    with (
        held_base(selection, job.site, store, job.reporter, refresh=job.refresh_base) as base,
        store.staging("docker-context") as staged,
    ):
        if packing is not None:
            check_base(base.record.config)
        frozen = replace(job, lock=snapshot(job.lock, staged / "lock"))
        plan = plan_build(frozen, base, staged)
        key = _entry_key(plan, frozen, packing)
        maker = _Maker(job=frozen, engine=engine, tag=tag, plan=plan, base=base, key=key, packing=packing)
        entry = store.get_or_build(KIND, key, maker)
    record = ImageRecord.load(entry.path / RECORD_FILE)
    loaded = put_into(engine, entry.path, record, tag, job.reporter)
    found = record.model_copy(update={"target": selection.target_name})
    return BuiltImage(path=entry.path, record=found, built=entry.built or loaded)


def _entry_key(plan: Plan, job: Job, packing: Packing | None) -> str:
    return digest_of(
        {
            "image": plan.key,
            "sqsh": packing.key() if packing else None,
            "gzip": gzip_writer.ENCODER,
            "finishing": [scan.FORMAT, check.FORMAT, write.FORMAT],
            "allow": tuple(sorted(job.allow)),
        }
    )


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Makes a store entry."""

    job: Job
    engine: Engine
    tag: str
    plan: Plan
    base: StoredBase
    key: str
    packing: Packing | None

    def __call__(self, folder: Path) -> None:
        """Build the image where the daemon does not have it, check it, tag it, and take it out of the daemon."""
        job, engine, lock = self.job, self.engine, self.job.lock.lock
        logs = job.store.root / "logs" / f"docker-{short(self.plan.key)}"
        with machine_errors(logs):
            remove_tree(logs)
            logs.mkdir(parents=True)
        image_id = engine.find_labelled(KEY_LABEL, self.plan.key) or self._build(logs / "build.log")
        try:
            held = job.store.lock_of(KIND, self.key)
            tried = try_image(engine, image_id, held, lock, job.selection.target, logs, job.reporter)
        except CheckRefusedError:
            engine.remove(image_id)
            raise
        parts = self._parts(tried)
        config = run_config(parts)
        with job.reporter.step("take the image out of the daemon, write the OCI layout"):
            known = {layer.record.diff_id: layer for layer in self.base.layers}
            saved = unpack_saved(engine.save(image_id), image_id, folder.parent, known)
            records = [layer.record for layer in saved.layers]
            image = with_manifest(saved.config, records, dict(config.labels))
            write_layout(folder / OCI_DIR, image, saved.layers, tag=lock.stack)
        docker = DockerRecord(
            engine=engine.version,
            api_version=engine.api_version,
            image_id=image_id,
            dockerfile_digest=sha256_bytes(self.plan.dockerfile.encode()),
        )
        put = Put(config=config, image=image, layers=saved.layers, docker=docker)
        finish(folder, self.key, parts, put, logs / "sqsh.log", job.store, self.packing)
        engine.tag(image_id, self.tag)

    def _parts(self, tried: Tried) -> ImageParts:
        """What the image holds, with what was found out inside it."""
        parts = self.job.parts(self.base)
        record = EnvironmentRecord(
            schema="envbuild.environment/2",
            layers=(),
            packages=parts.environment.record.packages,
            not_checked={item.module: item.reason for item in tried.imports.not_checked},
            loaded=tried.loaded,
        )
        return replace(parts, environment=StoredEnvironment(record=record, layers=(), built=True))

    def _build(self, log: Path) -> str:
        job = self.job
        what = f"build stack {job.lock.lock.stack} with docker"
        self._have_base()
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

    def _have_base(self) -> None:
        """A base that is an image must be in the daemon: from its registry by its digest, else from the store."""
        job, name = self.job, reference_of(self.job, self.base)
        if is_made(job):
            return
        if "@" in name:
            with job.reporter.step(f"pull base {job.selection.base_name} into {self.engine.version}"):
                self.engine.pull(name)
        elif self.engine.find(name) is None:
            self._load_base(name)

    def _load_base(self, name: str) -> None:
        config = run_config(self.job.parts(self.base))
        plain = replace(config, labels=(), command=())
        records = [layer.record for layer in self.base.layers]
        image = make_oci(plain, self.job.selection.base.platform, records, self.job.lock.lock.source_date_epoch)
        files: Mapping[str, Path] = {layer.record.digest: layer.file for layer in self.base.layers}
        load_image(self.engine, image.config, files, name, self.job.reporter)
