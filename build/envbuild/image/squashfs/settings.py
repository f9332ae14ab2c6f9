"""What decides a .sqsh besides the image: who packs it, and how it is compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envbuild.core.process import find_tool
from envbuild.image.record import SqshRecord
from envbuild.image.squashfs import compression as compressions
from envbuild.image.squashfs import enroot, enroot_import
from envbuild.image.squashfs.compression import Compression
from envbuild.image.squashfs.pack import mksquashfs_version, write_sqsh
from envbuild.oci.models import BaseConfig
from envbuild.oci.write import RunConfig
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.layer import Layer

# Raised when a .sqsh packed from the same layers would come out differently.
FORMAT = 2
Builder = Literal["native", "enroot"]
BUILDERS: tuple[Builder, ...] = ("native", "enroot")


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How a .sqsh is made.

    Attributes:
        readable: the compressions that the nodes can read that it is for; empty when nobody said.
    """

    compression: Compression = compressions.DEFAULT
    builder: Builder = "native"
    readable: tuple[str, ...] = ()

    @property
    def is_readable(self) -> bool:
        """Whether a .sqsh made in this way is one for the nodes."""
        return not self.readable or self.compression.name in self.readable

    def key(self) -> tuple[str, ...]:
        """What belongs into the key of an image with such a .sqsh.

        Raises:
            MachineError: a tool is not installed.
        """
        native = (str(FORMAT), mksquashfs_version(), *self.compression.words())
        return native if self.builder == "native" else (self.builder, enroot_import.enroot_version(), *native)

    def check_tools(self) -> None:
        """Before work starts: what packing will need.

        Raises:
            MachineError: a tool is not installed.
        """
        find_tool("mksquashfs", "squashfs-tools")
        if self.builder == "enroot":
            enroot_import.find_enroot()

    @staticmethod
    def check_base(config: BaseConfig) -> None:
        """As soon as the base is known: what its images carry on must go into a .sqsh.

        Raises:
            CheckRefusedError: its working directory or a volume would be run or mounted.
        """
        enroot.check(RunConfig(workdir=config.workdir, volumes=config.volumes))

    def write(
        self,
        target: Path,
        layout: Path,
        image_digest: str,
        layers: Sequence[Layer],
        config: RunConfig,
        epoch: int,
        log: Path,
    ) -> SqshRecord:
        """Pack the image in the OCI layout ``layout``, which is made of ``layers`` (lowest first).

        Raises:
            CheckRefusedError: a layer is refused, or its configuration would run code when a container starts.
            BuildError: the packer failed.
            MachineError: a tool is missing, or the disk is full.
        """
        if self.builder == "enroot":
            return enroot_import.import_sqsh(target, layout, image_digest, config, epoch, log, self.compression)
        # The digest of the tar in it is not compared: the blob's is, and both were taken of the same bytes.
        blobs = [
            LayerBlob(
                file=layer.file,
                digest=layer.record.digest,
                size_bytes=layer.record.size_bytes,
                unpacked_bytes=layer.record.unpacked_bytes,
            )
            for layer in layers
        ]
        return write_sqsh(target, blobs, config, f"oci:{image_digest}", epoch, log, self.compression)
