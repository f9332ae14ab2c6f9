"""The native builder: from a lock to an image, without a docker daemon or a registry.

The base, the environment's layers and the configuration are kept or made one by one; all but the last lie in the store
under the key of what decides their bytes. An image is their OCI layout, made of hard links, and the .sqsh packed from
the same layers.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.catalog.base import Mmdebstrap
from envbuild.catalog.catalog import Selection, definition_digest
from envbuild.catalog.context import Context
from envbuild.catalog.data import data_root
from envbuild.catalog.site import Site
from envbuild.core import locks
from envbuild.core.digests import Json, digest_of, sha256_file, short
from envbuild.core.errors import ConfigurationError, MachineError
from envbuild.core.files import write_atomic
from envbuild.core.progress import Reporter
from envbuild.image import node_requirements
from envbuild.image import run_config as running
from envbuild.image.base import StoredBase, base_key, check_tools, find_base, make_base
from envbuild.image.checks import check
from envbuild.image.checks.check import check_image
from envbuild.image.checks.facts import Facts
from envbuild.image.finalize import compiled_for, scan_layers, write_reports
from envbuild.image.layers.environment import EnvironmentInputs, StoredEnvironment, make_environment
from envbuild.image.layers.policy import POLICY_FILE
from envbuild.image.layers.sandbox import COMPILER, VENV
from envbuild.image.output import OCI_DIR, SQSH_FILE
from envbuild.image.record import ImageRecord, SqshRecord
from envbuild.image.sbom import write
from envbuild.image.scan import scan
from envbuild.image.scan.cache import CachedScan
from envbuild.image.squashfs.pack import Packing, SqshSource, check_base, find_mksquashfs, write_sqsh
from envbuild.lock.lockdir import lock_command
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.uv.program import uv_version
from envbuild.lock.uv.torch_builds import locked_torch
from envbuild.oci.write import OciImage, RunConfig, make_oci, write_layout
from envbuild.rootfs import gzip_writer
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.layer import Layer, LayerRecord
from envbuild.rootfs.layer_writer import EPOCH, LayerWriter
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE, dump
from envbuild.wheels.cache.wheelhouse import NO_BUILT, Built, digests_of

KIND = "images"
# Raised when an image made from the same inputs would come out differently.
FORMAT = 3
PROFILE = "containers/native/profile.sh"
RC_LOCAL = "containers/enroot/rc.local"
FINGERPRINT = "etc/envbuild/fingerprint.json"
# Where a plan and its results are mounted when an image is certified.
MOUNT_POINT = "envbuild"
HOSTS = b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
COMMAND = ("/bin/bash",)
DEFAULT_PACKING = Packing()


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image in the store: its entry, its record, and whether this call made it."""

    path: Path
    record: ImageRecord
    built: bool


def build_image(
    selection: Selection,
    lock: LockDirectory,
    site: Site,
    store: LocalStore,
    reporter: Reporter,
    *,
    formats: Collection[str] = ("oci", "sqsh"),
    refresh_base: bool = False,
    wheels: Mapping[str, Built] = NO_BUILT,
    allow: Collection[str] = (),
    packing: Packing = DEFAULT_PACKING,
) -> BuiltImage:
    """The image of ``lock`` for the selection's target; made when the store does not have it.

    Args:
        formats: ``oci`` (always made: it is the image's identity) and ``sqsh``.
        refresh_base: make the base anew from the distribution's packages of now, and then what follows from it.
        wheels: wheels of the wheelhouse for packages of phase compile, which are then not built.
        allow: codes of checks of the finished image whose findings are let pass.
        packing: how the .sqsh is made.

    Raises:
        ConfigurationError: the lock is for another base, or the machine has no sources for the base.
        MachineError: a tool is missing, namespaces are forbidden, or the disk is full.
        BuildError: a step failed.
        CheckRefusedError: the environment is not what was locked, or does not import.
        NetworkError: the package archive or an index cannot be reached.
    """
    selection.base.refuse_unresolved(selection.base_name)
    check_lock(selection, lock)
    if not refresh_base and (found := _find(selection, lock, store, formats, wheels, allow, packing)):
        return found
    there = find_base(selection.base, store)
    check_tools(selection.base, selection.base_name, made_anew=refresh_base or there is None)
    if "sqsh" in formats:
        find_mksquashfs()
    if there is None:
        locked_torch(site, lock.lock)  # where nobody has it, better say so before a minute goes into the base
    with held_base(selection, site, store, reporter, refresh=refresh_base) as base:
        if "sqsh" in formats:
            check_base(base.record.config)
        environment = make_environment(
            EnvironmentInputs(selection=selection, lock=lock, base=base, wheels=wheels),
            Context(store=store, site=site, reporter=reporter),
        )
        key = image_key(selection, lock, base.digest, formats, wheels, allow, packing)
        parts = ImageParts(
            selection=selection, lock=lock, base=base, environment=environment, wheels=wheels, allow=frozenset(allow)
        )

        def build(folder: Path) -> None:
            log = store.root / "logs" / f"image-{short(key)}.log"
            _assemble(folder, key, parts, log, store, packing if "sqsh" in formats else None)

        entry = store.get_or_build(KIND, key, build)
    return _for_target(selection, entry.path, built=entry.built)


@contextlib.contextmanager
def held_base(
    selection: Selection, site: Site, store: LocalStore, reporter: Reporter, *, refresh: bool
) -> Iterator[StoredBase]:
    """The base of a selection, which nobody takes away while the block runs.

    A base is a directory that sandboxes run in: a refresh waits until nobody does, before it takes the old one away.
    """
    in_use = store.root / "locks" / f"in-use-{short(base_key(selection.base))}.lock"
    waiting = f"another envbuild works with base {selection.base_name}: waiting for it"
    if refresh:
        with locks.exclusive(in_use, on_wait=lambda: reporter.note(waiting)):
            make_base(selection, site, store, reporter, refresh=True)
    with locks.shared(in_use, on_wait=lambda: reporter.note(waiting)):
        yield make_base(selection, site, store, reporter)


def _for_target(selection: Selection, path: Path, *, built: bool) -> BuiltImage:
    """An image of the store, which may have been built for another target of the same hardware."""
    record = ImageRecord.load(path / RECORD_FILE)
    return BuiltImage(path=path, record=record.model_copy(update={"target": selection.target_name}), built=built)


def image_key(
    selection: Selection,
    lock: LockDirectory,
    base_digest: str,
    formats: Collection[str],
    wheels: Mapping[str, Built] = NO_BUILT,
    allow: Collection[str] = (),
    packing: Packing = DEFAULT_PACKING,
) -> str:
    """The key of an image: everything that decides its bytes, how it is checked and what is reported on it."""
    value: dict[str, Json] = {
        "format": FORMAT,
        "stack": selection.stack_name,
        "base": [selection.base_name, base_digest],
        "target": node_requirements.what_decides(selection.target),
        "lock": [lock.lock.digest, lock.lock.source_date_epoch],
        "uv": uv_version(),
        "gzip": gzip_writer.ENCODER,
        "containers": [sha256_file(data_root() / name) for name in (PROFILE, RC_LOCAL, POLICY_FILE, COMPILER)],
        "sqsh": packing.key() if "sqsh" in formats else None,
        "finishing": [scan.FORMAT, check.FORMAT, write.FORMAT],
        **({"wheels": digests_of(wheels)} if wheels else {}),
        # What was let pass once is looked at again by who does not let it pass.
        **({"allow": tuple(sorted(allow))} if allow else {}),
    }
    return digest_of(value)


def check_lock(selection: Selection, lock: LockDirectory) -> None:
    """Refuse a lock that is not for the base as it is now.

    Raises:
        ConfigurationError: it is for another one.
    """
    if lock.lock.base.definition_digest == definition_digest(selection.base):
        return
    raise ConfigurationError(
        f"the lock in {lock.path} was not made for base {selection.base_name} as it is now",
        why=f"It is for {lock.lock.base.name} with definition {short(lock.lock.base.definition_digest)}; "
        f"{selection.base_name} now has {short(definition_digest(selection.base))}.",
        fix=f"Lock again: {lock_command(lock)}",
    )


def _find(
    selection: Selection,
    lock: LockDirectory,
    store: LocalStore,
    formats: Collection[str],
    wheels: Mapping[str, Built],
    allow: Collection[str],
    packing: Packing,
) -> BuiltImage | None:
    """The finished image in the store; one with a .sqsh that the nodes can read also serves who asks for none."""
    base = find_base(selection.base, store)
    if base is None:
        return None
    wanted: list[tuple[str, ...]] = [("oci", "sqsh")] if packing.is_readable or "sqsh" in formats else []
    wanted += [] if "sqsh" in formats else [("oci",)]
    for candidate in wanted:
        try:
            key = image_key(selection, lock, base.digest, candidate, wheels, allow, packing)
        except MachineError:
            if "sqsh" in formats:
                raise
            continue  # no mksquashfs here, and no .sqsh is asked for
        if path := store.find(KIND, key):
            return _for_target(selection, path, built=False)
    return None


@dataclass(frozen=True, kw_only=True)
class ImageParts:
    """What an image is put together from."""

    selection: Selection
    lock: LockDirectory
    base: StoredBase
    environment: StoredEnvironment
    wheels: Mapping[str, Built] = field(default_factory=dict)
    allow: frozenset[str] = frozenset()


def _assemble(folder: Path, key: str, parts: ImageParts, log: Path, store: LocalStore, packing: Packing | None) -> None:
    reporter = store.reporter
    lock, base, environment = parts.lock.lock, parts.base, parts.environment
    epoch = lock.source_date_epoch
    log.unlink(missing_ok=True)
    with reporter.step("write the OCI layout"):
        file = folder.parent / "configuration.tar.gz"
        layers = [*base.layers, *environment.layers, Layer(write_configuration(file, parts), file)]
        config = run_config(parts)
        image = make_oci(config, parts.selection.base.platform, [layer.record for layer in layers], epoch)
        write_layout(folder / OCI_DIR, image, layers, tag=lock.stack)
    finish(folder, key, parts, Put(config=config, image=image, layers=layers), log, store, packing)


@dataclass(frozen=True, kw_only=True)
class Put:
    """An image whose OCI layout is written."""

    config: RunConfig
    image: OciImage
    layers: Sequence[Layer]


def finish(
    folder: Path, key: str, parts: ImageParts, put: Put, log: Path, store: LocalStore, packing: Packing | None
) -> None:
    """The end of every build: checks, .sqsh, reports and record.

    Raises:
        CheckRefusedError: a check of the finished image refuses it.
    """
    reporter = store.reporter
    lock, base, environment = parts.lock.lock, parts.base, parts.environment
    config, image, layers = put.config, put.image, put.layers
    epoch = lock.source_date_epoch
    read = scan_layers(layers, store)
    checks = check_image(facts(parts, config, read), parts.allow, reporter)
    sqsh: SqshRecord | None = None
    if packing is not None:
        with reporter.step(f"pack the .sqsh with {packing.compression}"):
            # The digest of the tar in a layer is not compared: its own is, and both were taken of the same bytes.
            blobs = [
                LayerBlob(
                    file=layer.file,
                    digest=layer.record.digest,
                    size_bytes=layer.record.size_bytes,
                    unpacked_bytes=layer.record.unpacked_bytes,
                )
                for layer in layers
            ]
            source = SqshSource(layers=blobs, config=config, provenance=f"oci:{image.digest}", epoch=epoch)
            sqsh = write_sqsh(folder / SQSH_FILE, source, log, packing.compression)
    record = ImageRecord(
        schema="envbuild.image/1",
        key=key,
        stack=lock.stack,
        base=parts.selection.base_name,
        target=parts.selection.target_name,
        hardware=node_requirements.in_words(parts.selection.target),
        lock_digest=lock.digest,
        source_date_epoch=epoch,
        oci_digest=image.digest,
        config_digest=image.config_digest,
        layers=tuple(layer.record for layer in layers),
        sqsh=sqsh,
        python=f"{VENV}/bin/python",
        environment=config.environment,
        base_digest=base.digest,
        base_made_by=base.record.made_by,
        base_packages=base.record.packages,
        packages=environment.record.packages,
        components=tuple(sorted(name for name, item in lock.components.items() if not item.transitive)),
        not_checked=environment.record.not_checked,
        wheels={name: item.record.digest for name, item in parts.wheels.items()},
        checks=checks,
        uv=uv_version(),
        gzip=gzip_writer.ENCODER,
    )
    reports = write_reports(folder, folder / OCI_DIR, record, parts.lock, read, parts.wheels)
    write_atomic(folder / RECORD_FILE, dump(record.model_copy(update={"reports": reports})))


def facts(parts: ImageParts, config: RunConfig, read: tuple[CachedScan, ...]) -> Facts:
    """What the checks of a finished image look at."""
    made = isinstance(parts.selection.base.obtain, Mmdebstrap)
    return Facts(
        layers=read,
        variables=dict(entry.split("=", 1) for entry in config.environment),
        labels=dict(config.labels),
        of_base=frozenset() if made else frozenset(layer.record.digest for layer in parts.base.layers),
        sm=parts.selection.target.sm,
        compiled=compiled_for(parts.wheels),
        loaded=parts.environment.record.loaded,
        environment=VENV,
        provided=frozenset(parts.selection.base.provides),
    )


def run_config(parts: ImageParts) -> RunConfig:
    """How containers of the image start."""
    selection, lock, base = parts.selection, parts.lock.lock, parts.base.record
    hardware = node_requirements.in_words(selection.target)
    required = node_requirements.variables(selection.target, selection.base.cuda, base.config.environment)
    variables = running.environment(VENV, base.config.environment, required, lock.variables(VENV))
    labels = {
        **running.labels(base.config, base.name, base.digest),
        "org.opencontainers.image.title": f"{lock.stack} on {selection.base_name} for {hardware}",
        "envbuild.stack": lock.stack,
        "envbuild.base": selection.base_name,
        "envbuild.base.digest": parts.base.digest,
        "envbuild.hardware": hardware,
        "envbuild.lock": lock.digest,
        **node_requirements.labels(required),
    }
    return RunConfig(
        environment=tuple(f"{name}={value}" for name, value in variables.items()),
        command=COMMAND,
        labels=tuple(labels.items()),
        workdir=base.config.workdir,
        volumes=base.config.volumes,
        user=base.config.user,
        ports=base.config.ports,
        stop_signal=base.config.stop_signal,
    )


def write_configuration(file: Path, parts: ImageParts) -> LayerRecord:
    """The last and smallest layer: what the image says about itself, and its environment for login shells."""
    lock = parts.lock.lock
    fingerprint: dict[str, Json] = {
        "schema": "envbuild.fingerprint/1",
        "stack": lock.stack,
        "base": parts.selection.base_name,
        "base_digest": parts.base.digest,
        "target": node_requirements.what_decides(parts.selection.target),
        "lock_digest": lock.digest,
        "python": f"{VENV}/bin/python",
        "packages": dict(parts.environment.record.packages),
        "base_packages": dict(parts.base.record.packages),
    }
    variables = running.environment(VENV, parts.base.record.config.environment, {}, lock.variables(VENV))
    profile = (data_root() / PROFILE).read_text(encoding="utf-8")
    # A base's words, which a login shell must not run.
    front = shlex.quote(running.path_front(variables["PATH"]))
    profile = profile.replace("@VENV@", VENV).replace("@FRONT@", front)
    profile += "".join(f"export {name}={shlex.quote(variables[name])}\n" for name in lock.variables(VENV))
    with LayerWriter(file, EPOCH) as writer:
        writer.add_directory(MOUNT_POINT)
        writer.add_directory(FINGERPRINT.rsplit("/", 1)[0])
        writer.add_bytes(FINGERPRINT, (json.dumps(fingerprint, indent=2) + "\n").encode())
        # Without them there is no name "localhost" where no runtime mounts its own, and no place to mount one's own.
        writer.add_bytes("etc/hosts", HOSTS)
        writer.add_bytes("etc/profile.d/envbuild.sh", profile.encode())
        writer.add_bytes("etc/resolv.conf", b"")
    return writer.record("configuration")
