"""Every failure that envbuild reports, with its exit code.

One class of error, one exit code; ``docs/reference/exit-codes.md`` is checked against this file by a test. Each error
says what failed, why, and what to do. A Python traceback reaches a user only for :class:`InternalError`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from envbuild.core.digests import Json

if TYPE_CHECKING:
    from typing_extensions import Self


class EnvbuildError(Exception):
    """A failure with an explanation.

    Args:
        what: one sentence: which thing failed.
        why: the cause, as far as it is known; may hold several lines (a tool's own explanation, say).
        fix: what the user can do about it.
        log: the file that holds the whole output of the failed tool.
        reason: one word of those that the class lists, for programs that tell failures of one class apart.
    """

    exit_code: ClassVar[int] = 1
    meaning: ClassVar[str] = "a fault of envbuild itself"

    # The packages that it is about, as far as that is known: another version of one of them may cure it.
    packages: Sequence[str] = ()
    # What upstream's tree at a commit names cannot be had or read: at another commit that may be otherwise.
    of_upstream: bool = False

    def __init__(self, what: str, *, why: str = "", fix: str = "", log: Path | None = None, reason: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.log = log
        self.reason = reason

    def with_context(self, *, what: str | None = None, why: str | None = None, fix: str | None = None) -> Self:
        """A copy of the same class with other texts: ``raise error.with_context(fix=...) from error``."""
        # BaseException is copied as type(self)(*args) and then gets its attributes, so the keyword arguments of
        # subclasses need not be known here.
        error = copy.copy(self)
        if what is not None:
            error.args = (what,)
            error.what = what
        error.why = self.why if why is None else why
        error.fix = self.fix if fix is None else fix
        return error

    def about(self, *packages: str) -> Self:
        """The same error, which names the packages that it is about."""
        self.packages = packages
        return self

    def at_upstream(self) -> Self:
        """The same error, as one that another commit of upstream's may not have."""
        self.of_upstream = True
        return self

    def as_json(self) -> dict[str, Json]:
        """The error as the object that ``--json`` prints under the key ``error``."""
        shown: dict[str, Json] = {
            "kind": type(self).__name__,
            "exit_code": self.exit_code,
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
            "log": str(self.log) if self.log else None,
        }
        return shown | ({"reason": self.reason} if self.reason else {})


class InternalError(EnvbuildError):
    """Something that cannot happen, happened."""

    @classmethod
    def explaining(cls, error: Exception) -> InternalError:
        """A fault of envbuild, with the traceback of the error that shows it."""
        import traceback  # only when it is needed

        return cls(
            f"envbuild has a fault: {type(error).__name__}: {error}",
            why="".join(traceback.format_exception(error)).rstrip(),
            fix="Please report it with the text above and the command that led to it.",
        )


class UsageError(EnvbuildError):
    exit_code = 2
    meaning = "the command line is wrong: an unknown flag, command or combination"


class ConfigurationError(EnvbuildError):
    exit_code = 3
    meaning = "a TOML file or the site configuration is wrong, or names something that does not exist"


class ResolutionError(EnvbuildError):
    exit_code = 4
    meaning = "the stack does not resolve on the base"

    # The resolver's own words, where ``why`` has more: how much that is depends on the time there was for it.
    explanation: str = ""
    # The components whose pins exclude each other, or the rest: without any one of them it resolves.
    clashing_pins: tuple[str, ...] = ()
    # The nearest releases to those that are not there, by component; not tried yet.
    nearest_pins: Mapping[str, str] = {}


class CheckRefusedError(EnvbuildError):
    exit_code = 5
    meaning = "a check refused a lock, a wheel or an image"

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        fix: str = "",
        log: Path | None = None,
        reason: str = "",
        codes: Iterable[str] = (),
    ) -> None:
        """``codes``: those of the findings, where the check has any."""
        super().__init__(what, why=why, fix=fix, log=log, reason=reason)
        self.codes = frozenset(codes)


class BuildError(EnvbuildError):
    exit_code = 6
    meaning = "a build failed"


@dataclass(frozen=True, kw_only=True)
class FailedRun:
    """What a certification that failed shows under ``--json``.

    Attributes:
        cases: every case as a passing run shows it; empty when the results cannot be judged.
        environment_findings: what differs between the lock and the environment in the image.
        problems: of the run as a whole, each with the code of its check.
    """

    cases: Sequence[Mapping[str, Json]] = ()
    environment_findings: Sequence[Mapping[str, Json]] = ()
    problems: Sequence[Mapping[str, Json]] = ()

    @property
    def all_problems(self) -> list[Mapping[str, Any]]:
        """The problems of the cases and of the run as a whole; a case that passed has none."""
        cases: Sequence[Mapping[str, Any]] = self.cases
        return [*(problem for case in cases for problem in case["problems"]), *self.problems]


class CertificationFailedError(EnvbuildError):
    """A certification ran, and there is no certificate; ``run`` where there are results."""

    exit_code = 7
    meaning = "certification ran and a case failed"

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        fix: str = "",
        log: Path | None = None,
        run: FailedRun | None = None,
    ) -> None:
        super().__init__(what, why=why, fix=fix, log=log)
        self.run = run

    def as_json(self) -> dict[str, Json]:
        shown = super().as_json()
        if self.run is not None:
            for key in ("cases", "environment_findings", "problems"):
                shown[key] = [dict(row) for row in getattr(self.run, key)]
        return shown


class CertificationCannotRunError(EnvbuildError):
    """The machine or the image is not as the plan wants: nothing ran, and nothing is certified.

    Reasons: ``no-driver``, ``too-few-gpus``, ``gpus-in-use``, ``wrong-gpu``, ``no-runtime``, ``image-lacks-stack``...
    """

    exit_code = 8
    meaning = "certification could not run: no hardware, no runtime, an image without the stack"


class PublicationRefusedError(EnvbuildError):
    """An image is not published: nothing was sent, or no tag and no index names it.

    Reasons: those of certificates that are refused; ``no-certificate``, ``part-of-matrix``, ``gpu``, ``revoked``...
    """

    exit_code = 9
    meaning = "publication refused"


class NetworkError(EnvbuildError):
    exit_code = 10
    meaning = "the network, a registry or a store cannot be reached, or refused a request"

    # The server answered, and does not have it. An outage is none of that: it ends by itself.
    gone: bool = False


class MachineError(EnvbuildError):
    exit_code = 11
    meaning = "the machine lacks a tool, a permission or space on a disk"


class CertificateRefusedError(EnvbuildError):
    """A certificate does not prove what it is asked for.

    Reasons: ``not-signed``, ``unknown-key``, ``revoked-key``, ``key-time``, ``too-old``, ``another-image``...
    """

    exit_code = 12
    meaning = "a certificate does not verify: changed, signed by a wrong, expired or unknown key, or for another image"


class ResultsRefusedError(EnvbuildError):
    """A runner's results do not belong to the plan, or are not whole.

    Reasons: ``truncated``, ``schema``, ``plan``, ``image``...
    """

    exit_code = 13
    meaning = "results are rejected: for another plan or image, truncated, or not valid by the schema"


class StaleImageError(EnvbuildError):
    """No certified image is as new as the policy wants."""

    exit_code = 14
    meaning = "the newest certified image is older than the policy allows"


class InterruptedByUserError(EnvbuildError):
    # 128 + SIGINT, as shells report it (bash(1), "EXIT STATUS").
    exit_code = 130
    meaning = "interrupted (Ctrl-C or SIGTERM)"

    def __init__(self, what: str = "interrupted", *, fix: str = "") -> None:
        super().__init__(
            what,
            why="Ctrl-C or SIGTERM arrived.",
            fix=fix or "Run the same command again: finished parts are kept, and nothing half-done is left.",
        )


# In the order of the table in the docs, with which a test compares them. A code never changes its meaning.
ERROR_CLASSES: tuple[type[EnvbuildError], ...] = (
    InternalError,
    UsageError,
    ConfigurationError,
    ResolutionError,
    CheckRefusedError,
    BuildError,
    CertificationFailedError,
    CertificationCannotRunError,
    PublicationRefusedError,
    NetworkError,
    MachineError,
    CertificateRefusedError,
    ResultsRefusedError,
    StaleImageError,
    InterruptedByUserError,
)


def disk_full(path: Path) -> MachineError:
    return MachineError(
        f"the disk that holds {path} is full",
        why="Writing failed with 'no space left on device', or less than 64 MiB is left after a tool failed.",
        fix="Free some space there, or point what lies there at a larger disk: ENVBUILD_CACHE_DIR, ENVBUILD_STATE_DIR "
        "(the ledger), UV_CACHE_DIR (uv's cache), TMPDIR, or the command's own option (--out, --out-dir, --into). Then "
        "run the same command again: nothing half-written was kept.",
    )
