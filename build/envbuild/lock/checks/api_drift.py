"""The API check of a lock: components that call others, held to the very versions that were locked.

Reads sources, imports nothing. See :mod:`envbuild.drift`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from envbuild import drift
from envbuild.core.background import run_in_background
from envbuild.core.digests import canonical_json, digest_of, digest_of_code
from envbuild.core.errors import EnvbuildError
from envbuild.core.files import machine_errors
from envbuild.drift import Comparison, Finding, Moment, Pair, Weight, find_drift_apart, read_finding, write_wheel
from envbuild.drift.sources import extensions_of
from envbuild.lock.checks.findings import CheckFinding
from envbuild.lock.components.distributions import is_brought
from envbuild.lock.components.downloads import base_tags, fetch_file, tags_of
from envbuild.lock.components.models import Chosen
from envbuild.lock.components.tree import Tree, tree_of
from envbuild.lock.context import LockContext
from envbuild.lock.project.pyproject import Project
from envbuild.lock.uv_lock import LockedFile, Packages

CODE = "api-drift"


# Findings are kept by what was read and by the code that read it: reading NeMo's sources and four sdists took 4.7 of
# the 9 s of a lock with warm caches.
KIND = "drift"
FILE = "findings.json"


def check_api(project: Project, packages: Packages, context: LockContext) -> Iterator[CheckFinding]:
    """What components ask of the components they use, and do not get.

    A component from git is read at its commit; one from the index that has no wheel is not checked, which is reported.

    Args:
        packages: the ``[[package]]`` tables of uv.lock by name.
    """
    comparisons = _Comparisons(project, packages, context)
    locked = {*packages, *project.base.provides}
    for name, component in project.chosen.items():
        for used in component.spec.uses:
            with context.reporter.step(f"check what {name} asks of {used}"):
                if unread := comparisons.unread((name, used)):
                    context.reporter.note(f"  not checked: {' and '.join(unread)} cannot be read without being built")
                    continue
                findings = comparisons.findings((name, used))
                theirs = _upstreams_own(findings, (name, used), project, packages, context)
            for finding in findings:
                if finding.weight is not Weight.PASSES:
                    absent = [module for module in finding.optional if not is_brought(module, locked)]
                    harmless = _harmless(finding, name, project.chosen.get(used), absent)
                    if not harmless and _place(finding) in theirs:
                        harmless = f"the commit of {used} that upstream pins lacks it, too"
                    yield _check_finding(finding, name, used, harmless)


def _harmless(finding: Finding, consumer: str, provider: Chosen | None, absent: Sequence[str]) -> str:
    """Why a finding only warns; empty where it refuses."""
    if finding.weight is Weight.WARNS:
        return finding.reason
    if absent:
        return f"runs only with {absent[0]}, which no package of the lock brings"
    # Megatron-Bridge of January 2026 calls get_pipeline_model_parallel_decoder_start for models with an
    # encoder, which the Megatron-LM of its submodule does not have. Another commit would be worse tested, not better.
    if provider is not None and provider.pinned_by == consumer and finding.at is Moment.FUNCTION:
        return f"upstream's own: {consumer} pins this commit of {provider.name}"
    return ""


def _upstreams_own(
    findings: Sequence[Finding], pair: Pair, project: Project, packages: Packages, context: LockContext
) -> set[tuple[str, ...]]:
    """The places of findings that there are with the commit, too, in whose place upstream's pin has a release.

    NeMo of April 2025 pins a Transformer Engine without the Float8CurrentScaling that its Megatron-LM calls for one
    kind of FP8. What fails when it is imported counts all the same: it would keep the stack from starting.
    """
    provider = project.chosen[pair[1]]
    called = [finding for finding in findings if finding.weight is Weight.REFUSES and finding.at is Moment.FUNCTION]
    if not called or provider.release_of is None:
        return set()
    git, commit = provider.release_of
    pinned = replace(project, chosen={**project.chosen, pair[1]: replace(provider, git=git, commit=commit)})
    findings = _Comparisons(pinned, packages, context).findings(pair)
    return {_place(finding) for finding in findings if finding.at is Moment.FUNCTION}


def _place(finding: Finding) -> tuple[str, ...]:
    return finding.file, str(finding.line), finding.name


def _check_finding(finding: Finding, consumer: str, provider: str, harmless: str) -> CheckFinding:
    what = f"{finding.consumer}, {finding.file}:{finding.line}: {finding.detail}"
    return CheckFinding(
        code=CODE,
        what=f"{what} ({harmless})" if harmless else what,
        fix=f"Choose another version of {provider} or {consumer}; if the stack is not for that part of {consumer}, "
        "name its file or folder under unused.",
        # Upstream pins what a branch uses: the provider is what may be taken in another version.
        packages=(provider, consumer),
        warning=bool(harmless),
        subject=f"{consumer} {finding.file} {finding.name}",
    )


@contextlib.contextmanager
def reading_ahead(project: Project, files: Future[Packages], context: LockContext) -> Iterator[Future[None]]:
    """Compare, while the block runs, commits, and the releases that the lock takes unless something holds them back.

    A resolution waits for the index most of the time. :func:`check_api` then finds the answer in the store. Where this
    fails or guesses wrong, only its work is lost.

    Args:
        files: the ``[[package]]`` tables of those releases by name.
    """
    # NeMo and Megatron-LM at commits, compared only after the resolution: 15 s more, 54 s on a busy machine.
    quiet = context.quiet()

    def read() -> None:
        with contextlib.suppress(EnvbuildError):
            comparisons = _Comparisons(project, files.result(), quiet)
            for pair in comparisons.pairs:
                comparisons.findings(pair)

    reading = run_in_background(read)
    try:
        yield reading
    finally:
        reading.stop()


class _Sources:
    """The sources of a lock's components, as far as they can be read.

    In a wheel that the base can install, or in the repository at the component's commit.
    """

    def __init__(self, project: Project, packages: Packages, context: LockContext) -> None:
        self._chosen = project.chosen
        self._packages = packages
        self._tags = base_tags(project.base)
        self._context = context

    def has(self, name: str) -> bool:
        """Whether there is something to read."""
        return self._tree(name) is not None or self._wheel(name) is not None

    def identity(self, name: str) -> str:
        """What names the content: the wheel's hash, the commit; empty when only its bytes could tell."""
        if (tree := self._tree(name)) is not None:
            # The modules as well: of a commit, only the files of the packages that they are in are read.
            return f"{tree.commit.sha} {' '.join(sorted(tree.component.spec.modules))}"
        return wheel.digest if (wheel := self._wheel(name)) is not None else ""

    def wheels(self, names: Sequence[str]) -> dict[str, Path]:
        """A wheel with the sources of each of the components, all of which :meth:`has`."""
        of_trees = {name: self._of_tree(tree) for name in names if (tree := self._tree(name)) is not None}
        others = {name: wheel for name in names if name not in of_trees and (wheel := self._wheel(name)) is not None}
        # ThreadPoolExecutor(0) is a ValueError.
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            downloaded = pool.map(self._downloaded, others.keys(), others.values())
            return of_trees | dict(zip(others, downloaded, strict=True))

    def _tree(self, name: str) -> Tree | None:
        component = self._chosen.get(name)
        return tree_of(component, self._context.repositories) if component is not None else None

    def _wheel(self, name: str) -> LockedFile | None:
        """The wheel of a package; None when it has none for the base."""
        wheels = self._packages[name].wheels if name in self._packages else ()
        return next((wheel for wheel in wheels if tags_of(wheel.name) & self._tags), None)

    def _downloaded(self, name: str, wheel: LockedFile) -> Path:
        content, _ = fetch_file(wheel, self._packages[name].title, self._context)
        path = self._context.folder / wheel.name
        with machine_errors(path):
            path.write_bytes(content)
        return path

    def _of_tree(self, tree: Tree) -> Path:
        """The Python files of the packages that a component's modules are in."""
        component, repository, commit = tree.component, tree.repository, tree.commit
        inside = tuple(f"{'/'.join(module.split('.'))}/" for module in component.spec.modules)
        files = [
            file
            for file in repository.list_tree(commit, recursive=True)
            # Some trees have their packages below src/.
            if file.endswith(".py") and (not inside or file.removeprefix("src/").startswith(inside))
        ]
        texts = repository.read_files(commit, files)
        content = {file: text.encode() for file, text in texts.items() if text is not None}
        setup = repository.read_file(commit, "setup.py") or ""
        # A compiled module has no source at the commit: an empty file in its place keeps its import from being a
        # finding.
        content |= {f"{module.replace('.', '/')}.so": b"" for module in extensions_of(setup)}
        path = Path(self._context.folder) / f"{component.name}-{commit.sha}.whl"
        with machine_errors(path):
            write_wheel(path, component.name, commit.sha[:12], content)
        return path


class _Comparisons:
    """What drift there is between components and those that they use, read once for each pair of contents.

    What is not known yet is read together.

    Attributes:
        pairs: those of which there is something to read.
    """

    def __init__(self, project: Project, packages: Packages, context: LockContext) -> None:
        self._sources = _Sources(project, packages, context)
        self._chosen = project.chosen
        self._context = context
        self._read: dict[Pair, list[Finding]] = {}
        pairs = ((name, used) for name, component in self._chosen.items() for used in component.spec.uses)
        self.pairs = [pair for pair in pairs if not self.unread(pair)]

    def unread(self, pair: Pair) -> list[str]:
        """Those of a pair that have nothing to read."""
        return [name for name in pair if not self._sources.has(name)]

    def findings(self, pair: Pair) -> list[Finding]:
        """The findings of a consumer and a provider."""
        key = self._key(pair)
        if key is None:
            return self._compared(pair)

        def compare(entry: Path) -> None:
            (entry / FILE).write_bytes(canonical_json([asdict(finding) for finding in self._compared(pair)]))

        entry = self._context.store.get_or_build(KIND, key, compare).path
        return [read_finding(fields) for fields in json.loads((entry / FILE).read_bytes())]

    def _comparison(self, pairs: Sequence[Pair]) -> Comparison:
        users = {consumer: self._users(consumer) for consumer, _ in pairs}
        # One that cannot be read may use anything: then its users say nothing of what is reached.
        users = {name: using if all(map(self._sources.has, using)) else () for name, using in users.items()}
        modules = {
            name: self._chosen[name].spec.modules if users[consumer] or not self._users(consumer) else ()
            for consumer in users
            for name in (consumer, *users[consumer])
        }
        unused = {name: self._chosen[name].spec.unused for name in users}
        return Comparison(pairs=pairs, modules=modules, users=users, unused=unused)

    def _users(self, name: str) -> tuple[str, ...]:
        """The components that use one, directly or through others."""
        by_name: dict[str, None] = {}
        waiting = [name]
        while waiting:
            used = waiting.pop()
            users = [
                user for user, component in self._chosen.items() if used in component.spec.uses and user not in by_name
            ]
            by_name |= dict.fromkeys(users)
            waiting += users
        return tuple(by_name)

    def _key(self, pair: Pair) -> str | None:
        comparison = self._comparison([pair])
        identities = {name: self._sources.identity(name) for name in comparison.names}
        if not all(identities.values()):
            return None
        return digest_of({"sources": {**identities}, "code": _code_digest(), "compared": asdict(comparison)})

    def _compared(self, pair: Pair) -> list[Finding]:
        if pair not in self._read:
            unknown = self._comparison([other for other in self.pairs if other == pair or not self._is_kept(other)])
            self._read |= find_drift_apart(self._sources.wheels(unknown.names), unknown, self._context.folder)
        return self._read[pair]

    def _is_kept(self, pair: Pair) -> bool:
        key = self._key(pair)
        return key is not None and self._context.store.find(KIND, key) is not None


@cache
def _code_digest() -> str:
    """The digest of the check itself: another way of reading finds other things."""
    return digest_of_code(Path(drift.__file__).parent)
