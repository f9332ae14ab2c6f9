"""What may be taken of a package in the place of a pin that does not work, in the order in which it is tried.

1. Of a commit that does not install: the releases of its line, then any release.
2. Of a release that upstream pins and that is not there, or fails: the nearest later lines of releases, then the
   nearest earlier ones.
3. Of a package that floats: what there was when the anchor's commit was made, with which its authors can have tried it.
4. Of a package with an extra for another CUDA than the base's: it, without the extra.
5. Of two declared ranges that exclude each other: the one without an upper bound, for both.
6. The releases before the one that fails, line by line (2.10, then 2.9).
7. Of a package that had no release yet as of the moment: its first one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envbuild.catalog.base import Base
from envbuild.lock.components.decide import Decided
from envbuild.lock.components.declarations import declared_by_release
from envbuild.lock.components.distributions import distribution_of
from envbuild.lock.components.families import NO_PLACEHOLDER, family_of
from envbuild.lock.components.models import Chosen, DecidedBy, GitSource
from envbuild.lock.components.placeholders import is_stub
from envbuild.lock.components.releases import EXACT
from envbuild.lock.context import LockContext
from envbuild.lock.inputs.as_of import timestamp
from envbuild.lock.models import Deviation
from envbuild.lock.outcome import Failure
from envbuild.lock.search.clashes import Clash
from envbuild.lock.search.state import Move
from envbuild.lock.uv.package_index import MOST_PASSED_OVER, PackageIndex
from envbuild.lock.uv.resolution import Resolution
from envbuild.lock.uv_lock import ResolvedPackage, UvLock

# Lines of releases that are tried above the one that fails, and below it.
MOST_LINES = 3
# How long after the anchor's commit a release may have come out and still count as of its time.
GRACE = timedelta(days=1)
# What is taken where nobody asks for anything else.
NEWEST = "the newest release"
_RELEASE = re.compile(r"(\d+)\.(\d+)")
# Extras as numba-cuda, cuda-python's users and nixl name them: cu12, cuda13, cuda-12x.
_OF_CUDA = re.compile(r"cu(?:da)?-?(\d\d)x?")


@dataclass
class Candidates:
    """The candidates of packages, after an attempt.

    Attributes:
        failure: of the attempt.
        decided: its components.
        why: what failed, for the reasons of deviations.
        context: with a folder for questions to uv.
        without: a package that uv cannot build: releases that ask for it are passed over. Empty: none.
    """

    failure: Failure
    decided: Decided
    why: str
    context: LockContext
    without: str = ""

    @property
    def _base(self) -> Base:
        return self.failure.inputs.selection.base

    @property
    def _resolution(self) -> Resolution:
        """What the attempt resolved to; an empty one where it did not."""
        resolved = self.failure.resolved
        return resolved.resolution if resolved is not None else Resolution(UvLock(package=()))

    def may_move(self, package: str) -> bool:
        """Whether another release of a package may be taken."""
        return self._may_move(self._component(package)[1])

    def still_replaces(self, deviation: Deviation) -> bool:
        """Whether what another lock took in the place of a release is taken in the place of the same one now."""
        if deviation.until or deviation.added or deviation.declared_by:
            return True
        component = self.decided.chosen.get(deviation.package)
        asked = {self._otherwise(deviation.package, component), self._forced(deviation.package)}
        return deviation.instead_of in asked and self._may_move(component)

    def likely(self, package: str) -> Iterator[Move]:
        """What may be taken of a package: the nearest release, the one of the commit's time, or the first."""
        for source in self.decided.git_sources.missing:
            if source.name == package and not source.barred:
                # Not of the place that upstream names: of the index, whatever is there.
                reason = f"{source.error.what}; a release of the index"
                yield (Deviation(package=package, instead_of=source.place, reason=reason),)
                return
        package, component = self._component(package)
        if not self._may_move(component):
            return
        version = self._version(package)
        if component is None and self._git_source(package) is not None:
            yield from self._released(package)
            return
        pinned = component.specifier if component is not None else self._forced(package)
        if version is not None and EXACT.match(pinned) is None:
            yield from self._of_the_time(package, component, version)
        if self._is_limited(component):
            return
        if _RELEASE.search(pinned) and (version is None or pinned.startswith("==")):
            yield from self._nearest(package, component, pinned)
        elif version is None:
            yield from self._first(package)

    def earlier(self, package: str) -> Iterator[Move]:
        """The lines of releases before the one that was locked."""
        package, component = self._component(package)
        version = self._version(package)
        if component is not None and version is None and self._is_limited(component):
            release = self._release(package, component.specifier)
            version = release.version if release is not None else None
        if version is not None and self._may_move(component):
            yield from self._lines(package, component, version)

    def missing(self, module: str) -> Move:
        """The package that brings a module which nothing in the lock brings."""
        top = module.partition(".")[0]
        package = distribution_of(top)
        reason = f"something imports {module}, and no package of the lock brings it"
        return (Deviation(package=package, instead_of="nothing", added=True, reason=reason),)

    def without_extra(self, package: str) -> Iterator[Move]:
        """A package without an extra that is for another CUDA than the base's, as its name says.

        NeMo 2.6.0 declares numba-cuda[cu13], and its torch is for CUDA 12.
        """
        for release in self._resolution.packages.values():
            for needed in release.dependencies:
                extras = [extra for extra in needed.extra if self._is_of_another_cuda(extra)]
                if needed.name == package and extras:
                    by, extra = release.name, extras[0]
                    wanted = self._declared(release, package)
                    reason = f"extra {extra} is not for CUDA {self._base.cuda_major}, which the base has"
                    instead_of = f"{package}[{extra}]{wanted}, which {by} declares"
                    yield (
                        Deviation(
                            package=package,
                            instead_of=instead_of,
                            specifier=wanted,
                            declared_by=by,
                            reason=reason,
                        ),
                    )
                    break

    def _is_of_another_cuda(self, extra: str) -> bool:
        match = _OF_CUDA.fullmatch(extra)
        return match is not None and self._base.cuda_major is not None and match[1] != self._base.cuda_major

    def _declared(self, release: ResolvedPackage, package: str) -> str:
        """The range that a release declares of a package; empty for any, and where only a build would tell."""
        declared = declared_by_release(release, self._base, self.context)
        ranges = declared.ranges(package, self._base) if declared is not None else []
        return str(ranges[0].specifier) if ranges else ""

    def relaxed(self, clash: Clash) -> Iterator[Move]:
        """One of two declared ranges in the place of the other; not of a component, whose version means more."""
        kept, relaxed = clash.kept, clash.relaxed
        if self._component(kept.package)[1] is not None:
            return
        yield (
            Deviation(
                package=kept.package,
                instead_of=f"{relaxed.range}, which {relaxed.by} declares",
                specifier=kept.range,
                declared_by=relaxed.by,
                reason=f"{kept.by} needs it, and no release is in both ranges",
            ),
        )

    def _component(self, package: str) -> tuple[str, Chosen | None]:
        """The component that a package is, else one that has one version with it (of Transformer Engine's core)."""
        chosen = self.decided.chosen
        name = next((name for name in (package, *chosen) if name in chosen and name in family_of(package)), package)
        return name, chosen.get(name)

    def _may_move(self, component: Chosen | None) -> bool:
        """Whether a release of it may be another: no commit, no pin, and nothing in the stack's file decides it."""
        if component is None:
            return True
        return (
            component.commit is None
            and component.origin is not DecidedBy.PIN
            and not component.spec.version
            and not component.spec.ref
        )

    def _otherwise(self, package: str, component: Chosen | None) -> str:
        """What would be taken of a package, for people."""
        source = self._git_source(package)
        if component is None and source is not None:
            return f"{source.chosen.asked} of {source.chosen.git or 'its address'}"
        return component.asked if component is not None and component.specifier else NEWEST

    def _git_source(self, package: str) -> GitSource | None:
        """Where a package that is no component is taken from, besides the index."""
        return self.decided.git_sources.in_force.get(package)

    def _released(self, package: str) -> Iterator[Move]:
        """Releases of the index in the place of a git commit: of its own line, then any that the others ask for."""
        version = self._version(package)
        asked = self._otherwise(package, None)
        # Of nvidia-resiliency-ext main the tree says 0.0.0: its build takes the version from a tag.
        if version is not None and _line(version) != "0.0":
            reason = f"{self.why} with the commit; the releases nearest to it"
            yield self._moved(package, None, asked, f"=={_line(version)}.*", reason)
        yield self._moved(package, None, asked, "", f"{self.why} with the commit; a release of the index")

    def _version(self, package: str) -> str | None:
        """The release that was locked; None: there is none, or only a placeholder."""
        version = self._resolution.pins.get(package)
        empty = len(family_of(package)) > 1 and not SpecifierSet(NO_PLACEHOLDER).contains(
            version or "0", prereleases=True
        )
        return None if empty else version

    def _is_limited(self, component: Chosen | None) -> bool:
        """Whether the base's CUDA sets a range: nothing outside of it is tried."""
        return (
            component is not None
            and component.origin is DecidedBy.STACK
            and bool(component.specifier)
            and "==" not in component.specifier
        )

    def _forced(self, package: str) -> str:
        """The range that upstream forces on a package that is no component; empty: none."""
        plan = self.failure.plan
        forced = plan.upstream_overrides.get(package) if plan is not None else None
        return forced.texts[0].partition(";")[0].strip() if forced is not None else ""

    def _nearest(self, package: str, component: Chosen | None, pinned: str) -> Iterator[Move]:
        """The releases nearest to one that is not there, or that fails: later ones first."""
        reason = self.why
        if self._version(package) is None and self._release(package, pinned) is None:
            reason = f"the index has no release {pinned}"
        exact, line = EXACT.match(pinned), _RELEASE.search(pinned)
        if exact is not None:
            above, below, other = f">{exact[1]}", exact[1], f",!={exact[1]}"
        elif line is not None:
            # ==2.7.* is left for 2.8, and <1.9 for 1.9.
            first = int(line[2]) + (not pinned.startswith("<"))
            above, below, other = f">={line[1]}.{first}", f"{line[1]}.{line[2]}", ""
        else:
            return
        for lines, which in ((self._later(package, above), "later"), (self._earlier(package, below), "earlier")):
            nearest = "the nearest"
            for version_line in lines:
                # 0.44.0rc5 is not there and 0.44.0 is: of the same line, what is not the pin.
                same = other if exact is not None and version_line == _line(exact[1]) else ""
                specifier = f"=={version_line}.*{same}"
                yield self._moved(package, component, pinned, specifier, f"{reason}; {nearest} {which} one")
                nearest = "the next"

    def _later(self, package: str, above: str) -> Iterator[str]:
        """The lines of releases in a range, from the lowest on."""
        return self._passing(package, above, lambda line: f">={_following(line)}", lowest=True)

    def _earlier(self, package: str, below: str, limit: str = "") -> Iterator[str]:
        """The lines of releases below a version, from the newest on."""
        return self._passing(package, f"{limit}<{below}", lambda line: f"{limit}<{line}", lowest=False)

    def _passing(self, package: str, where: str, rest: Callable[[str], str], *, lowest: bool) -> Iterator[str]:
        """So many lines of releases, without those that ask for what cannot be built."""
        given = 0
        for _ in range(MOST_LINES + MOST_PASSED_OVER):
            release = self._release(package, where, lowest=lowest)
            if release is None or given == MOST_LINES:
                return
            line = _line(release.version)
            if not self._asks_for_it(release):
                given += 1
                yield line
            where = rest(line)

    def _asks_for_it(self, release: ResolvedPackage) -> bool:
        """Whether a release asks for what cannot be built."""
        if not self.without:
            return False
        declared = declared_by_release(release, self._base, self.context)
        return declared is not None and bool(declared.ranges(self.without, self._base))

    def _moved(self, package: str, component: Chosen | None, pinned: str, specifier: str, reason: str) -> Move:
        if component is not None:
            return self._family(component, specifier, reason)
        return (Deviation(package=package, instead_of=pinned, specifier=specifier, reason=reason),)

    def _family(self, component: Chosen, specifier: str, reason: str) -> Move:
        """A range for all packages that have one version with this one."""
        family = family_of(component.name)
        members = [
            other
            for other in self.decided.chosen.values()
            if other.name in family
            or (
                component.spec.release_file is not None
                and other.spec.git == component.spec.git
                and other.commit is None
            )
        ]
        return tuple(
            Deviation(
                package=other.name,
                instead_of=self._otherwise(other.name, other),
                specifier=specifier,
                reason=reason,
            )
            for other in members
        )

    def _first(self, package: str) -> Iterator[Move]:
        """Its first release, though it is newer than the moment."""
        if self._release(package, "") is not None:
            return
        first = self._release(package, "", lowest=True, dated=False)
        times = first.upload_seconds if first is not None else []
        if first is None or not times:
            return
        # uv's exclude-newer takes what was uploaded before the moment; the times here have whole seconds.
        until = datetime.fromtimestamp(max(times), timezone.utc) + timedelta(seconds=1)
        reason = f"the index had no release of it yet; {first.version} is the first"
        yield self._until(package, self.decided.as_of.text(), until, reason)

    def _of_the_time(self, package: str, component: Chosen | None, version: str) -> Iterator[Move]:
        """What there was when the anchor's commit was made."""
        leads = self.decided.effective.leads
        dates = [lead.chosen.commit.committed_at for lead in leads if lead.chosen.commit is not None]
        locked = self._resolution.packages.get(package)
        times = locked.upload_seconds if locked is not None else []
        if not dates or not times:
            return
        until = max(dates) + GRACE
        # Its authors had this release: what fails is something else.
        if min(times) < until.timestamp():
            return
        reason = f"{self.why} with {version}; until then the authors of {leads[0].chosen.title} can have tried it"
        yield self._until(package, self._otherwise(package, component), until, reason)

    def _until(self, package: str, asked: str, until: datetime, reason: str) -> Move:
        """Nothing newer than a moment, of a package and of those that have one version with it."""
        there = {*self.decided.chosen, *self._resolution.pins}
        return tuple(
            Deviation(package=name, instead_of=asked, until=timestamp(until), reason=reason)
            for name in (package, *sorted((family_of(package) & there) - {package}))
        )

    def _lines(self, package: str, component: Chosen | None, version: str) -> Iterator[Move]:
        limit = f"{component.specifier}," if component is not None and component.specifier else ""
        reason = f"{self.why} with {version}; an earlier release"
        asked = self._otherwise(package, component)
        for line in self._earlier(package, _line(version), limit):
            yield self._moved(package, component, asked, f"=={line}.*", reason)

    def _release(
        self, package: str, specifier: str, *, lowest: bool = False, dated: bool = True
    ) -> ResolvedPackage | None:
        """The newest or lowest release in a range as of the lock's moment; None: there is none."""
        settings: dict[str, str] = {"resolution": "lowest"} if lowest else {}
        if dated and self.decided.as_of.held:
            settings["exclude-newer"] = self.decided.as_of.text()
        index = PackageIndex(base=self._base, context=self.context, own=self.decided.own, settings=settings)
        # Placeholders hold a name on the index and have nothing in them: for the 1.8.0.dev0 of Transformer Engine that
        # NeMo of 2025-03-01 pins, the index has 0.0.0 below and 1.9.0 above.
        limits = [*filter(None, (specifier, NO_PLACEHOLDER if len(family_of(package)) > 1 else ""))]
        for _ in range(MOST_PASSED_OVER):
            release = index.release(package, ",".join(limits))
            if release is None or not is_stub(release, self.context):
                return release
            limits.append(f"!={release.version}")
        return None


def _line(version: str) -> str:
    """The line of releases that a version belongs to: ``2.7`` of ``2.7.0.post1``."""
    release = Version(version).release
    return ".".join(map(str, [*release, 0][:2]))


def _following(line: str) -> str:
    """The least version above a line of releases."""
    major, minor = line.split(".")
    return f"{major}.{int(minor) + 1}"
