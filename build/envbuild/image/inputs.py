"""What an image is made from, and the key that this gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from envbuild.catalog.catalog import Selection, definition_digest
from envbuild.catalog.data import data_root
from envbuild.core.digests import Json, digest_of, sha256_file, short
from envbuild.core.errors import ConfigurationError
from envbuild.image import node_requirements
from envbuild.image.base import StoredBase
from envbuild.image.base.standalone import COMPILER
from envbuild.image.checks import rules
from envbuild.image.layers import environment
from envbuild.image.layers.environment import EnvironmentInputs, StoredEnvironment
from envbuild.image.layers.groups import POLICY_FILE
from envbuild.image.sbom import reports
from envbuild.image.scan import models
from envbuild.image.squashfs.pack import Packing
from envbuild.lock.lockdir import lock_command
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.uv.program import uv_version
from envbuild.rootfs import gzip_writer
from envbuild.wheels.cache.wheelhouse import Built, digests_of

# Raised when an image made from the same inputs would come out differently.
FORMAT = 3
PROFILE = "containers/native/profile.sh"
RC_LOCAL = "containers/enroot/rc.local"


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """What an image is made from.

    Attributes:
        wheels: wheels of the wheelhouse for packages of phase compile, which are then not built.
        allow: codes of checks whose findings do not refuse the finished image.
        with_sqsh: whether a .sqsh is packed; the OCI layout is always made, it is the image's identity.
    """

    selection: Selection
    lock: LockDirectory
    wheels: Mapping[str, Built] = field(default_factory=dict)
    allow: frozenset[str] = frozenset()
    packing: Packing = field(default_factory=Packing)
    with_sqsh: bool = True

    def environment(self, base: StoredBase) -> EnvironmentInputs:
        """What the image's environment is made from."""
        return EnvironmentInputs(selection=self.selection, lock=self.lock, base=base, wheels=self.wheels)


@dataclass(frozen=True, kw_only=True)
class ImageParts:
    """What an image is put together from, once its base and its environment are in the store."""

    inputs: ImageInputs
    base: StoredBase
    environment: StoredEnvironment


def check_inputs(inputs: ImageInputs) -> None:
    """Refuse a base without a digest, and a lock that is not for the base as it is defined now.

    Raises:
        ConfigurationError: the base was not resolved, or the lock is for another base.
    """
    selection, lock = inputs.selection, inputs.lock
    selection.base.refuse_unresolved(selection.base_name)
    if lock.lock.base.definition_digest == definition_digest(selection.base):
        return
    raise ConfigurationError(
        f"the lock in {lock.path} was not made for base {selection.base_name} as it is now",
        why=f"It is for {lock.lock.base.name} with definition {short(lock.lock.base.definition_digest)}; "
        f"{selection.base_name} now has {short(definition_digest(selection.base))}.",
        fix=f"Lock again: {lock_command(lock)}",
    )


def image_key(inputs: ImageInputs, base_digest: str) -> str:
    """The key of an image: everything that decides its bytes, how it is checked and what is reported on it.

    Raises:
        MachineError: mksquashfs, whose version decides the bytes of a .sqsh, is not installed.
    """
    selection, lock = inputs.selection, inputs.lock.lock
    value: dict[str, Json] = {
        "format": FORMAT,
        "stack": selection.stack_name,
        "base": [selection.base_name, base_digest],
        # Not the target's name: targets of the same hardware share an image.
        "target": node_requirements.target_key(selection.target),
        "lock": [lock.digest, lock.source_date_epoch],
        "uv": uv_version(),
        "gzip": gzip_writer.ENCODER,
        "containers": [sha256_file(data_root() / name) for name in (PROFILE, RC_LOCAL, POLICY_FILE, COMPILER)],
        "sqsh": inputs.packing.key() if inputs.with_sqsh else None,
        # An image is checked and scanned again where envbuild does that otherwise than when it was made.
        "finishing": [environment.FORMAT, models.FORMAT, rules.FORMAT, reports.FORMAT],
        # Left out where there are none: such an image keeps the key that it had before there were wheels.
        **({"wheels": digests_of(inputs.wheels)} if inputs.wheels else {}),
        # A finding that was allowed once is refused again without --allow.
        **({"allow": tuple(sorted(inputs.allow))} if inputs.allow else {}),
    }
    return digest_of(value)
