"""Components held to versions that others decide: the ranges that their users declare, and the base's CUDA.

Declared ranges: the user's pin wins; then the stack's file; then upstream's own pins, or a table of companions. Where
none of them says anything, it is what a component declares of those that it ``uses``. And where the user pinned another
release of that component, the stack's version of a companion, which was meant for the stack's release, gives way to the
declared range.

CUDA: the index has one build of a release, and it is for one CUDA. Where the stack says which releases are for which
CUDA, and nothing else decides the version, those for the base's are taken; and where the index had none yet as of the
moment, the first one, with what it cannot do without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from packaging.specifiers import SpecifierSet

from envbuild.catalog.base import Base
from envbuild.catalog.stack import Stack
from envbuild.core.errors import CheckRefusedError, ResolutionError
from envbuild.lock.components.declarations import Declarations, Range
from envbuild.lock.components.models import Chosen, DecidedBy, Exemption
from envbuild.lock.components.releases import EXACT
from envbuild.lock.inputs import as_of
from envbuild.lock.inputs.as_of import AsOf
from envbuild.lock.inputs.request import LockInputs
from envbuild.lock.uv.explanation import NO_SOLUTION
from envbuild.lock.uv.package_index import PackageIndex
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX_BUILD
from envbuild.lock.uv_lock import ResolvedPackage


def hold_to_declared(stack: Stack, chosen: Mapping[str, Chosen], declarations: Declarations) -> dict[str, Chosen]:
    """The components, with the companions of which declared ranges decide held to these; says which.

    Of a range of releases, what the release declares that uv takes by itself; what is locked is checked later. A
    companion that is held or pinned declares in turn, for the extras that were asked of it:
    ``transformer-engine[pytorch]`` brings its transformer-engine-torch.
    """
    holding = _Holding(stack, declarations.index.base, declarations, dict(chosen))
    declaring: dict[str, frozenset[str]] = {
        name: frozenset()
        for name, component in chosen.items()
        if component.spec.uses and name not in holding.base.provides
    }
    while declaring:
        holding.done |= declaring.keys()
        declaring = holding.level(declaring)
    for name, component in holding.components.items():
        if component is not chosen[name]:
            declarations.index.context.reporter.note(f"{name} {component.asked}: {component.because}")
    return holding.components


@dataclass
class _Holding:
    """The components as far as they are held.

    Attributes:
        done: whose declarations were followed.
    """

    stack: Stack
    base: Base
    declarations: Declarations
    components: dict[str, Chosen]
    done: set[str] = field(default_factory=set)

    def level(self, declaring: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
        """Hold what these components declare; returns who declares next, and for which extras of it.

        Args:
            declaring: the components, with the extras of them that count for those that they do not use.
        """
        following: dict[str, frozenset[str]] = {}
        for name, component in list(self.components.items()):
            if not self._may_be_held(name, component):
                continue
            asking = [
                who for who in declaring if who != name and (name in self.components[who].spec.uses or declaring[who])
            ]
            if component.origin is DecidedBy.STACK and component.spec.version and not any(map(self._is_moved, asking)):
                continue  # the stack's version of both
            declared = {who: ranges for who in asking if (ranges := self._ranges(who, name, declaring[who]))}
            if not declared:
                continue
            if component.origin is not DecidedBy.PIN:
                if (held := self._held(component, declared)) is None:
                    continue
                self.components[name] = held
            if name not in self.done:
                following[name] = frozenset(extra for ranges in declared.values() for extra in ranges[0].asks)
        return following

    def _may_be_held(self, name: str, component: Chosen) -> bool:
        """Whether neither upstream, nor a table, nor an override, nor the base decides it; a pin lets others follow."""
        if component.is_direct or name in self.base.provides or name in self.stack.overrides:
            return False
        return component.origin is DecidedBy.STACK or (component.origin is DecidedBy.PIN and name not in self.done)

    def _is_moved(self, name: str) -> bool:
        """Whether the user pinned another one than the stack's, or such a pin led to it."""
        component = self.components[name]
        # A pin of the very release that the stack's file has moves nothing.
        own = component.spec.ref or component.spec.version.removeprefix("==")
        is_another = component.origin is DecidedBy.PIN and component.asked != own
        return component.origin is DecidedBy.DECLARED or is_another

    def _ranges(self, who: str, name: str, extras: frozenset[str]) -> list[Range]:
        component = self.components[who]
        declared = self.declarations.declared(component)
        if declared is None:
            return []
        if name in component.spec.uses:
            return declared.ranges(name, self.base, first=component.extras(self.base))
        return declared.ranges(name, self.base, only=extras)

    def _held(self, component: Chosen, ranges: Mapping[str, list[Range]]) -> Chosen | None:
        """A component within what others declare of it; None: nothing they declare is against what it is."""
        stated = component.spec.version
        limits = {who: [part for part in parts if part.specifier] for who, parts in ranges.items()}
        limits = {who: parts for who, parts in limits.items() if parts}
        if not limits or (stated and not self._is_outside(component, limits)):
            return None
        declared = SpecifierSet()
        for parts in limits.values():
            # The ranges of several extras are alternatives: first those that the stack asks for (Declared.ranges).
            declared &= parts[0].specifier
        because = f"declared by {' and '.join(parts[0].where for parts in limits.values())}"
        both = SpecifierSet(component.specifier) & declared
        if not stated:
            declared = both
        elif EXACT.match(stated) is None and self.declarations.index.version(component.name, str(both)):
            declared, because = both, f"{because}, within the stack's {stated}"
        else:
            because += f", in the place of the stack's {stated}"
        by = dict.fromkeys(name for who in limits for name in (who, *self.components[who].held_by))
        return replace(
            component,
            asked=str(declared),
            specifier=str(declared),
            origin=DecidedBy.DECLARED,
            because=because,
            held_by=tuple(by),
        )

    def _is_outside(self, component: Chosen, limits: Mapping[str, list[Range]]) -> bool:
        """Whether the stack's version is outside what a component declares whose own version the user moved."""
        exact = EXACT.match(component.spec.version)
        index = self.declarations.index
        version = exact[1] if exact else index.version(component.name, component.spec.version)
        if version is None:
            return False  # the resolution will say so
        return any(
            self._is_moved(who) and not any(part.has(version) for part in parts) for who, parts in limits.items()
        )


def hold_to_cuda(
    chosen: Mapping[str, Chosen], inputs: LockInputs, moment: AsOf, index: PackageIndex
) -> tuple[dict[str, Chosen], dict[str, Exemption]]:
    """Hold components to releases for the base's CUDA; also what is exempt from the as-of moment for it, by package.

    A build of torch that is not the index's is for the CUDA in its name, whatever the release. Where the index had no
    release for the CUDA as of the moment, later ones are taken, but only on a base that the user named.

    Raises:
        CheckRefusedError: the index had none, and the base was not named.
        ResolutionError: there is none at all.
    """
    base, build = inputs.selection.base, inputs.torch_build
    held, exempt = dict(chosen), dict[str, Exemption]()
    for name, component in chosen.items():
        releases = component.spec.releases_for_cuda.get(base.cuda_major or "")
        other_build = name == "torch" and build != PACKAGE_INDEX_BUILD
        if (
            not releases
            or component.origin is not DecidedBy.STACK
            or component.is_direct
            or name in base.provides
            or other_build
        ):
            continue
        specifier = ",".join(filter(None, [component.specifier, releases]))
        because = f"{component.because}: releases for CUDA {base.cuda_major}"
        held[name] = replace(component, specifier=specifier, asked=specifier, because=because)
        if moment.asked != as_of.NOW and component.spec.as_of is None:
            exempt |= _exemptions(held[name], moment, index, may_exempt=inputs.request.base_named)
    return held, exempt


def _exemptions(component: Chosen, moment: AsOf, index: PackageIndex, *, may_exempt: bool) -> dict[str, Exemption]:
    title = f"{component.name} for CUDA {index.base.cuda_major}"
    with index.context.reporter.step(f"look for {title} as of {moment.text()}"):
        try:
            dated = index.with_settings(exclude_newer=moment.text())
            dated.find({component.name: component.specifier}, f"find {title}")
        except ResolutionError as error:
            if NO_SOLUTION not in error.why:
                raise
        else:
            return {}
        if not may_exempt:
            raise _none_yet(component, index.base, moment)
        return _of_first(component, moment, title, index)


def _of_first(component: Chosen, moment: AsOf, title: str, index: PackageIndex) -> dict[str, Exemption]:
    """The first release, and those of its needs whose lowest versions are newer than the moment too."""
    lowest = index.lowest()
    first = lowest.find({component.name: component.specifier}, f"find the first {title}")[component.name]
    title = f"{component.name} {first.version}"
    until = as_of.timestamp(as_of.end_of(_last_upload(first).date()))
    # resolution = lowest shows the oldest versions that will do: only what is newer than the moment even so needs an
    # exemption.
    # no-build: the lowest releases of what has no lower bound are sdists that do not build any more
    # (matplotlib/viscm#100 met the same).
    settled = lowest.with_settings(exclude_newer=until, no_build=True)
    needed = settled.find_with_needs({component.name: f"=={first.version}"}, f"find what {title} needs")
    base = index.base
    reason = f"as of {moment.text()} no release of {component.name} is for CUDA {base.cuda_major}; {title} is the first"
    exempt = {component.name: Exemption(until=until, reason=reason)}
    for name in component.spec.released_with:
        exempt[name] = Exemption(
            until=until, reason=f"a release of it needs one of {component.name}, and {title} is exempt"
        )
    for name, package in needed.items():
        if _last_upload(package) > moment.moment:
            exempt.setdefault(name, Exemption(until=until, reason=f"{title} needs {package.version}"))
    return exempt


def _last_upload(package: ResolvedPackage) -> datetime:
    """When the last of a release's files was uploaded; what has no time is as old as can be."""
    return datetime.fromtimestamp(max(package.upload_seconds, default=0), timezone.utc)


def _none_yet(component: Chosen, base: Base, moment: AsOf) -> CheckRefusedError:
    major = base.cuda_major
    return CheckRefusedError(
        f"as of {moment.text()} no release of {component.name} on the index is for CUDA {major}",
        why=f"Those for CUDA {major} are {component.name}{component.specifier} ({component.because}).",
        fix="Name the base, and the first one is taken although it is newer: --base NAME",
        # By this code lock_stack goes on with the stack's next base.
        codes=["cuda-mixed"],
    )
