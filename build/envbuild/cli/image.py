"""``envbuild image``."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.command import CommandGroup, given_options, hands_over
from envbuild.cli.common import Session, name_option, out_dir_option, output_options, selection_options
from envbuild.cli.images import COMMANDS
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
from envbuild.lock.lockdir import find_lock, lock_command

FORMATS = ("docker", "oci", "sqsh")
# auto is native, for scripts that name it; docker is refused with what replaces it.
IMAGE_BUILDERS = ("auto", "native", "docker")


def parse_formats(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:  # noqa: ARG001
    """``sqsh,oci`` as a tuple in a fixed order."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    if not names or any(name not in FORMATS for name in names):
        raise click.BadParameter(f"{value!r}: name one or more of {', '.join(FORMATS)}, separated by commas")
    return tuple(name for name in FORMATS if name in names)


def parse_builder(context: click.Context, parameter: click.Parameter, value: str) -> str:  # noqa: ARG001
    """Refuse the builder that is gone."""
    if value == "docker":
        raise UsageError(
            "--builder docker was removed",
            why="Images are built by the native builder, without a daemon.",
            fix="To build with docker, buildx, podman or kaniko: envbuild export --format dockerfile --output DIR\n"
            "To load the native image into a daemon: envbuild image --format docker",
        )
    return value


@click.group("image", cls=CommandGroup, invoke_without_command=True)
@selection_options
@name_option
@click.option(
    "--format",
    "formats",
    callback=parse_formats,
    default="oci,sqsh",
    show_default=True,
    metavar="LIST",
    help="Any of oci, sqsh and docker (into the local daemon).",
)
@click.option(
    "--builder",
    type=click.Choice(IMAGE_BUILDERS),
    callback=parse_builder,
    default="native",
    show_default=True,
    help="native; for a Dockerfile see `envbuild export`.",
)
@click.option("--refresh-base", is_flag=True, help="Make the base anew from the distribution's current packages.")
@click.option("--locked-base", is_flag=True, help="Refuse where the base that the lock was verified on cannot be had.")
@click.option(
    "--allow",
    multiple=True,
    metavar="CODE",
    type=click.Choice(sorted(RULES)),
    help="Accept this check's findings in the finished image; the record lists them.",
)
@click.option(
    "--sqsh-compression",
    metavar="NAME[:LEVEL]",
    default=str(DEFAULT),
    show_default=True,
    help=f"Compression of the .sqsh, for nodes with old tools: {', '.join(NAMES)}.",
)
@click.option(
    "--sqsh-builder",
    type=click.Choice(["native", "enroot"]),
    default="native",
    show_default=True,
    help="native: pack the .sqsh from the layers. `enroot` was removed; the error names what replaces it.",
)
@click.option("--cluster", metavar="NAME", help="Refuse a .sqsh that the nodes of this cluster cannot read.")
@out_dir_option
@output_options
@click.pass_context
def command(
    context: click.Context,
    session: Session,
    stack: str,
    base: str | None,
    target: str | None,
    name: str | None,
    formats: tuple[str, ...],
    builder: str,  # noqa: ARG001 - checked by its callback
    refresh_base: bool,
    locked_base: bool,
    allow: tuple[str, ...],
    sqsh_compression: str,
    sqsh_builder: str,
    cluster: str | None,
    out_dir: Path,
) -> None:
    """Build the image of a lock for a target: OCI layout, enroot .sqsh, and in a docker daemon.

    No daemon and no registry are needed. The same lock and base give the same digests. An existing image is reused.
    """
    if hands_over(context):
        return
    _refuse_unused(context)
    choice = _base_choice(refresh=refresh_base, locked=locked_base)
    if sqsh_builder == "enroot":
        raise _no_enroot()
    readable = session.catalog.cluster(cluster).sqsh_compression if cluster is not None else ()
    # With what the cluster reads: a .sqsh from the store may have another compression than the one asked for.
    packing = Packing(compression=Compression.parse(sqsh_compression), readable=readable)
    # Before anything is built: an image takes minutes.
    if cluster is not None and "sqsh" in formats:
        check_readable(packing.compression, readable, cluster)
    selection = session.select_locked(stack, target, base, name)
    lock = find_lock(session.project, selection, name)
    current = not is_older(lock.lock, selection)
    if not current:
        session.reporter.note(f"note: the lock is older than its stack or base; `{lock_command(lock)}` would renew it")
    # Before the build too: what is in the image's place may not be envbuild's, or not writable.
    check_place(out_dir, name or selection.stack_name, selection.base_name, selection.target_name)
    inputs = ImageInputs(
        selection=selection,
        lock=lock,
        wheels=session.built_wheels(lock, selection),
        allow=frozenset(allow),
        packing=packing,
        with_sqsh="sqsh" in formats,
    )
    made = make_image(inputs, formats, out_dir, session.context, lock_name=name, choice=choice)
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
    """What was done, and where the image is."""
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


def _no_enroot() -> UsageError:
    return UsageError(
        "--sqsh-builder enroot was removed",
        why="envbuild packs the files and modes that `enroot import` makes, and gets the same bytes each time.",
        fix="Leave the option out. For one made by enroot, add --format docker and run `enroot import dockerd://TAG`; "
        "or push the OCI layout to a registry and run `enroot import docker://REGISTRY#IMAGE:TAG`.",
    )


def _refuse_unused(context: click.Context) -> None:
    """Refuse options that have no effect.

    Raises:
        UsageError: an option has none.
    """
    formats = context.params["formats"]
    if "sqsh" not in formats:
        for name in sorted({"sqsh_compression", "sqsh_builder"} & given_options(context)):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} has no effect without a .sqsh",
                why=f"The formats are {','.join(formats)}.",
                fix=f"Add sqsh to --format, or leave {option} out.",
            )


for _command in (*COMMANDS, resolve):
    command.add_command(_command)
