"""What the layers that were read so far (those above) have, hide, and still look for."""

from __future__ import annotations

from collections.abc import Collection

from envbuild.rootfs.members import Member, Refusal, parent_of, shown

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
