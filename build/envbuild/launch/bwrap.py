"""Tasks inside an image under bubblewrap: from its .sqsh, or from the layers of its OCI layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.core.errors import CertificationFailedError
from envbuild.core.process import Finished
from envbuild.image.output import OCI_DIR, PlacedImage
from envbuild.launch.executors import IMAGE_DIR, PLAN, RESULTS, RUNNER, UNBUFFERED, Task
from envbuild.launch.gpus import NvidiaDriver
from envbuild.launch.open_image import LAYERS, OpenImage, Runtime, open_image, open_layers
from envbuild.rootfs.blobs import LayerBlob


@dataclass(frozen=True, kw_only=True)
class OfImage:
    """What every way into an image shares.

    Attributes:
        given: variables besides the image's own.
    """

    image: PlacedImage
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        return self.image.record.python

    def variables(self) -> Mapping[str, str]:
        """See :class:`~envbuild.launch.executors.Executor`."""
        return {**variables_of(self.image), **self.given}


@dataclass(frozen=True, kw_only=True)
class InSqsh(OfImage):
    """Opens the .sqsh with a runtime; the runner hashes the file before it starts."""

    runtime: Runtime
    driver: NvidiaDriver | None = None

    @property
    def name(self) -> str:
        return self.runtime.name

    def run(self, task: Task) -> Finished:
        """See :class:`~envbuild.launch.executors.Executor`."""
        with open_image(self.runtime, self.image.sqsh(), driver=self.driver) as opened:
            return run_task(opened, task, self.python, self.image.sqsh(), self.given)


@dataclass(frozen=True, kw_only=True)
class InLayers(OfImage):
    """From its layers, each held to its digest; the runner hashes the manifest that names them."""

    driver: NvidiaDriver | None = None

    @property
    def name(self) -> str:
        return LAYERS

    def run(self, task: Task) -> Finished:
        """See :class:`~envbuild.launch.executors.Executor`."""
        with open_layers(layers_of(self.image), variables_of(self.image), driver=self.driver) as opened:
            return run_task(opened, task, self.python, manifest_of(self.image), self.given)


def run_task(image: OpenImage, task: Task, python: str, hashed: Path, given: Mapping[str, str]) -> Finished:
    """Run a task in an open image, with the network off.

    Args:
        hashed: the file by which the image is known.
    """
    seen = f"{IMAGE_DIR}/{hashed.name}"
    return image.run(
        task.words_inside(python, seen),
        what="train the cases inside the image",
        read_only={task.plan: PLAN, task.runner: RUNNER, hashed: seen},
        writable={task.results: RESULTS},
        env={**given, **UNBUFFERED, **task.variables},
        on_line=task.on_line,
        log=task.log,
        timeout_seconds=task.timeout_seconds,
        error=CertificationFailedError,
    )


def variables_of(image: PlacedImage) -> dict[str, str]:
    """The image's own variables, as its record has them."""
    return dict(item.split("=", 1) for item in image.record.environment)


def layers_of(image: PlacedImage) -> list[LayerBlob]:
    """The layers of an image, with everything that its record says about them."""
    return [layer.blob(_blob(image, layer.digest)) for layer in image.record.layers]


def manifest_of(image: PlacedImage) -> Path:
    """The image's manifest: its digest is the image's."""
    return _blob(image, image.record.oci_digest)


def _blob(image: PlacedImage, digest: str) -> Path:
    return image.path / OCI_DIR / "blobs/sha256" / digest.removeprefix("sha256:")
