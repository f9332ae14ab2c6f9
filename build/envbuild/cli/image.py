"""``envbuild image``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.cli.command import given_options
from envbuild.cli.common import LockedOptions, Session, as_command, out_dir
from envbuild.cli.images import COMMANDS
from envbuild.cli.options import flag, include, no_effect, option, parse_list
from envbuild.cli.resolve import command as resolve
from envbuild.core.digests import short
from envbuild.core.errors import UsageError
from envbuild.core.text import shown
from envbuild.image.build import BaseChoice
from envbuild.image.checks.rules import RULES
from envbuild.image.image import ImageResult, make_image
from envbuild.image.inputs import ImageInputs
from envbuild.image.output import OCI_DIR, SQSH_FILE, check_place
from envbuild.image.squashfs.compression import DEFAULT, NAMES, Compression, check_readable
from envbuild.image.squashfs.pack import Packing
from envbuild.lock.inputs.request import is_older
from envbuild.lock.lockdir import lock_command

FORMATS = ("docker", "oci", "sqsh")


def parse_formats(text: str) -> tuple[str, ...]:
    """``sqsh,oci`` as a tuple in a fixed order."""
    names = parse_list(text)
    if not names or any(name not in FORMATS for name in names):
        raise ValueError(f"{text!r}: name one or more of {', '.join(FORMATS)}, separated by commas")
    return tuple(name for name in FORMATS if name in names)


@dataclass(frozen=True, kw_only=True)
class Options:
    locked: LockedOptions = include(LockedOptions)
    formats: tuple[str, ...] = option(
        "--format LIST",
        "Any of oci, sqsh and docker (into the local daemon).",
        convert=parse_formats,
        default="oci,sqsh",
    )
    refresh_base: bool = flag("--refresh-base", "Rebuild the base from the distribution's current packages.")
    locked_base: bool = flag("--locked-base", "Fail if the base that the lock was verified on is not available.")
    allow: tuple[str, ...] = option(
        "--allow CODE",
        "Accept this check's findings in the finished image; may be repeated; the record lists them.",
        multiple=True,
        type=click.Choice(sorted(RULES)),
    )
    sqsh_compression: str = option(
        "--sqsh-compression NAME[:LEVEL]",
        f"Compression of the .sqsh, for nodes with old tools: {', '.join(NAMES)}.",
        default=str(DEFAULT),
    )
    cluster: str | None = option("--cluster NAME", "Fail if this cluster's nodes cannot read the .sqsh's compression.")
    out_dir: Path = out_dir()


@as_command("image", Options, (*COMMANDS, resolve))
def command(session: Session, options: Options) -> None:
    """Build the image of a lock for a target: OCI layout, enroot .sqsh or docker image.

    Needs no daemon and no registry. The same lock and base give the same digests. An existing image is reused.
    """
    formats, cluster, name = options.formats, options.cluster, options.locked.name
    _refuse_unused(formats)
    choice = _base_choice(refresh=options.refresh_base, locked=options.locked_base)
    readable = session.catalog.cluster(cluster).sqsh_compression if cluster is not None else ()
    # With what the cluster reads: a .sqsh from the store may have another compression than the one asked for.
    packing = Packing(compression=Compression.parse(options.sqsh_compression), readable=readable)
    # Before anything is built: an image takes minutes.
    if cluster is not None and "sqsh" in formats:
        check_readable(packing.compression, readable, cluster)
    selection, lock = session.locked(options.locked)
    current = not is_older(lock.lock, selection)
    if not current:
        session.reporter.note(f"note: the lock is older than its stack or base; `{lock_command(lock)}` would renew it")
    # Before the build too: what is in the image's place may not be envbuild's, or not writable.
    check_place(options.out_dir, name or selection.stack_name, selection.base_name, selection.target_name)
    inputs = ImageInputs(
        selection=selection,
        lock=lock,
        wheels=session.built_wheels(lock, selection),
        allow=frozenset(options.allow),
        packing=packing,
        with_sqsh="sqsh" in formats,
    )
    made = make_image(inputs, formats, options.out_dir, session.context, lock_name=name, choice=choice)
    record = made.image.record
    session.done(
        {
            "built": made.built,
            "placed": made.placed,
            "path": str(made.image.path.resolve()),
            "lock_is_current": current,
            "docker": {"tag": made.tag, "image_id": record.config_digest, "loaded": made.loaded}
            if made.engine
            else None,
            "record": record.model_dump(mode="json", by_alias=True),
        },
        *_summary(made),
    )


def _summary(made: ImageResult) -> list[str]:
    """The lines for people: the state of the image, and where it is."""
    image, record = made.image, made.image.record
    if not (made.built or made.placed or made.loaded):
        state = "nothing to do: the image is there"
    else:
        state = "built" if made.built else "put in place from the store"
    lines = [f"{state}: {record.stack} on {record.base} for {record.target}, lock {short(record.lock_digest)}"]
    lines.append(f"{shown(image.path / OCI_DIR)}  {record.oci_digest}")
    if record.sqsh_digest:
        lines.append(f"{shown(image.path / SQSH_FILE)}  {record.sqsh_digest}")
    lines += [f"from the wheelhouse: {package} {short(digest)}" for package, digest in record.wheels.items()]
    lines += [f"not checked: {module}: {reason}" for module, reason in record.not_checked.items()]
    return [*lines, *([f"{made.tag}  {record.config_digest} in {made.engine}"] if made.engine else [])]


def _base_choice(*, refresh: bool, locked: bool) -> BaseChoice:
    if refresh and locked:
        raise UsageError(
            "--refresh-base and --locked-base exclude each other",
            why="One makes the base anew; the other takes none but that of the lock.",
            fix="Leave one of them out.",
        )
    return BaseChoice.ANEW if refresh else BaseChoice.LOCKED if locked else BaseChoice.USUAL


def _refuse_unused(formats: tuple[str, ...]) -> None:
    """Refuse a compression of a .sqsh that is not made.

    Raises:
        UsageError: one was named.
    """
    if "sqsh" not in formats and "sqsh_compression" in given_options(click.get_current_context()):
        why = f"The formats are {','.join(formats)}."
        raise no_effect("--sqsh-compression", "without a .sqsh", why, "Add sqsh to --format")
