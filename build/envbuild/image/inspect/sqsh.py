"""A .sqsh: one layer, and the configuration that its own files state. enroot's have root as the owner of everything."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from envbuild.core.digests import sha256_file
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.image.inspect.opened import OpenedImage
from envbuild.image.squashfs.read import members_of_sqsh
from envbuild.oci.image import ImageLayer
from envbuild.oci.models import Configuration, RunConfig, not_an_image

# What enroot writes there has some hundred lines.
MOST_BYTES = 8 << 20
_LABEL = re.compile(r"^# (?P<name>\S+) (?P<value>.*)$")


def open_sqsh(file: Path) -> OpenedImage:
    """The image of a .sqsh.

    Raises:
        CheckRefusedError: it cannot be read.
        MachineError: the program that reads it is missing.
    """
    try:
        config = _config(file)
    except CheckRefusedError as error:
        raise not_an_image(str(file), error.why) from error
    with machine_errors(file, "read"):
        size = file.stat().st_size
        digest = sha256_file(file)
    layer = ImageLayer(digest=digest, size_bytes=size, name="the .sqsh", members=lambda: members_of_sqsh(file))
    return OpenedImage(source=str(file), kind="sqsh", digest="", config=config, layers=(layer,))


def _config(file: Path) -> Configuration:
    """Variables and labels from the files that enroot writes; none where /etc or a file of them is a link."""
    texts = {"etc/environment": "", "etc/rc": ""}
    with contextlib.closing(members_of_sqsh(file, "etc")) as members:
        for member, content in members:
            if member.name in texts and content is not None and content.size <= MOST_BYTES:
                texts[member.name] = content.read().decode(errors="replace")
    labels = [match for line in texts["etc/rc"].splitlines() if (match := _LABEL.match(line))]
    run = RunConfig(
        environment=tuple(line for line in texts["etc/environment"].splitlines() if "=" in line),
        # The line "# enroot-provenance: URI" looks like a label, but for the colon.
        labels=tuple({label["name"]: label["value"] for label in labels if not label["name"].endswith(":")}.items()),
    )
    return Configuration(run=run)
