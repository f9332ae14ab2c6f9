"""Describes a certificate in text, for the console and the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from envbuild.catalog.fields import TomlModel
from envbuild.certify.certificate.statement import Certificate, Measured, Predicate
from envbuild.certify.fields.account import FieldAccount
from envbuild.certify.models import CaseVerdict, NotVouched, Numbers, ReferenceNumbers, ReferenceVerdict, Spread
from envbuild.core.text import printable
from envbuild_smoke.results import Gpu

COLUMNS = ("case", "repeat", "loss", "grad norm", "weights", "gradients")


def lines(statement: Certificate, keyid: str | None) -> list[str]:
    """A summary: what, where, when, the signature that it names, and every case."""
    predicate, measured = statement.predicate, statement.predicate.measured
    signed = f"names key {keyid}" if keyid else "NOT SIGNED: it proves nothing about who measured it"
    whole = "the whole matrix" if predicate.whole_matrix else "a PART of the matrix"
    matrix = describe_matrix(predicate)
    facts = [
        ("signature", f"{signed} (not verified here: envbuild certificate verify)"),
        ("stack", f"{predicate.stack} on {predicate.base}, target {predicate.target}"),
        *((name, digest) for name, digest in statement.digests().items()),
        ("lock", predicate.lock_digest + ("" if predicate.lock_is_current else " (older than its stack or base)")),
        ("ran in", f"{predicate.place}" + (f" ({predicate.runtime})" if predicate.runtime else "")),
        ("measured", f"{measured.started_at} to {measured.finished_at}; issued {predicate.issued_at}"),
        ("matrix", f"{matrix}, {whole}: {count(predicate.cases)}"),
        ("defined as", predicate.matrix_digest),
        *machine_facts(measured),
        *((f"node {row.node}", _describe_node(row)) for row in node_rows(measured)),
        ("envbuild", f"{predicate.envbuild}, judge {predicate.judge}"),
        ("smoke", f"{measured.smoke.version}, {measured.smoke.digest}"),
        ("plan", f"{predicate.plan_digest}, nonce {predicate.nonce}"),
    ]
    width = max(len(name) for name, _ in facts)
    # Names and messages come from where the cases ran: as control characters they could repaint the terminal.
    text = [*(f"{name:<{width}}  {text}" for name, text in facts), "", *_table(predicate.cases)]
    baselines = [case for case in predicate.cases if case.baseline is None]
    # Of those that all nodes run, one measures.
    baselines = [case for case in baselines if case.spread is not None] or baselines
    text += [f"not vouched for: {describe_not_vouched(entry)}" for entry in predicate.not_vouched]
    if predicate.fields is not None:
        text += ["", *describe_fields(predicate.fields)]
    text += ["", *(f"{case.id} and the reference: {describe_reference(case.reference)}" for case in baselines)]
    text += ["", *(f"{case.id} with its weights moved: {describe_spread(case.spread)}" for case in baselines)]
    return [printable(line) for line in text]


def describe_matrix(predicate: Predicate) -> str:
    """The name of its matrix, and that it is the project's own where envbuild does not ship it."""
    own = "" if predicate.matrix_is_shipped else "a matrix of the project's own under the name "
    return own + predicate.matrix


def count(cases: Sequence[CaseVerdict]) -> str:
    """``1 case``, ``2 cases``."""
    return f"{len(cases)} case{'s' if len(cases) != 1 else ''}"


@dataclass(frozen=True)
class NodeRow:
    """A node of a run as people read it."""

    node: int
    host: str
    gpus: str
    driver: str
    image: str | None


def node_rows(measured: Measured) -> list[NodeRow]:
    """A row for each node of a run over several; the machine's facts have all of one."""
    nodes = measured.nodes if len(measured.nodes) > 1 else ()
    return [NodeRow(node.node, node.host, _kinds(node.gpus), _drivers(node.gpus), node.image) for node in nodes]


def _describe_node(row: NodeRow) -> str:
    return ", ".join(filter(None, (row.host, row.gpus, row.driver and f"driver {row.driver}", row.image)))


def _drivers(gpus: Iterable[Gpu]) -> str:
    return ", ".join(sorted({gpu.driver for gpu in gpus}))


def describe_gpus(measured: Measured) -> str:
    """How many of which kind."""
    return _kinds(measured.machine.gpus if measured.machine else ())


def _kinds(gpus: Iterable[Gpu]) -> str:
    names = [gpu.name for gpu in gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"


def machine_facts(measured: Measured) -> list[tuple[str, str]]:
    """The machine and what it moved, as far as the runner reported."""
    facts = []
    if machine := measured.machine:
        facts.append(("machine", f"{machine.cpu_model or 'CPU'}, {machine.cpu_count} CPUs; {describe_gpus(measured)}"))
        versions = (("driver", _drivers(machine.gpus)), ("CUDA", machine.cuda), ("NCCL", machine.nccl))
        if software := ", ".join(f"{name} {version}" for name, version in versions if version):
            facts.append(("software", software))
    if measured.bandwidth and measured.bandwidth.points:
        best = max(point.bus_gigabytes_per_second for point in measured.bandwidth.points)
        facts.append(("all_reduce", f"up to {best:.1f} GB/s bus bandwidth, {measured.bandwidth.ranks} ranks"))
    return facts


def _table(cases: Iterable[CaseVerdict]) -> list[str]:
    rows = [COLUMNS, *(_row(case) for case in cases)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(case: CaseVerdict) -> tuple[str, ...]:
    if case.baseline is None:
        numbers = ["baseline", *[""] * (len(Numbers.model_fields) - 1)]
    else:
        numbers = [difference(case.largest_relative_difference, case.tolerance, name) for name in Numbers.model_fields]
    return (case.id, str(case.repeat), *numbers)


def describe_spread(spread: Spread | None) -> str:
    """What moved weights did to a baseline: ``4 times, loss 3e-08, ...``, and which error in a gradient is caught."""
    if spread is None:
        return "not measured"
    weights = math.inf if spread.weights is None else spread.weights
    numbers = f"loss {spread.loss[-1]:.1e}, grad norm {spread.grad_norm[-1]:.1e}, weights {weights:.1e}"
    caught = f"; in half of the tensors a gradient's norm off by {spread.caught:.1e} is caught" if spread.caught else ""
    return f"{spread.runs} times, {numbers}{caught}"


def describe_reference(reference: ReferenceVerdict | None) -> str:
    """How a baseline compares with the reference: ``loss 3e-08 of 1e-06, ...``, or why it was not compared."""
    if reference is None:
        return "not compared"
    if reference.not_compared:
        return f"not compared: {reference.not_compared}"
    off, allowed = reference.largest_relative_difference, reference.tolerance
    numbers = (f"{name.replace('_', ' ')} {difference(off, allowed, name)}" for name in ReferenceNumbers.model_fields)
    return ", ".join(numbers)


def describe_not_vouched(entry: NotVouched) -> str:
    """What trains wrongly, with which versions and what to do, and how the matrix's cases of it ended."""
    cases = "; ".join(f"{case.id} {case.result}" for case in entry.cases)
    own = " (the project's own entry)" if entry.is_shipped is False else ""
    return f"{entry.what}: {entry.why} ({entry.versions}). {entry.fix}" + (f" Cases: {cases}" if cases else "") + own


def describe_fields(account: FieldAccount | None) -> list[str]:
    """How the library's configuration is accounted for: how many fields of each kind, and the names of the blind."""
    if account is None:
        return []
    kinds = ", ".join(f"{len(getattr(account, name))} {name.replace('_', ' ')}" for name in FieldAccount.model_fields)
    lines = [f"{account.count} fields of the library's configuration: {kinds}"]
    sections: dict[str, list[str]] = {}
    for field in account.blind:
        section, _, name = field.partition(".")
        sections.setdefault(section, []).append(name)
    return lines + [f"blind in {section}: {', '.join(names)}" for section, names in sections.items()]


def projects_own(entries: Iterable[NotVouched]) -> list[str]:
    """The names of a project's own entries that took cases away, or would excuse them."""
    return [entry.name for entry in entries if entry.is_shipped is False and entry.cases]


def difference(off: TomlModel, allowed: TomlModel, name: str) -> str:
    """``1.2e-07 of 1e-05``: how far off, and how far was allowed."""
    value, limit = getattr(off, name), getattr(allowed, name)
    if value is None:
        return "-"
    return f"{value:.1e}" + (f" of {limit:.2g}" if limit is not None else "")
