"""The registry of launchers, and where cases train: a form of the image, and the launcher that runs it.

A launcher is one module of this package that is named after it and has ``open_executor(request)``, which tries the
machine before work starts and returns an :class:`~envbuild.launch.executors.Executor`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from envbuild.catalog.cluster import Cluster
from envbuild.launch.executors import Executor, Form, LaunchRequest

# The forms that each launcher runs, the default first.
LAUNCHERS: dict[str, tuple[Form, ...]] = {
    "bwrap": ("sqsh", "oci"),
    "docker": ("oci",),
    "venv": ("none",),
    "here": ("none",),
    "slurm": ("sqsh",),
}
# The launcher of a form that is named alone.
DEFAULT = "bwrap"
# What a cluster's file names, and no option.
ON_CLUSTER = ("slurm",)
# What ``--in`` takes.
WORDS = (*LAUNCHERS[DEFAULT], *(name for name in LAUNCHERS if name != DEFAULT and name not in ON_CLUSTER))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where cases train."""

    form: Form = "sqsh"
    launcher: str = DEFAULT

    @classmethod
    def parse(cls, word: str) -> Placement:
        """What a word of ``--in`` means: a form, which bubblewrap runs, or a launcher with its default form.

        Raises:
            ValueError: it is neither.
        """
        for form in LAUNCHERS[DEFAULT]:
            if word == form:
                return cls(form=form)
        if word not in WORDS:
            raise ValueError(f"{word!r} is none of {', '.join(WORDS)}")
        return cls(form=LAUNCHERS[word][0], launcher=word)

    def __str__(self) -> str:
        """The word of ``--in``."""
        return self.form if self.launcher in (DEFAULT, *ON_CLUSTER) else self.launcher

    @property
    def has_image(self) -> bool:
        """Whether an image is certified; else a lock."""
        return self.form != "none"


# The .sqsh on this machine.
SQSH = Placement()


def place_on(cluster: Cluster, place: Placement = SQSH) -> Placement:
    """Where the cases of a form train on a cluster: by its launcher, or as on this machine where it has none."""
    return Placement(form=place.form, launcher=cluster.launcher) if cluster.launcher in ON_CLUSTER else place


def open_executor(launcher: str, request: LaunchRequest) -> Executor:
    """The executor of a launcher.

    Raises:
        CertificationCannotRunError: the machine has no such environment.
        MachineError: it has no driver, or no runtime.
    """
    # Imported where it is used: the launcher for docker needs the SDK of docker.
    module = importlib.import_module(f"envbuild.launch.{launcher}")
    opened: Callable[[LaunchRequest], Executor] = module.open_executor
    return opened(request)
