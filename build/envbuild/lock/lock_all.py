"""Every stack on every base that it names (``envbuild lock --all``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.context import Context
from envbuild.core.errors import EnvbuildError
from envbuild.core.progress import Reporter
from envbuild.lock.inputs.request import LockRequest
from envbuild.lock.lock import LockOptions, LockResult, lock_stack
from envbuild.lock.lockdir import lock_path

# uv resolves on one thread for most of the time and waits for the index for the rest.
LOCKS_AT_ONCE = 2


def every_selection(catalog: Catalog) -> list[Selection]:
    """Each stack on each base that it names, once."""
    found: dict[tuple[str, str], Selection] = {}
    for name in catalog.names("stacks"):
        for builds in catalog.stack(name).builds:
            for base in builds.bases:
                found.setdefault((name, base), Selection(catalog, name, base, builds.target))
    return list(found.values())


def lock_all(
    catalog: Catalog,
    project_dir: Path,
    context: Context,
    reporter_of: Callable[[Selection], Reporter],
    *,
    upgrade: bool,
) -> list[LockResult]:
    """Lock every stack on every base that it names; one that fails does not keep the others from it.

    Args:
        reporter_of: receives what happens to each lock; several are made at once.

    Raises:
        EnvbuildError: some failed; of the class of the first failure.
    """

    def one(selection: Selection) -> LockResult | EnvbuildError:
        path = lock_path(project_dir, selection.stack_name, selection.base_name)
        own = replace(context, reporter=reporter_of(selection))
        try:
            return lock_stack(selection, LockRequest(), LockOptions(path=path, upgrade=upgrade), own)
        except EnvbuildError as error:
            return error

    selections = every_selection(catalog)
    with ThreadPoolExecutor(LOCKS_AT_ONCE) as pool:
        outcomes = list(pool.map(one, selections))
    failed = [
        (item, error) for item, error in zip(selections, outcomes, strict=True) if isinstance(error, EnvbuildError)
    ]
    if failed:
        first = failed[0][1]
        raise first.with_context(
            what=f"{len(failed)} of {len(outcomes)} locks failed",
            why="\n".join(
                f"{selection.stack_name} on {selection.base_name}: {error.what}\n{error.why}"
                for selection, error in failed
            ),
        ) from first
    return [item for item in outcomes if isinstance(item, LockResult)]
