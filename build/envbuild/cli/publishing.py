"""The options of commands that publish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envbuild.cli.options import flag, no_effect, option


@dataclass(frozen=True, kw_only=True)
class SqshOptions:
    """Whether and where the .sqsh is published."""

    sqsh_to: str | None = option(
        "--sqsh-to PLACE", "Upload the .sqsh to s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or DIR instead of the registry."
    )
    no_sqsh: bool = flag("--no-sqsh", "Do not publish the .sqsh.")

    def check(self) -> None:
        """Refuse a place for a .sqsh that is not published.

        Raises:
            UsageError: both options are given.
        """
        if self.no_sqsh and self.sqsh_to:
            raise no_effect("--sqsh-to", "with --no-sqsh", "No .sqsh is published then.")


def policy_name() -> Any:
    return option(
        "--policy NAME", "The policy: which certificates are accepted (`envbuild list policies`).", default="default"
    )
