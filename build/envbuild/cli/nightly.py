"""``envbuild nightly``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.cli.common import DEFAULT_STACK, Session, as_command, lock_name, out_dir
from envbuild.cli.ledger import shared_state, state_place
from envbuild.cli.options import flag, include, no_effect, option, parse_list
from envbuild.cli.publishing import SqshOptions, policy_name
from envbuild.cli.signing import KeyOptions, signer_of, trust_file, trust_of
from envbuild.core.errors import StaleImageError, UsageError
from envbuild.launch.launchers import ON_CLUSTER
from envbuild.ledger.models import NightRow, StepRow
from envbuild.nightly.hardware import parse_on, parse_run_with
from envbuild.nightly.models import NightCluster, NightRequest
from envbuild.nightly.plan import plan_night
from envbuild.nightly.run import NightPlaces, run_night
from envbuild.nightly.state import TargetState
from envbuild.publish.draft import Publishing


@dataclass(frozen=True, kw_only=True)
class Options:
    stack: str = option("--stack NAME", "The stack (`envbuild list stacks`).", default=DEFAULT_STACK)
    targets: tuple[str, ...] = option(
        "--targets LIST", "Targets, separated by commas; default: all of the stack.", convert=parse_list, default=""
    )
    base: str | None = option("--base NAME", "The base system; default: the stack's default for each target.")
    name: str | None = lock_name()
    to: str | None = option("--to REGISTRY/REPO", "The repository for certified images; default: do not publish.")
    sqsh: SqshOptions = include(SqshOptions)
    policy: str = policy_name()
    trust: Path | None = trust_file()
    run_with: tuple[str, ...] = option(
        "--run-with [TARGET=]CMD",
        "The command that runs a plan on GPUs: 'sbatch --wait run.sh {plan} {image}'. Without TARGET: for every target "
        "with GPUs.",
        multiple=True,
    )
    on: tuple[str, ...] = option(
        "--on [TARGET=]NAME",
        "The cluster with Slurm that certifies; without TARGET: every target with GPUs.",
        multiple=True,
    )
    nodes: int | None = option("--nodes N", "With --on: nodes of each job; default: 1.", type=click.IntRange(1, 1024))
    retry: bool = flag("--retry", "Repeat failed steps even if their inputs did not change.")
    bisect: float = option(
        "--bisect MINUTES",
        "Bisect failed targets for at most this long in total; 0: do not bisect.",
        type=click.FloatRange(min=0),
        default=30,
    )
    plan: bool = flag("--plan", "Print the steps; run none.")
    state: str | None = state_place()
    keys: KeyOptions = include(KeyOptions)
    out_dir: Path = out_dir()


@as_command("nightly", Options)
def command(session: Session, options: Options) -> None:
    """Lock, build, certify and publish what is new for each target; then print each target's state.

    Finished steps are not repeated, even after a kill. A failed step is tried twice. Only one run per stack
    runs at a time. Exit code: that of the first failure; 8: a plan waits for hardware; 14: an image is older than the
    policy allows.
    """
    request = _request(session, options)
    publishing = _publishing(session, options, request)
    if options.plan:
        planned = plan_night(request, publishing, session.context)
        session.done({"plan": [step.as_json() for step in planned]}, *[step.line() for step in planned])
        return
    places = NightPlaces(
        ledger=session.ledger_file,
        locks=session.site.state_dir,
        shared=shared_state(session, options.state),
        max_age_days=session.catalog.policy(options.policy).max_age_days,
        bisect_seconds=options.bisect * 60,
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


def _request(session: Session, options: Options) -> NightRequest:
    stack = session.catalog.stack(options.stack)
    targets = options.targets or tuple(entry.target for entry in stack.builds)
    return NightRequest(
        selections=tuple(session.select(options.stack, target, options.base) for target in targets),
        base_named=options.base is not None,
        project=session.project,
        out_dir=options.out_dir,
        lock_name=options.name,
        signer=signer_of(session, options.keys),
        run_with=parse_run_with(options.run_with, targets),
        on=_on(session, options, targets),
        retry=options.retry,
        remotes=session.remotes(),
    )


def _on(session: Session, options: Options, targets: tuple[str, ...]) -> dict[str, NightCluster]:
    if options.nodes is not None and not options.on:
        raise no_effect("--nodes", "without --on", "It is how many nodes of a cluster a job has.")
    on = parse_on(options.on, targets, options.nodes or 1)
    for where in on.values():
        # Read now: hours of work come before it.
        if session.catalog.cluster(where.name).launcher not in ON_CLUSTER:
            why = "It has no launcher: it is this machine."
            raise no_effect(f"--on {where.name}", "in a night", why, "Name a cluster with Slurm")
    return on


def _publishing(session: Session, options: Options, request: NightRequest) -> Publishing | None:
    if options.to is None:
        if options.sqsh.sqsh_to is not None:
            why = "Nothing is published without a registry, whose index names the .sqsh."
            raise no_effect("--sqsh-to", "without --to", why, "Name the registry too (--to REGISTRY/REPO)")
        return None
    options.sqsh.check()
    trust = trust_of(session, options.trust)
    # Before hours of work: the gate would refuse what comes of them.
    for missing, name, setting in ((request.signer, "--key", "key"), (trust, "--trust", "trust")):
        if missing is None:
            raise UsageError(
                f"--to needs {name}",
                why="Only certificates that are signed by a trusted key are published.",
                fix=f"Name it: {name} FILE, or signing.{setting} of the configuration.",
            )
    return Publishing(
        to=options.to,
        sqsh_to=options.sqsh.sqsh_to,
        sqsh=not options.sqsh.no_sqsh,
        signer=request.signer,
        policy=session.catalog.policy(options.policy),
        trust=trust,
    )


def _lines(night: NightRow, steps: Sequence[StepRow], states: Sequence[TargetState]) -> list[str]:
    """For people: what each step did, what moved, and the state of each target."""
    lines = [f"{step.target or step.base:<10} {step.name:<8} {step.state:<8} {_note(step)}" for step in steps]
    lines += [f"moved: {move.package} {move.before or '-'} -> {move.after or '-'}" for move in night.moved[:20]]
    lines += [f"... and {len(night.moved) - 20} more packages"] if len(night.moved) > 20 else []
    return [*lines, *[state.line() for state in states if state.target in night.targets]]


def _note(step: StepRow) -> str:
    words = [f"{step.seconds:.1f} s"]
    words += [f"{step.bytes_sent / 1e6:.1f} MB sent"] if step.bytes_sent else []
    words += [f"{step.error.fault}: {step.error.what}"] if step.error else []
    words += [step.note] if step.note else []
    words += [f"run the plan in {step.plan}: see its README.md"] if step.plan else []
    return ", ".join(words)
