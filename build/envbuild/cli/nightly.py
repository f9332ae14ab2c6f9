"""``envbuild nightly``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from envbuild.cli.arguments import refuse_place_of_no_sqsh
from envbuild.cli.command import Command
from envbuild.cli.common import DEFAULT_STACK, PathArgument, Session, name_option, out_dir_option, output_options
from envbuild.cli.ledger import shared_state, state_option
from envbuild.cli.signing import key_options, signer_of, trust_of
from envbuild.core.errors import StaleImageError, UsageError
from envbuild.ledger.models import NightRow, StepRow
from envbuild.nightly.hardware import parse_run_with
from envbuild.nightly.models import NightRequest
from envbuild.nightly.plan import plan_night
from envbuild.nightly.published import PublishStep
from envbuild.nightly.run import NightPlaces, run_night
from envbuild.nightly.state import TargetState


def parse_targets(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:  # noqa: ARG001
    """``h100,h200`` as a tuple, each once."""
    return tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))


@click.command("nightly", cls=Command)
@click.option("--stack", metavar="NAME", default=DEFAULT_STACK, show_default=True, help="The components.")
@click.option("--targets", callback=parse_targets, default="", metavar="LIST", help="Default: all of the stack's.")
@click.option("--base", metavar="NAME", help="The userland; default: the stack's default base for each target.")
@name_option
@click.option("--to", metavar="REGISTRY/REPO", help="Publish what is certified there; default: publish nothing.")
@click.option("--sqsh-to", metavar="PLACE", help="Put the .sqsh into s3://B/P, gs://B/P or DIR, not into the registry.")
@click.option("--no-sqsh", is_flag=True, help="Do not publish the .sqsh.")
@click.option("--policy", metavar="NAME", default="default", show_default=True, help="What must hold (envs/policies/).")
@click.option("--trust", type=PathArgument(dir_okay=False), help="The keys that you trust; default: configured.")
@click.option(
    "--run-with",
    "run_with",
    multiple=True,
    metavar="[TARGET=]CMD",
    help="Runs a plan where the GPUs are: 'sbatch --wait run.sh {plan} {image}'. Without TARGET: for all with GPUs.",
)
@click.option("--retry", is_flag=True, help="Run again what failed before, though nothing changed.")
@click.option(
    "--bisect",
    metavar="MINUTES",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    help="Look for so long for what broke a target; 0: not at all.",
)
@click.option("--plan", is_flag=True, help="Print what would be done, and do nothing.")
@state_option
@key_options
@out_dir_option
@output_options
def command(session: Session, **values: Any) -> None:
    """Lock, build, certify and publish what is new, for each target by itself; end with the state of each.

    What was done is not done again, also after a kill. A failure is tried twice. One night of a stack runs at a time.
    Exit code: that of the first failure; 8: a plan waits for hardware; 14: an image is older than the policy allows.
    """
    arguments = Arguments(**values)
    request = _request(session, arguments)
    publishing = _publishing(session, arguments, request)
    if arguments.plan:
        planned = plan_night(request, publishing, session.context)
        session.done({"plan": [step.as_json() for step in planned]}, *[step.line() for step in planned])
        return
    places = NightPlaces(
        ledger=session.ledger_file,
        locks=session.site.state_dir,
        shared=shared_state(session, arguments.state),
        max_age_days=session.catalog.policy(arguments.policy).max_age_days,
        bisect_seconds=arguments.bisect * 60,
    )
    night, steps, states = run_night(request, publishing, places, session.context)
    session.done(
        {
            "night": night.model_dump(mode="json"),
            "steps": [step.model_dump(mode="json") for step in steps],
            "targets": [state.as_json() for state in states],
        },
        *_lines(night, steps, states),
    )
    code = night.exit_code or (StaleImageError.exit_code if any(state.state == "stale" for state in states) else 0)
    if code:
        # Without an error: the record of a night that failed is its result.
        raise click.exceptions.Exit(code)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    stack: str
    targets: tuple[str, ...]
    base: str | None
    name: str | None
    to: str | None
    sqsh_to: str | None
    no_sqsh: bool
    policy: str
    trust: Path | None
    run_with: tuple[str, ...]
    retry: bool
    bisect: float
    plan: bool
    state: str | None
    key: str | None
    key_password: str | None
    out_dir: Path


def _request(session: Session, arguments: Arguments) -> NightRequest:
    stack = session.catalog.stack(arguments.stack)
    targets = arguments.targets or tuple(entry.target for entry in stack.builds)
    return NightRequest(
        selections=tuple(session.select(arguments.stack, target, arguments.base) for target in targets),
        base_named=arguments.base is not None,
        project=session.project,
        out_dir=arguments.out_dir,
        lock_name=arguments.name,
        signer=signer_of(session, arguments.key, arguments.key_password),
        run_with=parse_run_with(arguments.run_with, targets),
        retry=arguments.retry,
        remotes=session.remotes(),
    )


def _publishing(session: Session, arguments: Arguments, request: NightRequest) -> PublishStep | None:
    if arguments.to is None:
        if arguments.sqsh_to is not None:
            raise UsageError(
                "--sqsh-to has no effect without --to",
                why="What is published is found by the registry's index.",
                fix="Name the registry too: --to REGISTRY/REPO.",
            )
        return None
    refuse_place_of_no_sqsh(arguments.no_sqsh, arguments.sqsh_to)
    trust = trust_of(session, arguments.trust)
    # Before hours of work: the gate would refuse what comes of them.
    for missing, option, setting in ((request.signer, "--key", "key"), (trust, "--trust", "trust")):
        if missing is None:
            raise UsageError(
                f"--to needs {option}",
                why="Only certificates that are signed by a trusted key are published.",
                fix=f"Name it: {option} FILE, or signing.{setting} of the configuration.",
            )
    return PublishStep(
        to=arguments.to,
        sqsh_to=arguments.sqsh_to,
        sqsh=not arguments.no_sqsh,
        signer=request.signer,
        policy=session.catalog.policy(arguments.policy),
        trust=trust,
    )


def _lines(night: NightRow, steps: Sequence[StepRow], states: Sequence[TargetState]) -> list[str]:
    """For people: what each step did, what moved, and the state of each target."""
    lines = [f"{step.target or step.base:<10} {step.name:<8} {step.state:<8} {_note(step)}" for step in steps]
    lines += [f"moved: {item.package} {item.before or '-'} -> {item.after or '-'}" for item in night.moved[:20]]
    lines += [f"... and {len(night.moved) - 20} more packages"] if len(night.moved) > 20 else []
    return [*lines, *[state.line() for state in states if state.target in night.targets]]


def _note(step: StepRow) -> str:
    words = [f"{step.seconds:.1f} s"]
    words += [f"{step.bytes_sent / 1e6:.1f} MB sent"] if step.bytes_sent else []
    words += [f"{step.error.fault}: {step.error.what}"] if step.error else []
    words += [step.note] if step.note else []
    words += [f"run the plan in {step.plan}: see its README.md"] if step.plan else []
    return ", ".join(words)
