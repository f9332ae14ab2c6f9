"""The launcher ``bwrap``: tasks inside an image with bubblewrap, from its .sqsh or the layers of its OCI layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.core.errors import CertificationFailedError
from envbuild.core.process import Finished, ProcessOptions, run
from envbuild.core.sandbox import Bind
from envbuild.image.output import OCI_DIR, PlacedImage
from envbuild.launch.executors import IMAGE_DIR, PLAN, RESULTS, RUNNER, UNBUFFERED, LaunchRequest, Task
from envbuild.launch.gpus import NvidiaDriver, find_driver
from envbuild.launch.open_image import LAYERS, OpenImage, open_image, open_layers
from envbuild.launch.runtimes import Runtime, probe
from envbuild.oci.files import blob_path
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.layer import Layer


@dataclass(frozen=True, kw_only=True)
class ImageExecutor:
    """What the executors of an image share.

    Attributes:
        extra: variables besides the image's own.
    """

    image: PlacedImage
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        return self.image.record.python

    def joins(self) -> bool:
        # Its tasks end with this process.
        return False

    def forget(self) -> None:
        """Nothing: a run here leaves nothing elsewhere."""


@dataclass(frozen=True, kw_only=True)
class SqshExecutor(ImageExecutor):
    """Opens the .sqsh with a runtime; the runner hashes the file before it starts."""

    runtime: Runtime
    driver: NvidiaDriver | None = None

    @property
    def name(self) -> str:
        return self.runtime.name

    def run(self, task: Task) -> Finished:
        with open_image(self.runtime, self.image.sqsh(), driver=self.driver) as opened:
            return run_task(opened, task, self.python, self.image.sqsh(), self.extra)


@dataclass(frozen=True, kw_only=True)
class LayersExecutor(ImageExecutor):
    """Unpacks the image's layers, each compared with its digest; the runner hashes the manifest that names them."""

    driver: NvidiaDriver | None = None

    @property
    def name(self) -> str:
        return LAYERS

    def run(self, task: Task) -> Finished:
        with open_layers(layers_of(self.image), variables_of(self.image), driver=self.driver) as opened:
            return run_task(opened, task, self.python, manifest_of(self.image), self.extra)


def open_executor(request: LaunchRequest) -> SqshExecutor | LayersExecutor:
    """The image in its form, on this machine.

    Raises:
        MachineError: there is no driver for its GPUs, or no runtime.
    """
    image, driver = request.require_image(), find_driver() if request.on_gpus else None
    if request.form == "oci":
        return LayersExecutor(image=image, driver=driver, extra=request.extra)
    return SqshExecutor(image=image, runtime=probe(request.runtime), driver=driver, extra=request.extra)


def run_task(image: OpenImage, task: Task, python: str, hashed: Path, extra: Mapping[str, str]) -> Finished:
    """Run a task in an open image, without a network.

    Args:
        hashed: the file whose digest identifies the image.
    """
    hashed_inside = f"{IMAGE_DIR}/{hashed.name}"
    inside = {task.plan: PLAN, task.runner: RUNNER, hashed: hashed_inside}
    binds = [Bind(source=source.resolve(), target=target) for source, target in inside.items()]
    binds.append(Bind(source=task.results.resolve(), target=RESULTS, writable=True))
    sandbox = image.sandbox(binds, {**extra, **UNBUFFERED})
    return run(
        image.command(sandbox, task.words_inside(python, hashed_inside)),
        what="train the cases inside the image",
        on_line=task.on_line,
        log=task.log,
        check=False,
        options=ProcessOptions(
            env=sandbox.process_environment(), timeout_seconds=task.timeout_seconds, error=CertificationFailedError
        ),
    )


def variables_of(image: PlacedImage) -> dict[str, str]:
    """The image's own variables, from its record."""
    return dict(line.split("=", 1) for line in image.record.environment)


def layers_of(image: PlacedImage) -> list[LayerBlob]:
    """The layers of an image, with all that its record has on them."""
    return [Layer(layer, _blob(image, layer.digest)).blob for layer in image.record.layers]


def manifest_of(image: PlacedImage) -> Path:
    """The image's manifest, whose digest is the image's."""
    return _blob(image, image.record.oci_digest)


def _blob(image: PlacedImage, digest: str) -> Path:
    return image.path / OCI_DIR / blob_path(digest)
