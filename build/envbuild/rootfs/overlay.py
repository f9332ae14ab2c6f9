"""The layers of an image merged into what a container sees, as overlayfs would show it.

One pass over each layer, the uppermost first, so that nothing has to be kept but names: a name that was seen holds,
and what lies below it in lower layers is left out. The content of files is passed on while it is read; what has no
content comes at the end of its layer, so that hard links come after the file they are of.

As in overlayfs: a whiteout hides a name of the layers below its own, never of its own; a directory of an upper layer
wins over a link below, and nothing that lies below that link's target is seen through it; a directory that is in
several layers has the attributes of the uppermost that has an entry for it, and 755 of root where none has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from envbuild.rootfs.blobs import LayerBlob, open_blob
from envbuild.rootfs.layer_view import Above, LayerView
from envbuild.rootfs.members import Kind, Member, parent_of, refusals
from envbuild.rootfs.single_layer import members_of
from envbuild.rootfs.stream import Content
from envbuild.rootfs.tar_reader import read_tar

Entry: TypeAlias = "tuple[Member, Content | None]"
# Members as numbers of layer and of member.
Places: TypeAlias = "Collection[tuple[int, int]]"


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """What its caller puts over and under an image."""

    # Files that the caller has itself, so that those of the image are not seen.
    files: Collection[str] = ()
    # Directories that lie there empty.
    emptied: Collection[str] = ()
    # Directories to be there in the end, where nothing else is in the way.
    folders: Collection[str] = ()
    # The time of directories without an entry of their own.
    mtime: int = 0


NO_OVERLAY = Overlay()


def merged(layers: Sequence[LayerBlob], overlay: Overlay = NO_OVERLAY, superseded: Places = ()) -> Iterator[Entry]:
    """What is visible in the image of ``layers`` (lowest first): members, files with their content.

    A name comes once. The one exception: where a layer has a file twice, its last holds (as for tar); it comes again
    then with ``replaces`` set, and a caller that cannot take back what was written gives ``superseded``.

    Content must be read before the next member is asked for. Every layer is read whole, so at the end all digests that
    are known were compared: do not use what was made from the members before.

    Args:
        superseded: members to pass over, as :func:`superseded_in` found them.

    Raises:
        CheckRefusedError: a layer is damaged, is another one than stated, or holds what no layer may.
        MachineError: a layer cannot be read.
    """
    above = Above()
    # As if a layer over all others had these files and made these directories opaque.
    for name in overlay.files:
        above.add(name, directory=False)
    above.close((), overlay.emptied)
    for index in reversed(range(len(layers))):
        yield from _one_layer(layers, index, above, superseded)
    if layers:
        with _refusals(layers, 0):
            above.check_links_found()
    for folder in overlay.folders:
        _imply_below(folder, above)
    for name in sorted(above.implied):
        yield Member(name, Kind.DIRECTORY, 0o755, mtime=overlay.mtime), None


def superseded_in(layers: Sequence[LayerBlob]) -> set[tuple[int, int]]:
    """The members that a later one of the same layer replaces; reads all layers."""
    paths = set()
    for index, blob in enumerate(layers):
        last: dict[str, int] = {}
        for place, (member, _) in enumerate(members_of(blob)):
            if member.kind is Kind.DIRECTORY:
                continue
            if member.name in last:
                paths.add((index, last[member.name]))
            last[member.name] = place
    return paths


def _refusals(
    layers: Sequence[LayerBlob], index: int, pieces: Iterable[bytes] = ()
) -> contextlib.AbstractContextManager[None]:
    return refusals(layers[index].title, pieces, [layer.title for layer in layers])


def _one_layer(layers: Sequence[LayerBlob], index: int, above: Above, superseded: Places) -> Iterator[Entry]:
    blob, view = layers[index], LayerView(index, above)
    # Closing ends the thread that reads ahead, also where the caller stops early.
    with contextlib.closing(open_blob(blob)) as pieces, _refusals(layers, index, pieces):
        for place, (member, content) in enumerate(read_tar(pieces)):
            if superseded and (index, place) in superseded:
                continue
            if view.add(member) and content is not None:
                yield member, content.guarded(_refusals(layers, index, pieces))
    with _refusals(layers, index):
        for member in view.without_content():
            yield member, None
    if wanted := view.hidden_files():
        yield from _as_links(layers, index, wanted, superseded)
    with _refusals(layers, index):
        view.close()


def _as_links(
    layers: Sequence[LayerBlob], index: int, wanted: dict[str, list[Member]], superseded: Places
) -> Iterator[Entry]:
    """Files whose own names are hidden, under the names of their hard links: read once more for them."""
    for place, (member, content) in enumerate(members_of(layers[index])):
        if content is None or member.name not in wanted or (index, place) in superseded:
            continue
        first, *others = wanted[member.name]
        yield replace(member, name=first.name, layer=index), content
        for link in others:
            link.link = first.name
            yield link, None


def _imply_below(folder: str, above: Above) -> None:
    """Note a directory of the caller's, unless it or what it lies in is a link or a file of the image."""
    place = folder
    while place and place not in above.names:
        place = parent_of(place)
    if not place or above.names[place]:
        above.imply(folder)
