"""What a lock takes in the place of pins that do not work."""

from __future__ import annotations

from collections.abc import Iterable

from envbuild.lock.models import Deviation


def texts(deviations: Iterable[Deviation]) -> tuple[str, ...]:
    """A line for each, and one for packages that are taken alike: Transformer Engine, its cores and its torch part."""
    names: dict[Deviation, list[str]] = {}
    for deviation in deviations:
        names.setdefault(deviation.model_copy(update={"package": ""}), []).append(deviation.package)
    return tuple(deviation.text(", ".join(packages)) for deviation, packages in names.items())


def replaced(deviations: Iterable[Deviation]) -> set[str]:
    """The packages of which other releases are taken than those that were asked for."""
    return {
        deviation.package
        for deviation in deviations
        if not (deviation.until or deviation.added or deviation.declared_by)
    }
