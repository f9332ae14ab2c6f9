"""Whether a container can change into its working directory, as far as the image's paths show."""

from __future__ import annotations

from envbuild.core.errors import CheckRefusedError
from envbuild.rootfs.members import Kind, Member, shown

# A runtime mounts over these when the container starts.
_MOUNTED = ("dev", "proc", "run", "sys", "tmp")
# The most that Linux follows in one path.
MAX_LINKS = 40


class DirectoryIndex:
    """The directories and links of an image, noted while it is merged."""

    def __init__(self) -> None:
        self._folders: set[str] = set()
        self._links: dict[str, str] = {}

    def see(self, member: Member) -> None:
        if member.kind is Kind.DIRECTORY:
            self._folders.add(member.name)
        elif member.kind is Kind.SYMLINK:
            self._links[member.name] = member.link
        # A hard link to a symbolic link is that link.
        elif member.kind is Kind.HARD_LINK and member.link in self._links:
            self._links[member.name] = self._links[member.link]

    def check(self, workdir: str) -> None:
        """Refuse a working directory that is not a directory; one that is missing behind a link may still be made.

        Raises:
            CheckRefusedError: a file or a link that leads nowhere is in the way.
        """
        own, linked = _parts(workdir), list[str]()
        place, followed = "", 0
        while linked or own:
            is_own = not linked
            part = own.pop() if is_own else linked.pop()
            if part == "..":
                place = place.rpartition("/")[0]
                continue
            name = f"{place}/{part}".lstrip("/")
            if name in self._links and followed < MAX_LINKS:
                text = self._links[name]
                linked += _parts(text)
                place, followed = "" if text.startswith("/") else place, followed + 1
            elif name in self._folders:
                place = name
            elif name.partition("/")[0] in _MOUNTED or (is_own and followed):
                return
            else:
                raise _refused(workdir, name, followed)


def _parts(path: str) -> list[str]:
    """The parts of a path, the first one last."""
    return [part for part in path.split("/") if part not in ("", ".")][::-1]


def _refused(workdir: str, name: str, followed: int) -> CheckRefusedError:
    leads = f"It leads to {shown('/' + name)}, which is not a directory of the image" if followed else ""
    return CheckRefusedError(
        f"the image's working directory {shown(workdir)} is not a directory",
        why=(leads or f"{shown('/' + name)} is in the image, and is not a directory") + ". No container would start.",
        fix="Give the image (or its base) another WORKDIR, or put a directory there.",
    )
