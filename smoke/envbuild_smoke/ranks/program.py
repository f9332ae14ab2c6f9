"""What rank processes run."""

import json
from dataclasses import asdict, dataclass

from envbuild_smoke.plan.json_reader import read_object


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """The module whose functions do the tasks, named as their kinds are, and modules that are imported before any.

    `case` trains a case, and reports; `bandwidth` returns the line of a sweep.
    """

    tasks: str = "envbuild_smoke.ranks.tasks"
    preload: tuple[str, ...] = ()

    def as_argument(self) -> str:
        """Return it as one command line argument."""
        # On the command line and not over the channel: an executed rank needs it before it has one.
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, text: str) -> "RankProgram":
        """Read what `as_argument` wrote."""
        return read_object(cls, json.loads(text), "program")
