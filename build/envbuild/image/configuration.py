"""How containers of an image start, and the layer with the image's own files in /etc."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from envbuild.catalog.data import data_root
from envbuild.core.digests import Json
from envbuild.image import node_requirements
from envbuild.image.inputs import PROFILE, ImageParts
from envbuild.image.layers.sandbox import VENV
from envbuild.image.variables import base_labels, image_variables, path_front
from envbuild.oci.models import RunConfig
from envbuild.rootfs.layer import LayerRecord
from envbuild.rootfs.layer_writer import EPOCH, LayerWriter

FINGERPRINT = "etc/envbuild/fingerprint.json"
# Where a plan and its results are mounted when an image is certified.
MOUNT_POINT = "envbuild"
HOSTS = b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
COMMAND = ("/bin/bash",)


def run_config(parts: ImageParts) -> RunConfig:
    """How containers of the image start."""
    selection, lock, base = parts.inputs.selection, parts.inputs.lock.lock, parts.base.record
    hardware = node_requirements.hardware_of(selection.target)
    required = node_requirements.variables(selection.target, selection.base.cuda, base.config.environment)
    variables = image_variables(VENV, base.config.environment, required, lock.variables(VENV))
    labels = {
        # First: the image's own labels hold where the base has the same.
        **base_labels(base.config, base.name, base.digest),
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
        # Without the base's entrypoint: docker and enroot would run it, and pyxis by default would not.
        workdir=base.config.workdir,
        volumes=base.config.volumes,
        user=base.config.user,
        ports=base.config.ports,
        stop_signal=base.config.stop_signal,
    )


def write_configuration(file: Path, parts: ImageParts) -> LayerRecord:
    """Write the uppermost layer: the image's fingerprint, its variables for login shells, its stack's files, /etc's."""
    selection, lock = parts.inputs.selection, parts.inputs.lock.lock
    fingerprint: dict[str, Json] = {
        "schema": "envbuild.fingerprint/1",
        "stack": lock.stack,
        "base": selection.base_name,
        "base_digest": parts.base.digest,
        "target": node_requirements.target_key(selection.target),
        "lock_digest": lock.digest,
        "python": f"{VENV}/bin/python",
        "packages": dict(parts.environment.record.packages),
        "base_packages": dict(parts.base.record.packages),
    }
    # Without the requirements: runtimes read them from the image's configuration before any shell starts.
    variables = image_variables(VENV, parts.base.record.config.environment, {}, lock.variables(VENV))
    profile = (data_root() / PROFILE).read_text(encoding="utf-8")
    # PATH of a base is foreign text, which a login shell must not run.
    front = shlex.quote(path_front(variables["PATH"]))
    profile = profile.replace("@VENV@", VENV).replace("@FRONT@", front)
    profile += "".join(f"export {name}={shlex.quote(variables[name])}\n" for name in lock.variables(VENV))
    with LayerWriter(file, EPOCH) as writer:
        writer.add_directory(MOUNT_POINT)
        writer.add_directory(FINGERPRINT.rsplit("/", 1)[0])
        writer.add_bytes(FINGERPRINT, (json.dumps(fingerprint, indent=2) + "\n").encode())
        # For runtimes that mount no hosts file: "localhost" resolves, and there is a file to mount over.
        writer.add_bytes("etc/hosts", HOSTS)
        writer.add_bytes("etc/profile.d/envbuild.sh", profile.encode())
        # Likewise a place to mount over: of a base made here, the builder's own was removed
        # (containers/native/scrub.txt).
        writer.add_bytes("etc/resolv.conf", b"")
        for path, text in lock.files.items():
            writer.add_bytes(f"{lock.site_packages(VENV)}/{path}".lstrip("/"), text.encode())
    return writer.record("configuration")
