"""Which release or commit each component of a stack is, and who said so."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from envbuild.catalog.base import Base
from envbuild.catalog.stack import Component, Stack
from envbuild.core.errors import ConfigurationError, NetworkError
from envbuild.git.refs import Commit, GitRef
from envbuild.git.repository import GitRepository
from envbuild.lock.components.models import Chosen, Companion, DecidedBy, Forced, Lead
from envbuild.lock.components.preferences import script_companions
from envbuild.lock.components.tree import Tree, tree_of, trees_of
from envbuild.lock.components.upstream import OVERRIDES, companions, holds_on, overrides, sources
from envbuild.lock.context import Repositories
from envbuild.lock.inputs.as_of import Bound
from envbuild.lock.inputs.pins import Ref, ref_text
from envbuild.lock.models import Deviation


@dataclass(frozen=True, kw_only=True)
class Chooser:
    """Decides components: a pin wins; then what the stack says; then what belongs to the leads.

    Attributes:
        as_of: branches mean their commits of then.
        base: for whose platform and Python pins must be meant.
    """

    pins: Mapping[str, Ref]
    as_of: Bound
    base: Base
    repositories: Repositories

    def anchor(self, stack: Stack) -> Chosen | None:
        """The stack's anchor; None when the stack has none."""
        return None if stack.anchor is None else self.own_choice(stack.anchor, stack.components[stack.anchor])

    def own_choice(self, name: str, spec: Component) -> Chosen:
        """A component by what the user and the stack say of it."""
        pin = self.pins.get(name)
        origin, because = (
            (DecidedBy.PIN, "pinned by the user") if pin is not None else (DecidedBy.STACK, "the stack's file")
        )
        ref: Ref | None = pin if pin is not None else (GitRef(spec.ref) if spec.ref else None)
        asked = ref_text(ref) if ref is not None else spec.version or "any release"
        bare = Chosen(name=name, spec=spec, asked=asked, origin=origin, because=because)
        if isinstance(ref, GitRef) and spec.git is not None:
            commit = self.repositories.open(spec.git).resolve(ref, self.as_of)
            return replace(bare, git=spec.git, commit=commit)
        if ref is None or isinstance(ref, GitRef):
            return replace(bare, specifier=spec.version)
        return replace(bare, specifier=ref.specifier)

    def components(self, stack: Stack, leads: Sequence[Lead]) -> dict[str, Chosen]:
        """Every component.

        What the leads say nothing of, a component from git before it in the stack may, which uses it (Megatron-LM pins
        a Transformer Engine).

        Args:
            leads: components that are decided already. The first leads: what it, and then what belongs to it says of a
                companion, wins over the others.
        """
        decided = {lead.chosen.name: lead.chosen for lead in leads}
        chosen: dict[str, Chosen] = {}
        for name, spec in stack.components.items():
            if name in decided:
                # A takeover may want other extras and modules of it; which release or commit it is, is decided.
                chosen[name] = replace(decided[name], spec=spec)
                continue
            if name not in self.pins and not spec.version and spec.ref is None:
                others = (self._sources(other) for other in chosen.values() if other.name not in decided)
                # An anchor that no longer leads comes last: NeMo 3.0 has the Transformer Engine of its speech models.
                order = itertools.chain(leads[:1], others, leads[1:])
                if (lead := next((lead for lead in order if name in lead.companions), None)) is not None:
                    chosen[name] = self._companion(name, spec, lead)
                    continue
            chosen[name] = self.own_choice(name, spec)
        return chosen

    def _sources(self, chosen: Chosen) -> Lead:
        """A decided component, and the commits that its own pyproject.toml takes those from whose API it calls.

        What else it takes from git belongs to its authors' own builds.
        """
        tree = tree_of(chosen, self.repositories)
        if tree is None:
            return Lead(chosen=chosen, companions={})
        pinned = sources(tree)
        # A repository may hold several packages: with the one, its others.
        places = {(source.git, source.ref) for source in pinned if source.package in chosen.spec.uses}
        # Reversed: of several for one package the first stays.
        named = {
            source.package: source
            for source in reversed(pinned)
            if (source.git, source.ref) in places and holds_on(source.marker, self.base)
        }
        return Lead(chosen=chosen, companions=named)

    def _companion(self, name: str, spec: Component, by: Lead) -> Chosen:
        companion = by.companions[name]
        because = by.because(companion)
        chosen = Chosen(
            name=name,
            spec=spec,
            asked=companion.pinned,
            origin=by.origin,
            because=because,
            overrides=companion.where == OVERRIDES,
        )
        if companion.ref is None:
            return replace(chosen, specifier=companion.specifier)
        git = companion.git or spec.git  # upstream may pin a commit of a fork
        if git is None:
            raise ConfigurationError(
                f"{because} names commit {companion.ref} of {name}, and its repository is not known",
                why=f"Neither {companion.where} nor [components.{name}] says where it is.",
                fix=f"Add git = URL to [components.{name}] of the stack, or pin a version: --pin {name}=VERSION",
            ).at_upstream()
        try:
            commit = self.repositories.open(git).resolve(GitRef(companion.ref), self.as_of)
        except (ConfigurationError, NetworkError) as error:
            # uv fetches the submodules of what it builds from git, whatever is pinned.
            another = f"Or say which {name} to take instead: --pin {name}=REF --name NAME"
            older = "Or take a commit from before: envbuild lock --as-of DATE --name NAME."
            named = error.with_context(
                why=f"{because} names it for {name}.\n{error.why}",
                fix=f"{error.fix}\n{older if companion.where.startswith('submodule') else another}",
            )
            named = named.about(name, by.chosen.name)
            # An outage: another commit of upstream's is no cure.
            if isinstance(error, NetworkError) and not error.gone:
                raise named from None
            raise named.at_upstream() from None
        if spec.release_file is None:
            return replace(chosen, git=git, commit=commit, pinned_by=by.chosen.name)
        # Upstream's Transformer Engine is pinned by commit, and only a build would tell what that commit requires.
        version = _version_in(spec.release_file, self.repositories.open(git), commit, name)
        return replace(
            chosen,
            specifier=releases_like(version),
            release_of=(git, commit),
            because=f"{because}; {spec.release_file} at that commit says {version}, so a release of that",
        )


def deviated(chosen: Mapping[str, Chosen], deviations: Sequence[Deviation]) -> dict[str, Chosen]:
    """The components, with other releases of those of which the pins do not work."""
    by_name = dict(chosen)
    for deviation in deviations:
        name = deviation.package
        if name not in by_name or deviation.until or deviation.added or deviation.declared_by:
            continue
        because = f"{by_name[name].because}, and deviates from it"
        by_name[name] = replace(
            by_name[name],
            specifier=deviation.specifier,
            asked=deviation.taken,
            because=because,
            commit=None,
            git="",
            url="",
        )
    return by_name


def tree_lead(tree: Tree, base: Base) -> Lead:
    """What belongs to a component from git: upstream's own pins at its commit."""
    try:
        named = companions(tree, base)
        for companion in script_companions(tree, base):
            named.setdefault(companion.package, companion)
    except ConfigurationError as error:
        raise error.about(tree.component.name) from None
    return Lead(chosen=tree.component, companions=named)


def left_out(leads: Sequence[Lead], chosen: Mapping[str, Chosen]) -> tuple[str, ...]:
    """What belongs to the leads and is not in the stack, for people; without versions forced on others."""
    lines: dict[str, str] = {}
    for lead in leads:
        # A repository may hold several packages, of which the stack need not know all.
        places = {(part.git, part.ref) for part in lead.companions.values() if part.ref and part.package in chosen}
        for companion in lead.companions.values():
            if companion.package in chosen or (companion.git, companion.ref) in places:
                continue
            if companion.ref is not None or lead.origin is DecidedBy.TABLE:
                lines.setdefault(
                    companion.package, f"{companion.package} {companion.pinned} ({lead.because(companion)})"
                )
    return tuple(lines.values())


def upstream_overrides(
    leads: Sequence[Lead], chosen: Mapping[str, Chosen], repositories: Repositories
) -> dict[str, Forced]:
    """Versions that upstream forces on packages that are no components of the stack."""
    forced: dict[str, Forced] = {}
    for tree in trees_of((lead.chosen for lead in leads), repositories):
        lines: dict[str, list[Companion]] = {}
        for line in overrides(tree):
            if line.specifier and line.package not in chosen:
                lines.setdefault(line.package, []).append(line)
        for name, forcing in lines.items():
            texts = tuple(f"{line.specifier} ; {line.marker}" if line.marker else line.specifier for line in forcing)
            forced.setdefault(name, Forced(by=tree.component.name, where=forcing[0].where, texts=texts))
    return forced


def _version_in(file: str, repository: GitRepository, commit: Commit, name: str) -> Version:
    text = (repository.read_file(commit, file) or "").strip()
    try:
        return Version(text)
    except InvalidVersion as error:
        raise ConfigurationError(
            f"which release of {name} belongs to commit {commit.sha[:12]} of {repository.url} is not known",
            why=f"{file} holds the version ([components.{name}], release_file), and "
            + (f"says {text[:60]!r} there." if text else "is not there."),
            fix=f"Say which: --pin {name}=VERSION, or correct release_file in the stack's file.",
        ).at_upstream() from error


def releases_like(version: Version) -> str:
    """The releases that a commit of this version is nearest to: those of its minor version.

    Of one that was not released when the commit was made (2.8.0.dev0), the newest up to it: it may not be there yet.
    """
    minor = f"{version.major}.{version.minor}"
    return f"<{version.major}.{version.minor + 1}" if version.is_devrelease else f"=={minor}.*"
