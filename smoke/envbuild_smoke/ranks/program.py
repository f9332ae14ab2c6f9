"""What rank processes run."""

import json
from dataclasses import asdict, dataclass

from envbuild_smoke.plan.json_reader import read_object


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """The function ("module:function") for each kind of task, and the modules that are imported before any.

    `entry` trains a case; `compare` returns how its final weights differ from the baseline's; `bandwidth`
    returns the points of a sweep. `modules` are imported only to see whether the environment has them.
    """

    entry: str = "envbuild_smoke.ranks.tasks:train_case"
    compare: str = "envbuild_smoke.ranks.tasks:compare_weights"
    bandwidth: str = "envbuild_smoke.ranks.tasks:measure_bandwidth"
    preload: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def as_argument(self) -> str:
        """Return it as one command line argument."""
        # On the command line and not over the channel: an executed rank needs it before it has one.
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, text: str) -> "RankProgram":
        """Read what `as_argument` wrote."""
        return read_object(cls, json.loads(text), "program")

    def function(self, task: str) -> str:
        """Return the function for a kind of task: "case", "compare" or "bandwidth"."""
        return {"case": self.entry, "compare": self.compare, "bandwidth": self.bandwidth}[task]
