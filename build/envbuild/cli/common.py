"""What every command shares: its options, the session they make, and how results are printed."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from envbuild.cli.output import put
from envbuild.core.digests import Json
from envbuild.core.progress import Reporter, choose_reporter
from envbuild.core.text import printable_lines

# What a session has is imported when it is asked for.
if TYPE_CHECKING:
    from envbuild.catalog.catalog import Catalog, Selection
    from envbuild.catalog.context import Context
    from envbuild.catalog.site import Site
    from envbuild.lock.lockfile import LockDirectory
    from envbuild.store.local import LocalStore
    from envbuild.store.remote import Remote
    from envbuild.sync.verify import Verifier
    from envbuild.wheels.cache.wheelhouse import Built

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_STACK = "nemo"


@dataclass
class Session:
    """One run of a command: its directory, configuration and reporter."""

    as_json: bool
    quiet: bool

    @cached_property
    def project(self) -> Path:
        """The directory with the user's own envs/, lockfiles/ and out/."""
        return Path.cwd()

    @cached_property
    def site(self) -> Site:
        from envbuild.catalog.site import load_site

        return load_site()

    @cached_property
    def reporter(self) -> Reporter:
        return choose_reporter(self.quiet)

    @cached_property
    def store(self) -> LocalStore:
        from envbuild.store.local import LocalStore

        return LocalStore(self.site.cache_dir, self.reporter)

    @property
    def ledger_file(self) -> Path:
        """Where the ledger is."""
        return self.site.state_dir / "ledger.sqlite"

    @cached_property
    def context(self) -> Context:
        from envbuild.catalog.context import Context

        return Context(store=self.store, site=self.site, reporter=self.reporter)

    def logs(self, name: str) -> Path:
        """The folder for a command's logs: in the store, or a new one of its own where that is read-only."""
        if self.store.is_writable:
            return self.store.root / "logs" / name
        # A cache that others fill may be mounted read-only, and commands that only read it still have logs.
        folder = Path(tempfile.mkdtemp(prefix=f"envbuild-{name}-"))
        self.reporter.note(f"the cache directory {self.store.root} cannot be written: logs are in {folder}")
        return folder

    @cached_property
    def catalog(self) -> Catalog:
        from envbuild.catalog.catalog import Catalog

        catalog = Catalog.open(self.project)
        # A misspelled folder would else only show as an unknown name.
        for stray in catalog.strays():
            self.reporter.note(f"note: {stray}")
        return catalog

    def select(self, stack: str, target: str | None, base: str | None) -> Selection:
        """The stack, base and target of this command."""
        from envbuild.catalog.catalog import HostDistribution, select

        return select(self.catalog, stack, target, base, HostDistribution.here())

    def select_to_lock(self, stack: str, target: str | None, base: str | None) -> Selection:
        """The same for commands that need no target, since a lock belongs to a base."""
        from envbuild.catalog.catalog import HostDistribution, select_to_lock

        return select_to_lock(self.catalog, stack, target, base, HostDistribution.here())

    def select_locked(
        self, stack: str, target: str | None, base: str | None, name: str | None, *, needs_target: bool = True
    ) -> Selection:
        """The same for commands that take a lock: on its base, where the default one has none and none was named."""
        from envbuild.lock.lockdir import with_locked_base  # not every command takes a lock

        selection = (self.select if needs_target else self.select_to_lock)(stack, target, base)
        if base is not None:
            return selection
        return with_locked_base(selection, name or stack, self.project, self.reporter, target=target)

    def remotes(self, store: str = "", mode: str = "") -> tuple[Remote, ...]:
        """The remote stores in force, or the one that an option names: by its name, its address, or ``off``."""
        from envbuild.catalog.stores import choose_stores, stores_in_force

        known = self.site.known_stores
        chosen = choose_stores(known, store, mode, "--store") if store else stores_in_force(known, os.environ, mode)
        if not chosen:
            return ()
        from envbuild.store.connect import open_remote

        return tuple(
            replace(
                open_remote(chosen_store.url, endpoint=chosen_store.endpoint, ca_bundle=self.site.ca_bundle),
                name=chosen_store.name,
                reads=chosen_store.reads,
                writes=chosen_store.writes,
            )
            for chosen_store in chosen
        )

    def built_wheels(self, lock: LockDirectory, selection: Selection) -> dict[str, Built]:
        """The wheels of the wheelhouse that are those of the lock for the selection's target, by package."""
        from envbuild.wheels.cache.reuse import fitting_wheels
        from envbuild.wheels.sources import WheelSources

        sources = WheelSources(base=selection.base, site=self.site, store=self.store, reporter=self.reporter)
        return fitting_wheels(lock, selection.target, self.catalog, sources, self.remotes())

    def verifier(self, without: str) -> Verifier:
        """What verifies locks, with the wheels of the wheelhouse; ``without``: the command that does not."""
        from envbuild.image.verification import verification_places
        from envbuild.sync.verify import Verifier

        return Verifier(
            self.context,
            places_for=verification_places,
            without=without,
            wheels_for=self.built_wheels,
        )

    def done(self, result: dict[str, Json], *lines: str) -> None:
        """Print the result: the documented object on stdout with --json, else lines for people."""
        if self.as_json:
            # json.dumps escapes control characters and all beyond ASCII: nothing that a terminal acts on is left.
            put(json.dumps(result, indent=2) + "\n")
        elif not self.quiet:
            # Lines have texts of images, packages and results, whose control characters could repaint the terminal.
            put("".join(f"{printable_lines(line)}\n" for line in lines))


class PathArgument(click.Path):
    """A file or folder on the command line, as a :class:`~pathlib.Path`; an empty word names none."""

    def __init__(self, *, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(file_okay=file_okay, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        # Path("") is the current directory.
        if value == "":
            self.fail("it is empty; name a place, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)


def output_options(function: F) -> F:
    """Add ``--json`` and ``--quiet``; the command receives a :class:`Session` first."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout; everything else on stderr.")
    @click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors, and what --json prints.")
    @functools.wraps(function)
    def wrapper(*args: Any, as_json: bool, quiet: bool, **kwargs: Any) -> Any:
        return function(Session(as_json=as_json, quiet=quiet), *args, **kwargs)

    return wrapper  # type: ignore[return-value]


def selection_options(function: F) -> F:
    # Decorators apply from the last to the first, and click lists options in the order of the source.
    for option in (
        click.option("--base", metavar="NAME", help="The userland; default: the stack's default base for the target."),
        click.option("--target", metavar="NAME", help="The hardware generation (`envbuild list targets`)."),
        click.option(
            "--stack",
            metavar="NAME",
            default=DEFAULT_STACK,
            show_default=True,
            help="The components (`envbuild list stacks`).",
        ),
    ):
        function = option(function)
    return function


def name_option(function: F) -> F:
    """Add ``--name``, for commands that take a lock; :func:`find_lock` reads it."""
    return click.option("--name", metavar="NAME", help="The lock of this name instead of the stack's own.")(function)


def phases_option(text: str) -> Callable[[F], F]:
    """Add ``--phases``; :func:`parse_phases` reads it."""
    from envbuild.lock.lockfile import PHASE_FILES  # only commands that import it anyway have this option

    return click.option("--phases", default=",".join(PHASE_FILES), show_default=True, metavar="LIST", help=text)


def parse_phases(text: str) -> list[str]:
    """``main,compile`` as a list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def out_dir_option(function: F) -> F:
    from envbuild.image.output import OUT_DIR  # only commands that import it anyway have this option

    return click.option(
        "--out-dir",
        type=PathArgument(file_okay=False),
        default=OUT_DIR,
        show_default=True,
        help="Where images and certificates are put.",
    )(function)
