"""``envbuild importer get|release``: what pyxis runs in the place of ``enroot import``.

Protocol: https://github.com/NVIDIA/pyxis/blob/master/importers/README.md
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from envbuild.cli.common import Session, as_command, command_group
from envbuild.cli.options import argument
from envbuild.cli.pull import request_of, result_of
from envbuild.publish.importer import note_step
from envbuild.publish.pull import pull


@dataclass(frozen=True, kw_only=True)
class GetOptions:
    uri: str = argument()


@as_command("get", GetOptions)
def get_command(session: Session, options: GetOptions) -> None:
    """Verify the certificate of the image URI and print the path of its .sqsh in the store.

    URI is what `envbuild pull` takes, or enroot's form of it: docker://REGISTRY#REPO:TAG. ENVBUILD_PULL_TARGET,
    ENVBUILD_PULL_MAX_AGE and ENVBUILD_PULL_POLICY set --target, --max-age and --policy.
    """
    target, max_age, policy = (os.environ.get(f"ENVBUILD_PULL_{name}") for name in ("TARGET", "MAX_AGE", "POLICY"))
    pulled = pull(request_of(session, options.uri, target, max_age, policy), session.context)
    # For enroot's hook, which lets a step start no image but one that was verified.
    note_step(pulled.path)
    # The first line, and alone: pyxis takes it for the path, whatever it says.
    session.done(result_of(pulled), str(pulled.path))


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions:
    uri: str | None = argument(required=False)


@as_command("release", ReleaseOptions)
def release_command(session: Session, options: ReleaseOptions) -> None:  # noqa: ARG001 - whatever pyxis says
    """Do nothing; pyxis requires this command. The image stays in the store for the next step."""
    session.done({"released": True})


command = command_group(
    "importer",
    "Serve certified images to pyxis: install containers/enroot/importer.sh and name it in plugstack.conf.",
    *(get_command, release_command),
)
