"""``envbuild nightly --plan``: what a night would do now. Nothing is built, run or written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.catalog.context import Context
from envbuild.catalog.fields import Device
from envbuild.certify.run.job import CertifyJob, make_job
from envbuild.core.digests import Json, short
from envbuild.core.errors import ConfigurationError, EnvbuildError
from envbuild.image.output import PlacedImage, find_image
from envbuild.launch.gpus import gpus_here
from envbuild.lock.context import run_context
from envbuild.lock.existing import moved_branches
from envbuild.lock.inputs.request import LockInputs, LockRequest
from envbuild.lock.lockdir import lock_path
from envbuild.lock.lockfile import RECORD_FILE, LockDirectory, read_lock
from envbuild.nightly.hardware import cluster_for, command_for, is_certified
from envbuild.nightly.models import Job, NightRequest
from envbuild.nightly.steps import NightSteps
from envbuild.publish.draft import Publishing
from envbuild.publish.index import read_index
from envbuild.publish.repository import open_repository


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A step, and whether there is anything to do in it; ``target`` is empty for a lock."""

    target: str
    step: str
    to_do: bool
    text: str

    def line(self) -> str:
        return f"{self.target or 'lock':<10} {self.step:<8} {'to do' if self.to_do else 'nothing':<8} {self.text}"

    def as_json(self) -> dict[str, Json]:
        return {"target": self.target or None, "step": self.step, "to_do": self.to_do, "text": self.text}


def plan_night(request: NightRequest, publish: Publishing | None, context: Context) -> tuple[PlannedStep, ...]:
    """The steps of a night, without running them.

    Raises:
        NetworkError: a repository or the registry cannot be reached.
    """
    # By base: None where a lock would be made, so that all after it follows from that.
    locks: dict[str, LockDirectory | None] = {}
    listed: list[PlannedStep] = []
    for selection in request.selections:
        if selection.base_name not in locks:
            path = lock_path(request.project, request.name, selection.base_name)
            lock = read_lock(path) if (path / RECORD_FILE).is_file() else None
            why = _why_locked(
                LockInputs.from_request(selection, LockRequest(base_named=request.base_named)), lock, context
            )
            text = why or f"lock {short(lock.lock.digest) if lock else ''} on {selection.base_name}"
            listed.append(PlannedStep(target="", step="lock", to_do=bool(why), text=text))
            locks[selection.base_name] = None if why else lock
        standing = locks[selection.base_name]
        if standing is None:
            text = "follows from the new lock"
            steps = ("image", "certify", *(["publish"] if publish else []))
            listed += [PlannedStep(target=selection.target_name, step=step, to_do=True, text=text) for step in steps]
        else:
            listed += _of_target(Job(selection=selection, lock=standing), request, publish, context)
    return tuple(listed)


def _why_locked(inputs: LockInputs, lock: LockDirectory | None, context: Context) -> str:
    """Why a lock would be made; empty where it would not."""
    if lock is None:
        return "there is no lock"
    if lock.lock.inputs.digest != inputs.digest:
        return "the stack, the base or uv changed since it was locked"
    return "; ".join(moved_branches(lock.lock, run_context(context)))


def _of_target(job: Job, request: NightRequest, publish: Publishing | None, context: Context) -> Iterator[PlannedStep]:
    target = job.target
    image = _image(job, request)
    text = f"image {short(image.record.oci_digest)}" if image else f"of lock {short(job.lock.lock.digest)}"
    yield PlannedStep(target=target, step="image", to_do=image is None, text=text)
    if image is None:
        later = ("certify", *(["publish"] if publish else []))
        yield from (PlannedStep(target=target, step=step, to_do=True, text="of the new image") for step in later)
        return
    job = Job(selection=job.selection, lock=job.lock, image=image)
    certify = make_job(NightSteps(request=request, context=context).certify_request(job), context.store)
    text = f"{len(certify.cases)} cases, {_where(certify, request)}"
    yield PlannedStep(target=target, step="certify", to_do=not is_certified(certify, request.signer), text=text)
    if publish is not None:
        registry = open_repository(publish.to, context.site)
        known = [
            publication
            for publication in read_index(registry)
            if publication.oci_digest == image.record.oci_digest and publication.certified
        ]
        text = f"as {known[0].tag}" if known else f"to {publish.to}"
        yield PlannedStep(target=target, step="publish", to_do=not known, text=text)


def _image(job: Job, request: NightRequest) -> PlacedImage | None:
    selection = job.selection
    try:
        image = find_image(
            request.out_dir, selection.stack_name, selection.base_name, selection.target_name, request.lock_name
        )
    except ConfigurationError:
        return None
    # The image of an older lock lies under the same name until it is built again.
    return image if image.record.lock_digest == job.lock.lock.digest else None


def _where(job: CertifyJob, request: NightRequest) -> str:
    """The place where the cases would run, in words."""
    selection = job.request.selection
    if where := cluster_for(request.on, selection):
        return f"on {where.nodes} {'node' if where.nodes == 1 else 'nodes'} of {where.name}"
    if command := command_for(request.run_with, selection.target_name, selection.target.device):
        return f"by {command}"
    if selection.target.device is not Device.CUDA:
        return "here"
    needed = job.ranks
    try:
        here = len(gpus_here())
    except EnvbuildError:
        here = 0
    return f"here, on {needed} GPUs" if here >= needed else f"after a plan: {needed} GPUs are needed, {here} are here"
