"""One layer while it is read: what it has, what of that is seen, and what it hides from the layers below."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from enum import IntEnum

from envbuild.rootfs.members import DEVICES, Kind, Member, Refusal, parent_of, shown, tidy_name

# Names of all layers together. Images with NeMo have 200,000 to 400,000.
MAX_NAMES = 3_000_000
MAX_NAMES_BYTES = 512 << 20


class Above:
    """The names that are decided, and where lower layers are not seen."""

    def __init__(self) -> None:
        # What is in the image, whatever lower layers have: whether it is a directory, by name.
        self.names: dict[str, bool] = {}
        # Directories among them of which only children were read so far.
        self.implied: set[str] = set()
        # Hard links to files of lower layers, by the file's name.
        self.wanted: dict[str, list[Member]] = {}
        # Names that lower layers cannot have any more, and places below which they are not seen.
        self._gone: set[str] = set()
        self._walls: set[str] = set()
        # What is_open found. Emptied after each layer, which may hide more.
        self._open: dict[str, bool] = {}
        self._name_bytes = 0

    def is_open(self, folder: str) -> bool:
        """Whether what lower layers have in ``folder`` can be seen."""
        pending = []
        while (known := self._open.get(folder)) is None:
            pending.append(folder)
            # overlayfs merges directories alone: a file or a link of an upper layer hides what a lower one has below
            # its name.
            if folder in self._walls or self.names.get(folder) is False or not folder:
                known = folder not in self._walls and self.names.get(folder) is not False
                break
            folder = parent_of(folder)
        for name in pending:
            self._open[name] = known
        return known

    def shows(self, name: str) -> bool:
        """Whether a lower layer's ``name`` can be seen, if no layer has it already."""
        return name not in self._gone and self.is_open(parent_of(name))

    def add(self, name: str, *, directory: bool) -> None:
        """Note a name that is in the image from now on, and the directories that it lies in."""
        self._add(name, directory=directory)
        self.imply(parent_of(name))

    def imply(self, folder: str) -> None:
        """Note a directory, and those that it lies in, of which nothing else is known yet."""
        while folder and folder not in self.names:
            self._add(folder, directory=True)
            self.implied.add(folder)
            folder = parent_of(folder)

    def _add(self, name: str, *, directory: bool) -> None:
        self.names[name] = directory
        self._name_bytes += len(name)
        if len(self.names) > MAX_NAMES or self._name_bytes > MAX_NAMES_BYTES:
            raise too_many()

    def close(self, gone: Collection[str], walls: Collection[str]) -> None:
        """A layer was read: it hides ``gone`` and what is below them from lower layers, and what is below ``walls``."""
        # OCI image-spec, layer.md, "Whiteouts": a whiteout hides the name and what is below it, an opaque one only the
        # latter.
        self._gone.update(gone)
        self._walls.update(gone, walls)
        self._open = {}

    def check_links_found(self) -> None:
        """After the lowest layer: refuse what is a hard link to nothing."""
        for target, links in self.wanted.items():
            raise dead_link(links[0], target)


def dead_link(link: Member, target: str) -> Refusal:
    """The refusal of a hard link to what is not there."""
    why = f"It is a hard link to {shown(target)}; its layer does not have it before that, and none below has it."
    return Refusal(link.name, why, layer=link.layer)


def too_many() -> Refusal:
    """The refusal of more names than are kept in memory."""
    return Refusal(
        "",
        f"The image has more than {MAX_NAMES} names, or more than {MAX_NAMES_BYTES >> 20} MiB of them.",
        "Nothing honest has as many files; do not use the image.",
    )


# OCI image-spec, layer.md, "Whiteouts".
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
DEVICE_FOLDER = "dev/"


class _Is(IntEnum):
    FILE = 0
    # A symbolic link, FIFO, device or hard link.
    OTHER = 1
    FOLDER = 2
    # A directory with something in it.
    FULL_FOLDER = 3


class LayerView:
    """Takes the members of a layer one by one, and decides whether each one's content is wanted now."""

    def __init__(self, index: int, above: Above) -> None:
        self._index = index
        self._above = above
        self._has: dict[str, _Is] = {}
        self._folders: dict[str, Member] = {}
        self._others: dict[str, Member] = {}
        # Files, links, ... of this layer that upper layers hide.
        self._hidden: set[str] = set()
        self._twice: set[str] = set()
        # The file that a hard link is of, by the link's name; and the links that are seen, by the file's name.
        self._file_of: dict[str, str] = {}
        self._links: dict[str, list[Member]] = {}
        # Files that hard links look for in lower layers.
        self._sought: set[str] = set()
        self._gone: set[str] = set()
        self._opaque: set[str] = set()

    def add(self, member: Member) -> bool:
        """Note a member; True when it is a file whose content is to be passed on now.

        Raises:
            Refusal: no layer may have it.
        """
        member.layer = self._index
        name = member.name
        if WHITEOUT in name and self._is_whiteout(member):
            return False
        if member.kind is Kind.DIRECTORY:
            if name:
                self._take_folder(member)
            return False
        self._enter(parent_of(name), name)
        before = self._has.get(name)
        if before in (_Is.FOLDER, _Is.FULL_FOLDER):
            raise Refusal(name, f"The layer has it as a directory and as a {member.kind.value}.")
        if member.kind is Kind.HARD_LINK:
            self._take_link(member, known=before is not None)
            return False
        if before is None:
            self._note(name, _Is.FILE)
            self._is_seen(name)
        else:
            self._take_again(member)
        return self._take_file(member)

    def _take_file(self, member: Member) -> bool:
        name = member.name
        if member.kind is Kind.FILE:
            self._has[name] = _Is.FILE
            return name not in self._hidden
        if member.kind in DEVICES and not name.startswith(DEVICE_FOLDER):
            raise Refusal(
                name,
                f"It is a {member.kind.value}. Containers get devices from the machine; those in dev are left out.",
                "Remove it where the image is made, or use another image.",
            )
        self._has[name] = _Is.OTHER
        self._others[name] = member
        return False

    def _is_whiteout(self, member: Member) -> bool:
        """Note a whiteout; False when the name only looks like one."""
        folder, _, last = member.name.rpartition("/")
        if f"/{WHITEOUT}" in f"/{folder}":
            raise Refusal(member.name, "It lies below a whiteout, which is not a directory.")
        if not last.startswith(WHITEOUT):
            return False
        hidden = last.removeprefix(WHITEOUT)
        if last != OPAQUE and (hidden in ("", ".", "..") or hidden.startswith(WHITEOUT)):
            what = "of a whiteout" if hidden.startswith(WHITEOUT) else "of a directory itself or of what it lies in"
            raise Refusal(member.name, f"It is a whiteout {what}.")
        if member.kind is Kind.DIRECTORY:
            raise Refusal(member.name, "It is a whiteout and a directory.")
        self._enter(folder, member.name)
        if last == OPAQUE:
            self._opaque.add(folder)
        else:
            self._gone.add(f"{folder}/{hidden}" if folder else hidden)
        if self._above.is_open(folder):
            self._above.imply(folder)
        return True

    def _enter(self, folder: str, name: str) -> None:
        """Note that ``folder`` is a directory of this layer with something in it."""
        while folder:
            kind = self._has.get(folder)
            if kind is _Is.FULL_FOLDER:
                return
            if kind is _Is.FILE or kind is _Is.OTHER:
                raise Refusal(name, f"It lies below {shown(folder)}, which is not a directory in this layer.")
            self._note(folder, _Is.FULL_FOLDER)
            folder = parent_of(folder)

    def _note(self, name: str, kind: _Is) -> None:
        self._has[name] = kind
        # Programs that unpack in order have made the link by now: to the file of a lower layer.
        if name in self._sought:
            raise Refusal(name, "A hard link to it comes before it in the layer.")
        if len(self._has) > MAX_NAMES:
            raise too_many()

    def _is_seen(self, name: str) -> bool:
        if name not in self._above.names and self._above.shows(name):
            self._above.add(name, directory=False)
            return True
        self._hidden.add(name)
        return False

    def _take_folder(self, member: Member) -> None:
        name, above = member.name, self._above
        self._enter(parent_of(name), name)
        before = self._has.get(name)
        if before is _Is.FILE or before is _Is.OTHER:
            raise Refusal(name, "The layer has it as a directory and as something else.")
        if before is None:
            self._note(name, _Is.FOLDER)
        if name in self._folders:
            self._folders[name] = member
        elif above.shows(name) and (name not in above.names or name in above.implied):
            above.add(name, directory=True)
            above.implied.discard(name)
            self._folders[name] = member

    def _take_link(self, member: Member, *, known: bool) -> None:
        name = member.name
        target = tidy_name(member.link, absolute=True)
        # A link to another name of a file is one to the file.
        target = self._file_of.get(target, target)
        if known:
            if self._file_of.get(name) == target:
                return  # the same once more
            raise Refusal(name, "The layer has it twice, and once as a hard link.")
        if target == name:
            raise Refusal(name, "It is a hard link to itself.")
        kind = self._has.get(target)
        if kind in (_Is.FOLDER, _Is.FULL_FOLDER) or not target:
            raise Refusal(name, f"It is a hard link to {shown(target)}, a directory.")
        self._note(name, _Is.OTHER)
        self._file_of[name] = target
        if kind is None:
            self._sought.add(target)
        if self._is_seen(name):
            self._links.setdefault(target, []).append(member)

    def _take_again(self, member: Member) -> None:
        """A name that the layer had already; what comes last holds."""
        name = member.name
        if name in self._file_of:
            raise Refusal(name, "The layer has it twice, and once as a hard link.")
        self._twice.add(name)
        if self._others.pop(name, None) is None and name not in self._hidden:
            member.replaces = True  # a file that was passed on

    def without_content(self) -> Iterator[Member]:
        """At the end of the layer: its directories and links."""
        yield from self._folders.values()
        for name, member in self._others.items():
            if name not in self._hidden and member.kind not in DEVICES:
                yield member
        self._find_wanted()
        for target, links in list(self._links.items()):
            if target in self._twice:
                raise Refusal(links[0].name, f"It is a hard link to {shown(target)}, which the layer has twice.")
            if target in self._others:
                yield from _twins(self._links.pop(target), self._others[target])
            elif target in self._has and target not in self._hidden:
                for link in self._links.pop(target):
                    link.link = target
                    yield link

    def _find_wanted(self) -> None:
        """Hard links of upper layers whose file is in this one."""
        wanted = self._above.wanted
        for target in list(wanted):
            kind = self._has.get(target)
            if kind is None:
                continue
            links = wanted.pop(target)
            if kind in (_Is.FOLDER, _Is.FULL_FOLDER):
                raise dead_link(links[0], target)
            self._links.setdefault(self._file_of.get(target, target), []).extend(links)

    def hidden_files(self) -> dict[str, list[Member]]:
        """Links, by the name of their file, that come to be it: it is in this layer, and its own name is hidden."""
        return {target: links for target, links in self._links.items() if target in self._has}

    def close(self) -> None:
        """Hand on to the layers below what this one hides and looks for."""
        above = self._above
        for target, links in self._links.items():
            if target not in self._has:
                above.wanted.setdefault(target, []).extend(links)
        for target, links in above.wanted.items():
            if target in self._gone or self._hides_below(parent_of(target)):
                raise dead_link(links[0], target)
        # What upper layers hide here hides in its turn what is below it: overlayfs merges directories alone, so a file
        # under the name of a directory ends the merging (Linux, filesystems/overlayfs.rst).
        above.close(self._gone | self._hidden, self._opaque)

    def _hides_below(self, folder: str) -> bool:
        """Whether this layer alone hides what lower layers have in ``folder``."""
        while True:
            if folder in self._gone or folder in self._opaque or self._has.get(folder) in (_Is.FILE, _Is.OTHER):
                return True
            if not folder:
                return False
            folder = parent_of(folder)


def _twins(links: list[Member], member: Member) -> Iterator[Member]:
    """Hard links to a symbolic link or a FIFO: each becomes one of its own."""
    if member.kind in DEVICES:
        raise Refusal(links[0].name, f"It is a hard link to {shown(member.name)}, a {member.kind.value}.")
    for link in links:
        yield replace(member, name=link.name, layer=link.layer)
