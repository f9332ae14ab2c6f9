"""One call of the docker builder, and what it sends to a daemon: the Dockerfile and the build context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.catalog.base import Mmdebstrap, RegistryImage
from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.site import Site
from envbuild.core.digests import Json, canonical_json, digest_of, sha256_bytes, sha256_file
from envbuild.core.progress import Reporter
from envbuild.image import node_requirements
from envbuild.image.base import StoredBase, find_base
from envbuild.image.build import ImageParts, run_config, write_configuration
from envbuild.image.docker.compiling import Compiling, Material, plan_compiling, tree_archives
from envbuild.image.docker.dockerfile import START, Recipe, render, tools
from envbuild.image.docker.plan import groups_of, plan_install, step_file, unbuilt
from envbuild.image.docker.streams import Content
from envbuild.image.layers.environment import StoredEnvironment
from envbuild.image.record import BaseRecord, EnvironmentRecord
from envbuild.image.squashfs.pack import Packing
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.uv.program import uv_program, uv_version
from envbuild.rootfs.layer import LayerRecord
from envbuild.store.local import LocalStore
from envbuild.wheels.cache.wheelhouse import Built, digests_of
from envbuild.wheels.sources import WheelSources

# Raised when an image made from the same inputs would come out differently.
FORMAT = 1
CONFIGURATION = "configuration.tar.gz"
# The digest of a base that a printed Dockerfile is for, where nobody made it yet.
NOT_MADE = "known when the base is made"
LOADED_BASE = "envbuild-base"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is built, and with what.

    Attributes:
        allow: codes of checks of the finished image whose findings are let pass.
        packing: how the .sqsh is made.
    """

    selection: Selection
    lock: LockDirectory
    site: Site
    store: LocalStore
    reporter: Reporter
    catalog: Catalog
    wheels: Mapping[str, Built] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    packing: Packing = field(default_factory=Packing)
    refresh_base: bool = False

    def parts(self, base: StoredBase) -> ImageParts:
        """What the image holds, as far as it is known before it is built."""
        packages = dict(sorted(self.lock.packages().items()))
        record = EnvironmentRecord(schema="envbuild.environment/2", layers=(), packages=packages)
        return ImageParts(
            selection=self.selection,
            lock=self.lock,
            base=base,
            environment=StoredEnvironment(record=record, layers=(), built=True),
            wheels=self.wheels,
            allow=frozenset(self.allow),
        )

    @property
    def material(self) -> Material:
        """What wheels are made of."""
        sources = WheelSources(base=self.selection.base, site=self.site, store=self.store, reporter=self.reporter)
        return Material(selection=self.selection, lock=self.lock, catalog=self.catalog, sources=sources)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is sent to a daemon.

    Attributes:
        context: the build context, by names.
        digests: of what of it decides the image; how the network is reached does not.
        installed: what each step installs from the network or from local folders: version by name.
    """

    dockerfile: str
    context: Mapping[str, Content]
    digests: Mapping[str, Json]
    installed: Mapping[str, Mapping[str, str]]

    @property
    def key(self) -> str:
        """The key of the image."""
        return digest_of({"format": FORMAT, "dockerfile": self.dockerfile, "context": dict(self.digests)})


def plan_build(job: Job, base: StoredBase, staged: Path) -> Plan:
    """The Dockerfile and the build context of an image.

    Args:
        staged: a folder for files of the context that are made for it.
    """
    lock, selection = job.lock, job.selection
    parts = job.parts(base)
    missing = unbuilt(lock, job.wheels)
    compiling = plan_compiling(job.material, missing, staged) if missing else Compiling()
    installs = [plan_install(lock, group, job.wheels, missing) for group in groups_of(lock)]
    context: dict[str, Content] = {**tools(uv_program()), **compiling.files}
    context["lock/all/packages.json"] = canonical_json(dict(parts.environment.record.packages))
    context[f"lock/{START}/step.json"] = step_file(lock, ())
    for install in installs:
        context |= install.files
        own = [name for name in install.group.packages if name not in {*job.wheels, *missing}]
        context |= tree_archives(job.material, install.group.name, own, staged)
    digests: dict[str, Json] = {
        name: sha256_bytes(item) if isinstance(item, bytes) else sha256_file(item)
        for name, item in context.items()
        if name != "tools/uv" and not name.endswith(".whl")
    }
    configuration = write_configuration(staged / CONFIGURATION, parts)
    digests |= {"uv": uv_version(), "wheels": digests_of(job.wheels), "base": base.digest}
    digests["configuration"] = configuration.diff_id
    recipe = Recipe(
        title=f"{lock.lock.stack} on {selection.base_name} for {node_requirements.in_words(selection.target)}",
        python=selection.base.python.executable,
        python_version=selection.base.python.version,
        config=run_config(parts),
        installs=installs,
        base=[f"base/{item.record.name}.tar.gz" for item in base.layers] if is_made(job) else [],
        reference="" if is_made(job) else reference_of(job, base),
        sees_base=bool(lock.lock.base.provides),
        compile=compiling.stages,
    )
    if is_made(job):
        context |= {f"base/{item.record.name}.tar.gz": item.file for item in base.layers}
    context |= {**compiling.outside, CONFIGURATION: staged / CONFIGURATION}
    return Plan(
        dockerfile=render(recipe),
        context=context,
        digests=digests,
        installed={START: {}, **compiling.steps, **{item.group.name: item.group.packages for item in installs}},
    )


def is_made(job: Job) -> bool:
    """Whether the base is made by mmdebstrap, and not an image."""
    return isinstance(job.selection.base.obtain, Mmdebstrap)


def reference_of(job: Job, base: StoredBase) -> str:
    """What a base that is an image is called in a Dockerfile: on its registry, or as it is loaded into the daemon."""
    obtain = job.selection.base.obtain
    if isinstance(obtain, RegistryImage):
        return f"{obtain.image.rpartition(':')[0]}@{obtain.digest}"
    return f"{LOADED_BASE}:{base.digest.removeprefix('sha256:')[:12]}"


def dockerfile_of(job: Job) -> str:
    """The Dockerfile that would be built; no daemon is asked, and no base is made."""
    with job.store.staging("docker-context") as staged:
        return plan_build(job, find_base(job.selection.base, job.store) or _not_made(), staged).dockerfile


def _not_made() -> StoredBase:
    """A base of which nothing is known yet."""
    layer = LayerRecord(name="base", digest=NOT_MADE, diff_id=NOT_MADE, size_bytes=0, unpacked_bytes=0, entries=0)
    record = BaseRecord(schema="envbuild.base/2", layers=(layer,), made_by="", packages={})
    return StoredBase(path=Path(), record=record, built=False)
