"""The steps of a night for one target: each from what there is to what comes of it."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace

from envbuild import __version__
from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.certify.cases.selection import ALL, WantedCases
from envbuild.certify.run.job import CertifyRequest, make_job
from envbuild.core.digests import digest_of
from envbuild.core.errors import InternalError
from envbuild.core.text import quoted_command
from envbuild.image.image import make_image
from envbuild.image.inputs import ImageInputs
from envbuild.launch.launchers import SQSH, place_on
from envbuild.ledger.models import StepState
from envbuild.lock.inputs.request import LockRequest
from envbuild.lock.lock import LockOptions, LockResult, lock_stack
from envbuild.lock.lockfile import LOCKFILES, LockDirectory
from envbuild.nightly.hardware import HardwareAccess, certify_somewhere, cluster_for, command_for
from envbuild.nightly.models import Job, NamedStep, NightRequest, Outcome
from envbuild.nightly.published import publish_job
from envbuild.nightly.records import certificate_rows, image_row, wheel_rows
from envbuild.publish.draft import Publishing
from envbuild.sync.build_environment import build_environment_for
from envbuild.sync.verify import Verifier
from envbuild.wheels.build.limits import choose_limits
from envbuild.wheels.build.parallel import BuildContext, make_wheels
from envbuild.wheels.cache.reuse import fitting_wheels
from envbuild.wheels.cache.wheelhouse import Built, Wheelhouse
from envbuild.wheels.plan import choose, cuda_of, plan_wheels
from envbuild.wheels.sources import WheelSources
from envbuild.wheels.toolchain.toolkit import ToolkitRequest, choose_toolkit

FORMATS = ("oci", "sqsh")


def make_lock(selection: Selection, request: NightRequest, context: Context) -> LockResult:
    """The newest lock of the stack that holds together, on the selection's base or the next one that has one.

    Raises:
        EnvbuildError: see :func:`lock_stack`.
    """
    # Also of pinned stacks: the lock then names its base, which images are published on.
    without = quoted_command("envbuild", "lock", "--stack", selection.stack_name, "--no-verify")
    verifier = verifier_of(request, context, without=without)
    options = LockOptions(
        path=request.project / LOCKFILES / request.name, by_base=True, named=request.lock_name is not None
    )
    return lock_stack(selection, LockRequest(base_named=request.base_named), options, context, verifier)


def verifier_of(request: NightRequest, context: Context, without: str) -> Verifier:
    """Verifies locks with the wheels that a night has; ``without``: the command that does not."""
    from envbuild.image.verification import verification_places  # slow to import

    return Verifier(
        context,
        places_for=verification_places,
        without=without,
        wheels_for=functools.partial(fitting_wheels_of, request, context),
    )


def fitting_wheels_of(
    request: NightRequest, context: Context, lock: LockDirectory, selection: Selection
) -> dict[str, Built]:
    """The wheels that fit a lock, of those that a night has."""
    sources = _sources(selection, context)
    return fitting_wheels(lock, selection.target, selection.catalog, sources, request.remotes)


def _sources(selection: Selection, context: Context) -> WheelSources:
    return WheelSources(base=selection.base, site=context.site, store=context.store, reporter=context.reporter)


@dataclass(frozen=True, kw_only=True)
class NightSteps:
    """The steps of a night's targets, in their order.

    Attributes:
        publishing: publishes what is certified; None: nothing is published.
    """

    request: NightRequest
    context: Context
    publishing: Publishing | None = None

    def all(self) -> tuple[NamedStep, ...]:
        steps = (
            NamedStep(name="wheels", run=self.wheels, inputs=self._build_inputs),
            NamedStep(name="image", run=self.image, inputs=self._build_inputs),
            NamedStep(name="certify", run=self.certify, inputs=self._certify_inputs),
        )
        if (publishing := self.publishing) is None:
            return steps
        # Without inputs, and so every night: keys, policies and tags decide about it, which no digest here has.
        return (*steps, NamedStep(name="publish", run=lambda job, _: publish_job(job, publishing, self.context)))

    def wheels(self, job: Job, attempt: int) -> Outcome:  # noqa: ARG002
        """The compile-phase wheels of the lock for the target."""
        names = choose(job.lock, ())
        if not names:
            return Outcome(job=job, state="nothing", note="nothing is compiled")
        selection, context = job.selection, self.context
        sources = _sources(selection, context)
        cuda = cuda_of(job.lock, selection.target)
        chosen = choose_toolkit(ToolkitRequest.AUTO, job.lock, cuda, sources)
        plans = plan_wheels(job.lock, names, selection.target, selection.catalog, chosen.compilers, sources)
        made = make_wheels(
            plans,
            # Made only where something is compiled.
            lambda: build_environment_for(job.lock, selection.target, context),
            BuildContext(
                toolchain=chosen.toolchain,
                sources=sources,
                wheelhouse=Wheelhouse(context.store, self.request.remotes, job.lock.lock.digest),
                limits=choose_limits(None, None),
            ),
        )
        built = [wheel for wheel in made if wheel.built]
        state: StepState = "done" if built else "nothing"
        rows = tuple(wheel_rows(made, job, self.context.moment()))
        return Outcome(job=job, state=state, note=f"{len(built)} of {len(made)} compiled", rows=rows)

    def image(self, job: Job, attempt: int) -> Outcome:  # noqa: ARG002
        """The image of the lock for the target."""
        wheels = fitting_wheels_of(self.request, self.context, job.lock, job.selection)
        inputs = ImageInputs(selection=job.selection, lock=job.lock, wheels=wheels, with_sqsh=True)
        started = time.monotonic()
        name = self.request.lock_name
        made = make_image(inputs, FORMATS, self.request.out_dir, self.context, lock_name=name)
        seconds = time.monotonic() - started if made.built else None
        return Outcome(
            job=replace(job, image=made.image),
            state="done" if made.built or made.placed else "nothing",
            digest=made.image.record.oci_digest,
            rows=(image_row(made.image, seconds, self.context.moment()),),
        )

    def certify(self, job: Job, attempt: int) -> Outcome:
        """The certificate of the image, or the plan of one that waits for hardware."""
        command = command_for(self.request.run_with, job.target, job.selection.target.device)
        access = HardwareAccess(command=command, signer=self.request.signer)
        certified = certify_somewhere(self.certify_request(job), access, self.context, again=attempt > 1)
        if certified.done is None:
            return Outcome(job=job, state="waiting", note="its plan waits for hardware", plan=str(certified.waiting))
        rows = tuple(certificate_rows(certified.done.certificate))
        return Outcome(
            job=replace(job, certificate=certified.done.certificate),
            state="done" if certified.done.written else "nothing",
            digest=rows[0].key,
            note=f"{len(certified.done.statement.predicate.cases)} cases",
            rows=rows,
        )

    def certify_request(self, job: Job) -> CertifyRequest:
        """The certification of a job with an image."""
        if job.image is None:
            raise InternalError("a target is certified before it has an image")
        where = cluster_for(self.request.on, job.selection)
        return CertifyRequest(
            selection=job.selection,
            lock=job.lock,
            matrix_name=job.selection.matrix_for(job.lock.lock.driver),
            out_dir=self.request.out_dir,
            wanted=WantedCases(nodes=where.nodes) if where else ALL,
            place=place_on(job.selection.catalog.cluster(where.name)) if where else SQSH,
            cluster=where.name if where else None,
            image=job.image,
            lock_name=self.request.lock_name,
        )

    def _build_inputs(self, job: Job) -> str:
        # Another envbuild may build what this one cannot.
        return digest_of({"lock": job.lock.lock.digest, "target": job.target, "envbuild": __version__})

    def _certify_inputs(self, job: Job) -> str:
        return make_job(self.certify_request(job), self.context.store).key
