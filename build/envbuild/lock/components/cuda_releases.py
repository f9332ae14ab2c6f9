"""Releases for the base's CUDA: the index has one build of a release, and it is for one CUDA.

Where the stack says which releases are for which CUDA, and nothing else decides the version, those for the base's are
taken; and where the index had none yet as of the moment, the first one, with what it cannot do without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from envbuild.catalog.models import Base
from envbuild.core.errors import CheckRefusedError, ResolutionError
from envbuild.lock.components.models import Chosen, DecidedBy, Exemption
from envbuild.lock.context import LockContext
from envbuild.lock.inputs import as_of
from envbuild.lock.inputs.as_of import AsOf
from envbuild.lock.inputs.request import LockInputs
from envbuild.lock.uv.lookup import look_up
from envbuild.lock.uv.resolution import NO_SOLUTION, upload_seconds
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX_BUILD


@dataclass(frozen=True, kw_only=True)
class HeldToCuda:
    """Components held to releases for the base's CUDA, and what is exempt from the as-of moment for it, by package."""

    chosen: dict[str, Chosen]
    exempt: dict[str, Exemption] = field(default_factory=dict)


def hold_to_cuda(chosen: Mapping[str, Chosen], inputs: LockInputs, moment: AsOf, context: LockContext) -> HeldToCuda:
    """Hold components to their releases for the base's CUDA.

    A build of torch that is not the index's is for the CUDA in its name, whatever the release. Where the index had no
    release for the CUDA as of the moment, later ones are taken, but only on a base that the user named.

    Raises:
        CheckRefusedError: the index had none, and the base was not named.
        ResolutionError: there is none at all.
    """
    base, build = inputs.selection.base, inputs.torch_build
    found = HeldToCuda(chosen=dict(chosen))
    for name, item in chosen.items():
        releases = item.spec.releases_for_cuda.get(base.cuda_major or "")
        other_build = name == "torch" and build != PACKAGE_INDEX_BUILD
        if not releases or item.origin is not DecidedBy.STACK or item.is_direct or name in base.provides or other_build:
            continue
        held = ",".join(filter(None, [item.specifier, releases]))
        because = f"{item.because}: releases for CUDA {base.cuda_major}"
        found.chosen[name] = replace(item, specifier=held, asked=held, because=because)
        if moment.asked != as_of.NOW and item.spec.as_of is None:
            found.exempt.update(
                _exemptions(found.chosen[name], base, moment, context, may_exempt=inputs.request.base_named)
            )
    return found


def _exemptions(
    item: Chosen, base: Base, moment: AsOf, context: LockContext, *, may_exempt: bool
) -> dict[str, Exemption]:
    title = f"{item.name} for CUDA {base.cuda_major}"
    with context.reporter.step(f"look for {title} as of {moment.text()}"):
        try:
            look_up({item.name: item.specifier}, base, {"exclude-newer": moment.text()}, f"find {title}", context)
        except ResolutionError as error:
            if NO_SOLUTION not in error.why:
                raise
        else:
            return {}
        if not may_exempt:
            raise _none_yet(item, base, moment)
        return _of_first(item, base, moment, title, context)


def _of_first(item: Chosen, base: Base, moment: AsOf, title: str, context: LockContext) -> dict[str, Exemption]:
    """The first release, and those of its needs whose lowest versions are newer than the moment too."""
    lowest: dict[str, object] = {"resolution": "lowest"}
    first = look_up({item.name: item.specifier}, base, lowest, f"find the first {title}", context)[item.name]
    title = f"{item.name} {first['version']}"
    until = as_of.timestamp(as_of.end_of(_last_upload(first).date()))
    settings = {**lowest, "exclude-newer": until, "no-build": True}
    what = f"find what {title} needs"
    needed = look_up({item.name: f"=={first['version']}"}, base, settings, what, context, alone=False)
    reason = f"as of {moment.text()} no release of {item.name} is for CUDA {base.cuda_major}; {title} is the first"
    found = {item.name: Exemption(until=until, reason=reason)}
    for name in item.spec.released_with:
        found[name] = Exemption(until=until, reason=f"a release of it needs one of {item.name}, and {title} is exempt")
    for name, package in needed.items():
        if _last_upload(package) > moment.moment:
            found.setdefault(name, Exemption(until=until, reason=f"{title} needs {package['version']}"))
    return found


def _last_upload(package: Mapping[str, Any]) -> datetime:
    """When the last of a release's files was uploaded; what has no time is as old as can be."""
    return datetime.fromtimestamp(max(upload_seconds(package), default=0), timezone.utc)


def _none_yet(item: Chosen, base: Base, moment: AsOf) -> CheckRefusedError:
    major = base.cuda_major
    return CheckRefusedError(
        f"as of {moment.text()} no release of {item.name} on the index is for CUDA {major}",
        why=f"Those for CUDA {major} are {item.name}{item.specifier} ({item.because}).",
        fix="Name the base, and the first one is taken although it is newer: --base NAME",
        codes=["cuda-mixed"],
    )
