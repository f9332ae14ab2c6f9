"""The drift check: everything in one distribution that another, at its locked version, does not have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from envbuild.drift.classes import Classes
from envbuild.drift.findings import Finding, FindingKind, Moment, Severity, Weight
from envbuild.drift.module_index import Patches, Tables, patches_of
from envbuild.drift.reach import Reach, StackPart
from envbuild.drift.sources import SourceTree
from envbuild.drift.symbols import ClassSymbol, ModuleSymbol, Reader, full_name
from envbuild.drift.walker import Walker, failed_imports

# Parts of a distribution that training does not run.
_LEFT_OUT = frozenset({"tests", "test", "examples", "scripts"})


def find_drift(
    consumer: SourceTree, provider: SourceTree, reach: Reach | None = None, unused: Sequence[str] = ()
) -> list[Finding]:
    """Compare what ``consumer`` imports and calls with what ``provider`` has, by reading both.

    Args:
        reach: of the consumer; without it, all of its modules may be imported.
        unused: files and folders of the consumer that are left out.

    Returns:
        The findings by file and line. Only those whose weight is ``REFUSES`` are a reason to refuse.
    """
    findings = _weighed(_compare(consumer, provider, unused), consumer, reach or Reach([StackPart(consumer)]))
    # The same order on every machine: findings are kept in the store.
    findings.sort(key=lambda finding: (finding.file, finding.line))
    return findings


def _weighed(findings: Sequence[Finding], consumer: SourceTree, reach: Reach) -> list[Finding]:
    """The findings, those that count with what keeps the stack from reaching them."""
    modules = {file: module for module, file in consumer.modules.items()}
    # Megatron-Core's experts.py imports an operation under `try` in one method, and calls it in another.
    provided_for = {_asked_in(finding) for finding in findings if finding.severity is Severity.GUARDED}

    def obstacle(finding: Finding) -> str:
        if finding.within and _asked_in(finding) in provided_for:
            return f"{finding.within.partition('.')[0]} tests elsewhere whether it is there"
        # Class bodies run while their module is imported, whether anything names the class or not.
        within = finding.within if finding.at is Moment.FUNCTION else ""
        return reach.obstacle(modules[finding.file], within)

    return [
        replace(finding, unreached=obstacle(finding)) if finding.weight is Weight.REFUSES else finding
        for finding in findings
    ]


def _asked_in(finding: Finding) -> tuple[str, str, str]:
    """What is missing, and the outermost class or function that asks for it."""
    return finding.name, finding.file, finding.within.partition(".")[0]


def _compare(consumer: SourceTree, provider: SourceTree, unused: Sequence[str]) -> list[Finding]:
    tables = Tables(consumer, provider)
    reader = Reader(tables)
    # All of them before anything is looked up: a table and the syntax that is walked have to be of one reading.
    read = [
        module_table
        for module in _modules_to_walk(tables, unused)
        if (module_table := tables.with_syntax(module)) is not None
    ]
    _note_patches(reader, [patches_of(table, tree) for table, tree in read])
    for table, tree in read:
        reader.lost.update((table.name, name) for name in failed_imports(reader, table, tree.body))
    # What was looked up to find the failing imports was judged as if they worked.
    reader.forget()
    classes = Classes(reader)
    findings: list[Finding] = []
    read.reverse()
    while read:
        # Trees are what takes memory: each goes when it has been walked.
        table, tree = read.pop()
        findings.extend(Walker(reader, classes, table).walk(tree, table.scope))
    findings.extend(_not_read(tables))
    return findings


def _modules_to_walk(tables: Tables, unused: Sequence[str]) -> list[str]:
    """The consumer's modules that name a package of the provider."""
    folders = tuple(f"{part.rstrip('/')}/" for part in unused)
    # A consumer that uses the provider names its outermost package: `megatron`, also for `megatron.core`.
    words = [word.encode() for word in sorted({root.partition(".")[0] for root in tables.provider.roots})]
    named = re.compile(b"|".join(rb"\b" + re.escape(word) + rb"\b" for word in words))

    def names_it(text: bytes) -> bool:
        # Looking for a text is far quicker than for a pattern, and most files have none of them.
        return any(word in text for word in words) and named.search(text) is not None

    return sorted(
        module
        for module, file in tables.consumer.modules.items()
        if not _LEFT_OUT.intersection(file.split("/")[:-1])
        # Not read at all: what stack nemo lists is a third of the comparison for NeMo's main.
        and not f"{file}/".startswith(folders)
        and names_it(tables.consumer.files[file])
    )


def _note_patches(reader: Reader, modules: Sequence[Patches]) -> None:
    """What the consumer sets on modules and classes from outside is no longer what the provider defines."""
    for module in modules:
        reader.replaced.update(module.replaced)
        for patch in module.patches:
            for symbol in reader.evaluate(patch.target, module.scope):
                if isinstance(symbol, ModuleSymbol):
                    reader.patched.add((symbol.name, patch.name))
                elif isinstance(symbol, ClassSymbol):
                    reader.patched.add((full_name(symbol.definition), patch.name))
    # Some names were looked up to find out what is patched, before the patches were known.
    reader.forget()


def _not_read(tables: Tables) -> list[Finding]:
    """Files that this Python cannot parse are not checked, and that is said."""
    return [
        Finding(
            kind=FindingKind.NOT_READ,
            consumer=tables.consumer.title,
            provider=tables.provider.title,
            file=tables.file_of(module) or module,
            line=1,
            name=module,
            detail=f"{module} cannot be parsed: {reason}",
            severity=Severity.GUARDED,
            why="what cannot be read is not checked",
            at=Moment.IMPORT,
        )
        for module, reason in sorted(tables.unreadable.items())
    ]
