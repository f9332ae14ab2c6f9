"""The steps of a night for one target: each from what there is to what comes of it."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild import __version__
from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.certify.run.job import CertifyRequest, make_job
from envbuild.core.digests import digest_of
from envbuild.core.errors import InternalError
from envbuild.image.image import make_image
from envbuild.image.inputs import ImageInputs
from envbuild.ledger.models import StepState
from envbuild.lock.bases import lock_on_fitting_base
from envbuild.lock.inputs.request import LockRequest
from envbuild.lock.lock import LockOptions, LockResult
from envbuild.lock.lockdir import lock_path
from envbuild.lock.lockfile import LockDirectory
from envbuild.nightly.hardware import Reach, certify_somewhere, command_for
from envbuild.nightly.models import Attempt, Job, NamedStep, NightRequest, Outcome
from envbuild.nightly.published import PublishStep
from envbuild.nightly.records import certificate_rows, image_row, wheel_rows
from envbuild.store.remote import Remote
from envbuild.sync.build_environment import build_environment
from envbuild.sync.verify import Verifier
from envbuild.wheels.audit.prebuilt import check_prebuilt, site_packages_of
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
        EnvbuildError: see :func:`lock_on_fitting_base`.
    """

    def options_for(item: Selection) -> LockOptions:
        verifier = _verifier(item, request, context)
        return LockOptions(
            path=lock_path(request.project, request.name, item.base_name),
            verify=verifier,
            ready=functools.partial(verifier.require_place, item),
            named=request.lock_name is not None,
        )

    asked = LockRequest(base_named=request.base_named)
    return lock_on_fitting_base(selection, asked, options_for, context)


def _verifier(selection: Selection, request: NightRequest, context: Context) -> Verifier:
    """Verifies every lock, also those of pinned stacks: it then names its base, which images are published on."""
    from envbuild.image.verification import verification_places  # slow to import

    return Verifier(
        context,
        places_for=lambda item: verification_places(item, context),
        without=f"envbuild lock --stack {selection.stack_name} --no-verify",
        wheels_for=lambda lock, item: _wheels(lock, item, request.remotes, context),
    )


def _wheels(lock: LockDirectory, selection: Selection, remotes: Sequence[Remote], context: Context) -> dict[str, Built]:
    sources = _sources(selection, context)
    return fitting_wheels(lock, selection.target, selection.catalog, sources, context.reporter, remotes)


def _sources(selection: Selection, context: Context) -> WheelSources:
    return WheelSources(base=selection.base, site=context.site, store=context.store, reporter=context.reporter)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of a night's targets, in their order.

    Attributes:
        publishing: publishes what is certified; None: nothing is published.
    """

    request: NightRequest
    context: Context
    publishing: PublishStep | None = None

    def all(self) -> tuple[NamedStep, ...]:
        steps = (
            NamedStep(name="wheels", run=self.wheels, inputs=self._build_inputs),
            NamedStep(name="image", run=self.image, inputs=self._build_inputs),
            NamedStep(name="certify", run=self.certify, inputs=self._certify_inputs),
        )
        return (*steps, *([NamedStep(name="publish", run=self.publish)] if self.publishing else []))

    def wheels(self, job: Job, attempt: Attempt) -> Outcome:  # noqa: ARG002
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
            lambda: self._build_environment(job),
            BuildContext(
                toolchain=chosen.toolchain,
                sources=sources,
                wheelhouse=Wheelhouse(context.store, self.request.remotes, job.lock.lock.digest),
                limits=choose_limits(None, None),
            ),
        )
        built = [item for item in made if item.built]
        state: StepState = "done" if built else "nothing"
        rows = tuple(wheel_rows(made, job, self._now()))
        return Outcome(job=job, state=state, note=f"{len(built)} of {len(made)} compiled", rows=rows)

    def _build_environment(self, job: Job) -> Path:
        context = self.context
        made = build_environment(job.lock, context.site, context.store, context.reporter)
        check_prebuilt(site_packages_of(made), job.selection.target.sm, context.store, context.reporter)
        return made

    def image(self, job: Job, attempt: Attempt) -> Outcome:  # noqa: ARG002
        """The image of the lock for the target."""
        wheels = _wheels(job.lock, job.selection, self.request.remotes, self.context)
        inputs = ImageInputs(selection=job.selection, lock=job.lock, wheels=wheels, with_sqsh=True)
        started = time.monotonic()
        name = self.request.lock_name
        made = make_image(inputs, FORMATS, self.request.out_dir, self.context, lock_name=name)
        seconds = time.monotonic() - started if made.built else None
        return Outcome(
            job=replace(job, image=made.image),
            state="done" if made.built or made.placed else "nothing",
            digest=made.image.record.oci_digest,
            rows=(image_row(made.image, seconds, self._now()),),
        )

    def certify(self, job: Job, attempt: Attempt) -> Outcome:
        """The certificate of the image, or the plan of one that waits for hardware."""
        command = command_for(self.request.run_with, job.target, job.selection.target.device)
        reach = Reach(command=command, signer=self.request.signer)
        found = certify_somewhere(self.certify_request(job), reach, self.context, again=attempt.number > 1)
        if found.done is None:
            return Outcome(job=job, state="waiting", note="its plan waits for hardware", plan=str(found.waiting))
        rows = tuple(certificate_rows(found.done.certificate))
        return Outcome(
            job=replace(job, certificate=found.done.certificate),
            state="done" if found.done.written else "nothing",
            digest=rows[0].key,
            note=f"{len(found.done.statement.predicate.cases)} cases, {found.done.cases_run} of them run now",
            rows=rows,
        )

    def publish(self, job: Job, attempt: Attempt) -> Outcome:  # noqa: ARG002
        """The publication of the image, if the gate admits it."""
        if self.publishing is None:
            raise InternalError("a target is published, and nothing says where")
        return self.publishing.publish(job, self.context)

    def certify_request(self, job: Job) -> CertifyRequest:
        """What is certified of a job with an image."""
        if job.image is None:
            raise InternalError("a target is certified before it has an image")
        return CertifyRequest(
            selection=job.selection,
            lock=job.lock,
            matrix_name=job.selection.stack.matrix,
            out_dir=self.request.out_dir,
            image=job.image,
            lock_name=self.request.lock_name,
        )

    def _build_inputs(self, job: Job) -> str:
        return digest_of({"lock": job.lock.lock.digest, "target": job.target, "envbuild": __version__})

    def _certify_inputs(self, job: Job) -> str:
        return make_job(self.certify_request(job), self.context.store).key

    def _now(self) -> str:
        return self.context.clock().strftime(MOMENT_FORMAT)
