"""The result of a bisection, as frozen types."""

from __future__ import annotations

from dataclasses import dataclass

from envbuild.core.digests import Json
from envbuild.nightly.bisect.moved import MovedGroup, MovedPackage


@dataclass(frozen=True, kw_only=True)
class CulpritCommit:
    """The first commit of a package from git that breaks.

    Attributes:
        commits: the one; or several, of which those between cannot be tested.
        of: how many commits lie between the two locks', along first parents.
    """

    git: str
    commits: tuple[str, ...]
    of: int


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A package that breaks, or a few of which no trial could tell which one it is.

    Attributes:
        commit: for one from git, where the commits between could be had.
    """

    packages: tuple[MovedPackage, ...]
    commit: CulpritCommit | None = None

    @property
    def text(self) -> str:
        """For people."""
        text = " or ".join(package.text for package in self.packages)
        if self.commit is None:
            return text
        which = " or ".join(one[:12] for one in self.commit.commits)
        return f"{text}, at commit {which} of {self.commit.git} (of {self.commit.of})"


@dataclass(frozen=True, kw_only=True)
class Bisected:
    """The result of a bisection.

    Attributes:
        groups: what moved.
        failure: how the bad lock fails, in a line.
        culprits: what breaks: one alone, or several together; empty where the time ran out.
        only_together: several break it, and without any one of them the others do not.
        runs: trials that ran, the two that confirmed the ends among them.
        reused: trials of which the result was known.
        finished: the time did not run out.
    """

    good: str
    bad: str
    trial: str
    groups: tuple[MovedGroup, ...]
    failure: str
    culprits: tuple[Culprit, ...]
    only_together: bool
    runs: int
    reused: int
    seconds: float
    finished: bool

    def as_json(self) -> dict[str, Json]:
        """The object that ``--json`` prints."""
        return {
            "good": self.good,
            "bad": self.bad,
            "trial": self.trial,
            "moved": [
                {"name": group.name, "packages": [_json(package) for package in group.packages]}
                for group in self.groups
            ],
            "failure": self.failure,
            "finished": self.finished,
            "culprits": [
                {
                    "packages": [_json(package) for package in culprit.packages],
                    "git": culprit.commit.git if culprit.commit else None,
                    "commits": list(culprit.commit.commits) if culprit.commit else [],
                }
                for culprit in self.culprits
            ],
            "only_together": self.only_together,
            "runs": self.runs,
            "reused": self.reused,
            "seconds": round(self.seconds, 1),
        }

    def lines(self) -> list[str]:
        """For people."""
        count = f"{self.runs} trials ({self.trial}), {self.reused} known from before, {self.seconds:.0f} s"
        if not self.finished:
            return [f"not finished: the time is up after {count}", "Run it again to go on: results are kept."]
        texts = [culprit.text for culprit in self.culprits]
        if len(texts) > 1:
            head = f"{len(texts)} packages break it only together: without any one of them it passes"
            if not self.only_together:
                head = f"{len(texts)} packages break it together; not all of them can be tried without the others"
            return [head, *(f"  {text}" for text in texts), f"failure: {self.failure}", count]
        return [f"broken by {texts[0]}", f"failure: {self.failure}", count]


def _json(package: MovedPackage) -> dict[str, Json]:
    pins = {"from": package.old, "to": package.new}
    versions = {key: (pin.package.version or None) if pin else None for key, pin in pins.items()}
    commits = {f"{key}_commit": pin.package.commit if pin else None for key, pin in pins.items()}
    return {"name": package.name, **versions, **commits}
