"""``envbuild certify``."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.catalog.catalog import Selection
from envbuild.certify.certificates.signing import UNSIGNED
from envbuild.certify.certifying import certify, chosen_cases, driver_of
from envbuild.cli.command import Command
from envbuild.cli.common import Session, name_option, out_dir_option, output_options, selection_options, shown
from envbuild.cli.signing import key_options, signer_of
from envbuild.core.digests import short
from envbuild.image.outputs import find_image
from envbuild.launch.local import RUNTIMES
from envbuild.lock.locking import find_lock


@click.command("certify", cls=Command)
@selection_options
@name_option
@click.option("--matrix", metavar="NAME", help="The cases; default: the stack's own matrix.")
@click.option("--only", metavar="ID", multiple=True, help="Run this case (and its baseline); may be repeated.")
@click.option("--print-cases", is_flag=True, help="Print the cases and run nothing.")
@click.option("--runtime", type=click.Choice(list(RUNTIMES)), help="How the .sqsh is opened; default: the best here.")
@click.option("--fresh", is_flag=True, help="Run even if a certificate for exactly this is there.")
@key_options
@out_dir_option
@output_options
def command(
    session: Session,
    stack: str,
    base: str | None,
    target: str | None,
    name: str | None,
    matrix: str | None,
    only: tuple[str, ...],
    print_cases: bool,
    runtime: str | None,
    fresh: bool,
    key: str | None,
    key_password: str | None,
    out_dir: Path,
) -> None:
    """Train inside the image in every parallel layout; pass only if each reproduces the one-process baseline.

    Loss and gradient norm of every step must agree with the baseline's within the matrix's tolerance. The network
    is off. A certificate is written when every case passes.
    """
    selection = session.select(stack, target, base)
    matrix_name = matrix or selection.stack.matrix
    if print_cases:
        _print_cases(session, selection, matrix_name, only)
        return
    driver_of(selection)
    signer = signer_of(session, key, key_password)
    lock = find_lock(session.project, selection, name)
    driver_of(selection, lock.lock)
    image = find_image(out_dir, selection.stack_name, selection.base_name, selection.target_name, name)
    result = certify(
        selection,
        lock=lock,
        image=image,
        matrix_name=matrix_name,
        only=only,
        out_dir=out_dir,
        store=session.store,
        reporter=session.reporter,
        runtime_name=runtime,
        fresh=fresh,
        signer=signer,
    )
    predicate = result.statement.predicate
    state = "certified" if result.ran else "nothing to do: already certified"
    session.done(
        {
            "ran": result.ran,
            "certificate": str(result.certificate.resolve()),
            "key": predicate.key,
            "signed": result.keyid is not None,
            "keyid": result.keyid,
            "lock_is_current": result.lock_is_current,
            "not_counted": result.not_counted or None,
            "cases": result.statement.cases_json(),
        },
        f"{state}: {len(predicate.cases)} cases agree with their baseline, key {short(predicate.key)}",
        f"signed by key {result.keyid}" if result.keyid else UNSIGNED,
        shown(result.certificate),
    )


def _print_cases(session: Session, selection: Selection, matrix_name: str, only: tuple[str, ...]) -> None:
    matrix = selection.catalog.matrix(matrix_name)
    cases = chosen_cases(matrix, matrix_name, selection, only)
    width = max(len(case.id) for case in cases)
    session.done(
        {
            "matrix": matrix_name,
            "cases": [
                {
                    "id": case.id,
                    "processes": case.layout.world_size,
                    "baseline": None if case.is_baseline else case.baseline_id,
                }
                for case in cases
            ],
        },
        *[
            f"{case.id:<{width}}  {case.layout.world_size} process{'es' if case.layout.world_size > 1 else ''}"
            for case in cases
        ],
    )
