"""Which builder makes an image, and whether a daemon gets it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from envbuild.core.errors import EnvbuildError, MachineError
from envbuild.image.base import check_tools, find_base
from envbuild.image.build import BuiltImage, build_image
from envbuild.image.docker.builder import build_with_docker
from envbuild.image.docker.engine import NATIVE, Engine, open_engine
from envbuild.image.docker.job import Job
from envbuild.image.docker.loading import put_into

Builder = Literal["auto", "native", "docker"]
DOCKER = "docker"


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """What is asked for.

    Attributes:
        formats: ``oci``, ``sqsh`` and ``docker`` (in a daemon).
        tag: the image's name in a daemon.
    """

    builder: Builder
    formats: Collection[str]
    tag: str


@dataclass(frozen=True, kw_only=True)
class Made:
    """What came of it.

    Attributes:
        engine: the daemon that has the image; None where none was asked.
        loaded: whether this call put it there.
    """

    image: BuiltImage
    engine: str | None = None
    loaded: bool = False


def make_image(job: Job, asked: ImageRequest) -> Made:
    """The image of a job, from the builder that was asked for, in the formats that were asked for.

    Raises:
        MachineError: neither builder can work here; or the one that was asked for cannot.
        EnvbuildError: see the builders.
    """
    files = [name for name in asked.formats if name != DOCKER] or ["oci"]
    engine = choose(asked, job)
    if engine is not None:
        image = build_with_docker(job, engine, asked.tag, formats=files)
        return Made(image=image, engine=engine.version, loaded=image.built)
    to = _daemon_of_format(asked) if DOCKER in asked.formats else None  # before minutes go into the image
    image = build_image(
        job.selection,
        job.lock,
        job.site,
        job.store,
        job.reporter,
        formats=files,
        refresh_base=job.refresh_base,
        wheels=job.wheels,
        allow=job.allow,
        packing=job.packing,
    )
    if to is None:
        return Made(image=image)
    loaded = put_into(to, image.path, image.record, asked.tag, job.reporter)
    return Made(image=image, engine=to.version, loaded=loaded)


def choose(asked: ImageRequest, job: Job) -> Engine | None:
    """The daemon to build with; None for the native builder, which comes first where nobody said otherwise.

    Raises:
        MachineError: neither can work here; says what each lacks.
    """
    if asked.builder == "native":
        return None
    if asked.builder == "docker":
        return open_engine(otherwise=f"{NATIVE} {_other_formats(asked)}" if DOCKER in asked.formats else NATIVE)
    try:
        made_anew = job.refresh_base or find_base(job.selection.base, job.store) is None
        check_tools(job.selection.base, job.selection.base_name, made_anew=made_anew)
    except MachineError as native:
        try:
            engine = open_engine()
        except EnvbuildError as docker:
            raise MachineError(
                f"no builder can work here: {native.what}; {docker.what}",
                why="\n".join(text for text in (native.why, docker.why) if text),
                fix=f"native: {native.fix}\ndocker: {docker.fix}",
            ) from native
        job.reporter.note(f"builder docker ({engine.version}), since native cannot work here: {native.what}")
        return engine
    return None


def _daemon_of_format(asked: ImageRequest) -> Engine:
    """The daemon that gets an image which is built without one."""
    try:
        return open_engine(otherwise=_other_formats(asked))
    except MachineError as error:
        why = f"--format docker puts the image into a daemon, whoever builds it. {error.why}"
        raise error.with_context(why=why) from error


def _other_formats(asked: ImageRequest) -> str:
    """The formats that were asked for and need no daemon, as an option."""
    return f"--format {','.join(name for name in asked.formats if name != DOCKER) or 'oci'}"
