"""The tags of a publication: an immutable one of its lock and target, and a moving one for the newest certified image.

``nemo-main-3f2a9c01b7de-h200`` and ``nemo-main-h200``. In front of both stands ``uncertified-`` where the image was
published without a certificate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from envbuild.catalog.stack import Stack
from envbuild.core.digests import short
from envbuild.core.errors import ConfigurationError, PublicationRefusedError
from envbuild.lock.models import Lock
from envbuild.publish.models import TAG_PATTERN, Publication

INDEX_TAG = "envbuild-index"
UNCERTIFIED = "uncertified-"
# Of the tag of docker's manifest, which lies next to the OCI manifest's own.
DOCKER_SUFFIX = "-docker"
# Of the tags of a publication's own record, and of the one that takes it back.
PUBLICATION_SUFFIX = "-publication"
REVOKED_SUFFIX = "-revoked"
# The reason of a refusal: another publisher was quicker, and there is a next tag.
TAG_TAKEN = "tag-taken"
# Another image of the same lock and target (a rebuilt base, another envbuild) has the next number: -r2.
REVISION = "-r{number}"
_REVISION = r"(-r[1-9][0-9]*)?"
_IMMUTABLE = r".*-[0-9a-f]{12}-[a-z0-9][a-z0-9._-]*"
# What this program, and the referrers tag schema of the OCI distribution-spec 1.1, write under such tags.
_RESERVED = {
    rf".*({DOCKER_SUFFIX}|{PUBLICATION_SUFFIX}|{REVOKED_SUFFIX})": "Tags with this ending belong to other tags.",
    INDEX_TAG: "It names the index.",
    r"sha256-.*": "Tags of digests name what refers to an image, or that it was revoked.",
    r"base-.*-[0-9a-f]{12}": "Such tags name bases.",
    _IMMUTABLE: "It has the form of an immutable tag, LOCK-<12 digits>-TARGET.",
}


@dataclass(frozen=True, kw_only=True)
class Tags:
    immutable: str
    moving: str

    def revision(self, number: int) -> Tags:
        """The tags of another image of the same lock and target; the first has no number."""
        ending = REVISION.format(number=number) if number > 1 else ""
        return Tags(immutable=self.immutable + ending, moving=self.moving)


def tags_of(lock: Lock, lock_name: str, stack: Stack, target: str, *, certified: bool = True) -> Tags:
    """The tags under which the image of a lock for a target is published.

    Args:
        lock_name: the stack's name, or the lock's own (``envbuild lock --name``).

    Raises:
        ConfigurationError: the names in it make a tag that no registry takes.
    """
    words = [lock_name]
    if branch := followed_branch(lock, stack):
        words.append(re.sub(r"[^A-Za-z0-9._-]", "-", branch))
    # The default `host` is another base on another machine, and a registry serves them all.
    if lock.base.name != next((entry.default_base for entry in stack.builds if entry.target == target), None):
        words.append(lock.base.name)
    front = ("" if certified else UNCERTIFIED) + "-".join(words)
    tags = Tags(immutable=f"{front}-{short(lock.digest)}-{target}", moving=f"{front}-{target}")
    longest = tags.revision(1000).immutable + PUBLICATION_SUFFIX
    if not re.match(TAG_PATTERN, longest):
        raise ConfigurationError(
            f"no registry takes the tag {tags.immutable} with all its endings",
            why="A tag has at most 128 letters, digits, '.', '_' and '-' (OCI distribution-spec).",
            fix="Give the lock a shorter name: envbuild lock --name NAME.",
        )
    return tags


def refuse_reserved(moving_tag: str) -> None:
    """Refuse a moving tag that names something else, here or for another publisher.

    Raises:
        PublicationRefusedError: it is internal, has the form of an immutable one, or is no tag of a registry.
    """
    if not re.fullmatch(TAG_PATTERN, moving_tag + DOCKER_SUFFIX):
        raise PublicationRefusedError(
            f"{moving_tag!r:.150} cannot be a moving tag",
            why="A tag has letters, digits, '.', '_' and '-', and begins with none of '.' and '-'; at most 128, with "
            f"{DOCKER_SUFFIX}, the ending of the tag next to it.",
            fix="Name another one: --tag NAME.",
            reason="reserved-tag",
        )
    for pattern, why in _RESERVED.items():
        if re.fullmatch(pattern, moving_tag):
            raise PublicationRefusedError(
                f"{moving_tag} cannot be a moving tag",
                why=why,
                fix="Name another one: --tag NAME. A lock's own name (--name) is part of its tag.",
                reason="reserved-tag",
            )


def is_immutable(tag: str) -> bool:
    """Whether a tag has the form of an image's own, which nothing else is published under."""
    return bool(re.fullmatch(_IMMUTABLE, tag))


def revocation_tags(publication: Publication) -> tuple[str, str]:
    """The tags of which each revokes a publication: the immutable one's, and that of the image under whatever tag."""
    return (publication.tag + REVOKED_SUFFIX, publication.oci_digest.replace(":", "-") + REVOKED_SUFFIX)


def wrong_tag(publication: Publication, *, derived: bool) -> str:
    """The tag of a certified publication that does not fit its lock and target; empty if both fit.

    Args:
        derived: nothing but what the certificate states may be in them: neither a branch, nor a name of its own.
    """
    name = publication.stack if derived else publication.lock_name
    between = f"(-{re.escape(publication.base)})?" if derived else "(-.+)?"
    digits = f"-{short(publication.lock_digest)}"
    form = re.fullmatch(
        rf"({re.escape(name)}{between}){digits}-({re.escape(publication.target)}){_REVISION}", publication.tag
    )
    if form is None:
        return publication.tag
    moving = f"{form[1]}-{publication.target}"
    return publication.moving_tag if derived and publication.moving_tag != moving else ""


def followed_branch(lock: Lock, stack: Stack) -> str:
    """The branch of the stack's anchor that the lock follows; empty where it follows none."""
    anchor = lock.components.get(stack.anchor or "")
    return anchor.asked if anchor is not None and anchor.follows else ""
