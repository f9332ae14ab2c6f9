"""Shared parts of all commands: options, the session that they make, and how results are printed."""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.command import Command, CommandGroup, hands_over
from envbuild.cli.options import T, add_options, collect, flag, include, option, parse_list
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

DEFAULT_STACK = "nemo"


class PathArgument(click.Path):
    """A file or folder on the command line, as a :class:`~pathlib.Path`; an empty word names none."""

    def __init__(self, *, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(file_okay=file_okay, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        # Path("") is the current directory.
        if value == "":
            self.fail("it is empty; name a place, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)


ANY_PATH, FILE, FOLDER = PathArgument(), PathArgument(dir_okay=False), PathArgument(file_okay=False)


def target_name() -> Any:
    return option("--target NAME", "The hardware generation (`envbuild list targets`).")


def base_name() -> Any:
    return option("--base NAME", "The base system; default: the stack's default for the target.")


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """The stack, the base and the target of a command."""

    stack: str = option("--stack NAME", "The stack (`envbuild list stacks`).", default=DEFAULT_STACK)
    target: str | None = target_name()
    base: str | None = base_name()


def lock_name() -> Any:
    return option("--name NAME", "Use the lock of this name instead of the stack's.")


@dataclass(frozen=True, kw_only=True)
class LockedOptions:
    """A lock by its name, and the target that it is used for."""

    selection: SelectionOptions = include(SelectionOptions)
    name: str | None = lock_name()


def out_dir() -> Any:
    from envbuild.image.output import OUT_DIR  # only commands that import it anyway have this option

    return option("--out-dir", "Where images and certificates are put.", type=FOLDER, default=OUT_DIR)


def phases(text: str) -> Any:
    from envbuild.lock.lockfile import PHASE_FILES  # only commands that import it anyway have this option

    return option("--phases LIST", text, convert=parse_list, default=",".join(PHASE_FILES))


@dataclass
class Session:
    """One run of a command: its directory, configuration and reporter."""

    as_json: bool = flag("--json", "Print one JSON object on stdout; everything else on stderr.")
    quiet: bool = flag("--quiet -q", "Print only errors and the output of --json.")

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
        """The path of the ledger."""
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
        """The stack and base of a command that needs no target, since a lock belongs to a base."""
        from envbuild.catalog.catalog import HostDistribution, select_to_lock

        return select_to_lock(self.catalog, stack, target, base, HostDistribution.here())

    def select_locked(self, options: LockedOptions, *, needs_target: bool = True) -> Selection:
        """The selection of a command that uses a lock: on the base of an existing lock, unless a base was named."""
        from envbuild.lock.lockdir import with_locked_base  # not every command takes a lock

        stack, target, base = options.selection.stack, options.selection.target, options.selection.base
        selection = (self.select if needs_target else self.select_to_lock)(stack, target, base)
        if base is not None:
            return selection
        return with_locked_base(selection, options.name or stack, self.project, self.reporter, target=target)

    def locked(self, options: LockedOptions, *, needs_target: bool = True) -> tuple[Selection, LockDirectory]:
        """The stack, base and target of a command that uses a lock, and that lock."""
        from envbuild.lock.lockdir import find_lock

        selection = self.select_locked(options, needs_target=needs_target)
        lock = find_lock(self.project, selection, options.name)
        if addresses := lock.addresses:
            # The site's own word on an index comes first: it may be a mirror.
            self.site = self.site.model_copy(update={"indexes": {**addresses, **self.site.indexes}})
        return selection, lock

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
        """The verifier of locks, with the wheels of the wheelhouse; ``without``: the command that skips it."""
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


def as_command(
    name: str, options: type[T], subcommands: Sequence[click.Command] = ()
) -> Callable[[Callable[[Session, T], None]], click.Command]:
    """A decorator that makes a command of a function with a session and options.

    Args:
        options: the dataclass of its options; every command has those of a session, too.
        subcommands: commands below it; where one of them is named, the function is not called.
    """

    def decorate(function: Callable[[Session, T], None]) -> click.Command:
        @add_options(options)
        @add_options(Session)
        def call(**values: Any) -> None:
            if not (subcommands and hands_over(click.get_current_context())):
                function(collect(Session, values), collect(options, values))

        text = inspect.cleandoc(function.__doc__ or "")
        if not subcommands:
            return click.command(name, cls=Command, help=text)(call)
        group = click.group(name, cls=CommandGroup, help=text, invoke_without_command=True)(call)
        for subcommand in subcommands:
            group.add_command(subcommand)
        return group

    return decorate


@dataclass(frozen=True)
class NoOptions:
    pass


def command_group(name: str, text: str, *subcommands: click.Command) -> click.Command:
    """A command that does nothing itself."""

    def refuse(session: Session, options: NoOptions) -> None:  # noqa: ARG001
        # click alone would print the help, and end with 0 before 8.2 and with 2 from it on.
        names = ", ".join(str(subcommand.name) for subcommand in subcommands)
        raise click.UsageError(f"which command? There are: {names}", click.get_current_context())

    refuse.__doc__ = text
    return as_command(name, NoOptions, subcommands)(refuse)
