"""The step `project`: what uv is going to be asked, and where it comes from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from envbuild.lock.components.decide import Decided, EffectiveStack, commit_without_llm
from envbuild.lock.components.git_sources import own_indexes
from envbuild.lock.components.models import DecidedBy, Exemption, Forced, Preference
from envbuild.lock.components.preferences import torch_preference, upstream_image, without_overruled
from envbuild.lock.components.select import left_out, upstream_overrides
from envbuild.lock.context import LockContext
from envbuild.lock.inputs.as_of import AsOf
from envbuild.lock.inputs.deviation import replaced
from envbuild.lock.inputs.request import LockInputs
from envbuild.lock.project.pyproject import Project, render_project
from envbuild.lock.uv.named_index import OwnIndexes, named_indexes
from envbuild.lock.uv.package_index import PackageIndex
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX, TorchSource, torch_source


@dataclass(frozen=True, kw_only=True)
class LockPlan:
    """Everything that uv is going to be asked, and where it comes from.

    Attributes:
        effective: the stack as it holds for the anchor, and why.
        driver_problem: what the driver needs and a component from git does not have; empty: nothing.
        left_out: what belongs to the anchor, or what leads in its place, and is not in the stack.
        keep: versions of a lock made from the same inputs as of the same moment.
        preferences: versions that are taken where everything accepts them.
        exempt: what may be newer than the as-of moment, besides components with a date of their own.
    """

    inputs: LockInputs
    project: Project
    as_of: AsOf
    effective: EffectiveStack
    driver_problem: str
    torch: TorchSource
    upstream_overrides: Mapping[str, Forced]
    left_out: tuple[str, ...]
    keep: Mapping[str, str]
    exempt: Mapping[str, Exemption]
    preferences: Mapping[str, Preference] = field(default_factory=dict)

    @property
    def preferred(self) -> dict[str, str]:
        """The versions that uv prefers, by name."""
        decided = self.project.pinned_directly() | self.project.base.provides.keys()
        stays = {name: version for name, version in self.inputs.stays.items() if name not in decided}
        # Upstream's files win over the versions that stay: they may have moved with the branch.
        return {**stays, **{name: preference.version for name, preference in self.preferences.items()}}

    @property
    def own(self) -> OwnIndexes:
        """The packages that are taken from an index of their own."""
        return own_indexes(self.project.every, self.project.git_sources, self.torch.indexes)

    @property
    def what(self) -> str:
        """What uv does, for messages."""
        return f"resolve {self.inputs.title}"

    @cached_property
    def kept_text(self) -> str:
        """The pyproject.toml that uv resolves, with the versions that are kept as constraints."""
        return self.project_text(self.keep)

    def project_text(self, pins: Mapping[str, str]) -> str:
        """The pyproject.toml that uv resolves, with these versions as constraints."""
        return render_project(self.project, pins=pins, source=self.torch)


def make_plan(inputs: LockInputs, decided: Decided, context: LockContext) -> LockPlan:
    """Make the project of the decided components, but for what the compile phase declares.

    Raises:
        NetworkError: no place has torch's build, or a repository cannot be reached.
    """
    leads, chosen = decided.effective.leads, decided.chosen
    without = _left_out(inputs, decided, context)
    torch = replace(_torch(inputs, decided, context), indexes=named_indexes(context.site.indexes))
    forced = upstream_overrides(leads, chosen, context.repositories)
    if leads:
        forced = without_overruled(forced, decided.preferences, leads[0].chosen.name, inputs.selection.base)
    # The stack's file comes first: NeMo 3 forces pyarrow 24, and stack nemo limits it.
    stated = {name for name, requirement in decided.effective.stack.requirements.items() if requirement.version}
    forced = {name: forced_range for name, forced_range in forced.items() if name not in stated}
    # What upstream forces and does not work, another range replaces, which is forced as well: Megatron-Bridge forces
    # nvidia-modelopt==0.44.0rc5, which only NVIDIA's index has, against what others declare.
    moved = {
        deviation.package: deviation
        for deviation in inputs.deviations
        if deviation.package in forced and deviation.specifier
    }
    forced = {name: forced_range for name, forced_range in forced.items() if name not in replaced(inputs.deviations)}
    texts = {name: forced_range.texts for name, forced_range in forced.items()}
    texts |= {name: (deviation.specifier,) for name, deviation in moved.items()}
    project = _project(inputs, decided, texts)
    return LockPlan(
        inputs=inputs,
        project=project,
        as_of=decided.as_of,
        effective=decided.effective,
        driver_problem=commit_without_llm(chosen, decided.effective.stack.driver, context.repositories),
        torch=torch,
        upstream_overrides=forced,
        left_out=without,
        keep=_kept(project, inputs),
        exempt=decided.exempt,
        preferences=_preferences(inputs, decided, context),
    )


def _preferences(inputs: LockInputs, decided: Decided, context: LockContext) -> dict[str, Preference]:
    """The versions that upstream tested with, without those of packages that are decided by a commit or an address."""
    leads, base = decided.effective.leads, inputs.selection.base
    by_name = dict(decided.preferences)
    torch, image = decided.chosen.get("torch"), upstream_image(leads, base, context.repositories)
    # With another version, or in a lock where upstream has torch from the index, nothing is open.
    floats = torch is not None and torch.origin is DecidedBy.STACK and not (torch.is_direct or torch.spec.version)
    if torch is not None and image is not None and floats and "torch" not in {*base.provides, *by_name}:
        dates = {name: exemption.until for name, exemption in decided.exempt.items()}
        settings = decided.as_of.settings(dates)
        index = PackageIndex(base=base, context=context, own=decided.own, settings=settings)
        with context.reporter.step(f"find the torch that is nearest to {image.release}'s"):
            if (preference := torch_preference(torch, image, inputs.selection.catalog, index)) is not None:
                by_name["torch"] = preference
    direct = {name for name, component in decided.chosen.items() if component.is_direct}
    return {name: preference for name, preference in by_name.items() if name not in direct | base.provides.keys()}


def _left_out(inputs: LockInputs, decided: Decided, context: LockContext) -> tuple[str, ...]:
    """What belongs to the anchor and is not in the stack; reported, as is what is exempt from the moment."""
    for name in sorted(decided.exempt.keys() & decided.chosen.keys()):
        context.reporter.note(f"exempt from the as-of moment: {name} {decided.exempt[name].text()}")
    without = left_out(decided.effective.leads, decided.chosen)
    for text in without:
        context.reporter.note(
            f"note: no component of stack {inputs.selection.stack_name}, and so not in the lock: {text}"
        )
    return without


def _torch(inputs: LockInputs, decided: Decided, context: LockContext) -> TorchSource:
    """Where torch's build is, unless the base brings torch or the stack has none."""
    base, torch = inputs.selection.base, decided.chosen.get("torch")
    if torch is None or "torch" in base.provides:
        return PACKAGE_INDEX
    with context.reporter.step(f"find torch's build {inputs.torch_build!r}"):
        return torch_source(context.site, torch.specifier, inputs.torch_build, base.python.version)


def _project(inputs: LockInputs, decided: Decided, forced: Mapping[str, tuple[str, ...]]) -> Project:
    stack = decided.effective.stack
    return Project(
        name=inputs.selection.stack_name,
        base=inputs.selection.base,
        torch_build=inputs.torch_build,
        as_of=decided.as_of.text() if decided.as_of.held else "",
        undated=decided.as_of.undated,
        chosen=decided.chosen,
        requirements={name: requirement.version for name, requirement in stack.requirements.items()}
        | {deviation.package: deviation.specifier for deviation in inputs.deviations if deviation.added},
        overrides={
            **forced,
            **{name: (stack.overrides[name].version,) for name in stack.overrides_of_all()},
        },
        scoped_overrides=_scoped_overrides(inputs, decided),
        git_sources=decided.git_sources,
        exempt={name: exemption.until for name, exemption in decided.exempt.items()}
        | {deviation.package: deviation.until for deviation in inputs.deviations if deviation.until},
        limits=_limits(inputs, {*decided.chosen, *forced}),
    )


def _scoped_overrides(inputs: LockInputs, decided: Decided) -> dict[str, dict[str, str]]:
    """What the stack, upstream for a component, or a deviation puts over what single packages declare.

    For those alone that use the component: an override for all would take the extras from the stack's own requirement.
    """
    by_name = {name: dict(specifiers) for name, specifiers in decided.effective.stack.scoped_overrides().items()}
    for name, component in decided.chosen.items():
        users = [user for user, other in decided.chosen.items() if name in other.spec.uses]
        for user in users if component.overrides and component.wanted else ():
            by_name.setdefault(user, {}).setdefault(name, component.wanted)
    for deviation in inputs.deviations:
        if deviation.declared_by:
            by_name.setdefault(deviation.declared_by, {})[deviation.package] = deviation.specifier
    return by_name


def _limits(inputs: LockInputs, decided: Collection[str]) -> dict[str, str]:
    """What is taken of packages that nothing else decides, in the place of what uv takes by itself."""
    return {
        deviation.package: deviation.specifier
        for deviation in inputs.deviations
        if deviation.specifier and not (deviation.added or deviation.declared_by) and deviation.package not in decided
    }


def _kept(project: Project, inputs: LockInputs) -> dict[str, str]:
    """The versions of a lock of the same moment or the same pins, but for those that the project pins itself."""
    previous = inputs.previous
    if previous is None or not (inputs.pins_stay or previous.lock.inputs.as_of == project.as_of):
        return {}
    direct = project.pinned_directly()
    return {name: version for name, version in previous.packages().items() if name not in direct}
