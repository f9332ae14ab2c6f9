"""Every failure that envbuild reports, with its exit code.

One class of error, one exit code; ``docs/exit-codes.md`` is checked against this file by a test. Each error
says what failed, why, and what to do. A Python traceback reaches a user only for :class:`InternalError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from envbuild.core.digests import Json


class EnvbuildError(Exception):
    """A failure with an explanation.

    Args:
        what: one sentence: which thing failed.
        why: the cause, as far as it is known; may hold several lines (a tool's own explanation, say).
        fix: what the user can do about it.
        log: the file that holds the whole output of the failed tool.
    """

    exit_code: ClassVar[int] = 1
    meaning: ClassVar[str] = "a fault of envbuild itself"

    def __init__(self, what: str, *, why: str = "", fix: str = "", log: Path | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.log = log

    def as_json(self) -> dict[str, Json]:
        """The error as the object that ``--json`` prints under the key ``error``."""
        return {
            "kind": type(self).__name__,
            "exit_code": self.exit_code,
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
            "log": str(self.log) if self.log else None,
        }


class InternalError(EnvbuildError):
    """Something that cannot happen, happened."""


class UsageError(EnvbuildError):
    exit_code = 2
    meaning = "the command line is wrong: an unknown flag, command or combination"


class ConfigurationError(EnvbuildError):
    exit_code = 3
    meaning = "a TOML file or the site configuration is wrong, or names something that does not exist"


class ResolutionError(EnvbuildError):
    exit_code = 4
    meaning = "the stack does not resolve on the base"


class CheckRefusedError(EnvbuildError):
    exit_code = 5
    meaning = "a check refused a lock, a wheel or an image"
    # Of the findings, where checks with codes refused.
    codes: frozenset[str] = frozenset()


class BuildError(EnvbuildError):
    exit_code = 6
    meaning = "a build failed"


class CertificationFailedError(EnvbuildError):
    """A certification ran, and there is no certificate.

    Args:
        cases: every case as a passing run shows it; empty when the results cannot be judged.
        environment_findings: what differs between the lock and the environment in the image.
    """

    exit_code = 7
    meaning = "certification ran and a case failed"

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        fix: str = "",
        log: Path | None = None,
        cases: Sequence[Mapping[str, Json]] | None = None,
        environment_findings: Sequence[Mapping[str, Json]] = (),
    ) -> None:
        super().__init__(what, why=why, fix=fix, log=log)
        self.cases = cases
        self.environment_findings = environment_findings

    def as_json(self) -> dict[str, Json]:
        shown = super().as_json()
        if self.cases is not None:
            shown["cases"] = [dict(case) for case in self.cases]
            shown["environment_findings"] = [dict(finding) for finding in self.environment_findings]
        return shown


class CertificationCannotRunError(EnvbuildError):
    exit_code = 8
    meaning = "certification could not run: no hardware, no runtime, an image without the stack"


class PublicationRefusedError(EnvbuildError):
    exit_code = 9
    meaning = "publication refused"


class NetworkError(EnvbuildError):
    exit_code = 10
    meaning = "the network, a registry or a store cannot be reached or refused"


class MachineError(EnvbuildError):
    exit_code = 11
    meaning = "the machine lacks a tool, a permission or space on a disk"


class InterruptedByUserError(EnvbuildError):
    exit_code = 130
    meaning = "interrupted (Ctrl-C or SIGTERM)"

    def __init__(self, what: str = "interrupted") -> None:
        super().__init__(
            what,
            why="Ctrl-C or SIGTERM arrived.",
            fix="Run the same command again: finished parts are kept, and nothing half-done is left.",
        )


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
    InterruptedByUserError,
)


def disk_full(path: Path) -> MachineError:
    """The error for a full disk under ``path``."""
    return MachineError(
        f"the disk that holds {path} is full",
        why="Writing failed with 'no space left on device', or less than 64 MiB is left after a tool failed.",
        fix="Free some space there, or point ENVBUILD_CACHE_DIR (cache) or the command's own option (--out, --out-dir, "
        "--into: results) at a larger disk, and run the same command again. Nothing half-written was kept.",
    )
