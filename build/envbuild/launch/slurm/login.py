"""Programs where a cluster's jobs are submitted: here, or on its login host by the user's own ssh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from envbuild.core.errors import EnvbuildError, MachineError
from envbuild.core.process import Finished, ProcessOptions, find_tool, run, stream
from envbuild.core.text import quoted_command

# A program's own output begins after this line: sites' shells print banners first.
MARK = "envbuild: the output begins here"
# A login shell: sites put Slurm's folder into PATH in /etc/profile.d. What that reads is not the program's input.
_LOGIN = f'exec 0<&3 3<&-;{{unset}} echo; echo "{MARK}"; exec "$@"'
_SCRIPT = f"exec bash -lc '{_LOGIN}' bash \"$@\" 3<&0 </dev/null"


@dataclass(frozen=True, kw_only=True)
class LoginShell:
    """Runs programs on a login host.

    Attributes:
        host: of the user's ssh configuration; None: this machine.
        environment: of a program on this machine; its own when None.
        unset: beginnings of variables that a program on the host does not get, whatever its shells set.
    """

    host: str | None
    environment: Mapping[str, str] | None = None
    unset: tuple[str, ...] = ()

    def run(
        self,
        words: Sequence[str],
        *,
        what: str,
        seconds: float,
        stdin: bytes | int | None = None,
        check: bool = True,
        error: type[EnvbuildError] = MachineError,
        fix: str = "",
    ) -> Finished:
        """Run a program to its end; its output is without what the host's shells print before it.

        Args:
            what: what is being done, for error messages: ``"submit the job"``.
            seconds: the longest that it may take.
            check: raise ``error`` on a non-zero exit status.

        Raises:
            error: the program failed.
            MachineError: the host cannot be reached, or the program cannot be started.
        """
        options = ProcessOptions(env=self.environment, stdin=stdin, timeout_seconds=seconds, error=error, fix=fix)
        if self.host is None:
            return run(words, what=what, check=check, options=options)
        done = run(self._words(words), what=what, check=False, options=options)
        before, mark, own = done.output.partition(f"{MARK}\n")
        if not mark:
            raise self._unreachable(what, before)
        if check and done.status != 0:
            program = f"{words[0]} on {self.host}"
            raise error(
                f"cannot {what}: {program} ended with exit status {done.status}",
                why=own.strip() or "It printed nothing.",
                fix=fix,
            )
        return replace(done, output=own)

    def stream(self, words: Sequence[str], *, what: str, fix: str) -> Iterator[bytes]:
        """The standard output of a program there, in pieces; other output is dropped.

        Raises:
            MachineError: it failed, which shows after the last piece, or the host cannot be reached.
        """
        if self.host is None:
            yield from stream(words, what=what, error=MachineError, fix=fix)
            return
        pieces = stream(self._words(words), what=what, error=MachineError, fix=fix)
        before, mark = b"", f"{MARK}\n".encode()
        try:
            while mark not in before:
                before += next(pieces)
        except StopIteration:
            raise self._unreachable(what, before.decode(errors="replace")) from None
        except MachineError as error:
            raise self._unreachable(what, error.why) from error
        yield before.partition(mark)[2]
        yield from pieces

    def shown(self, *words: str) -> str:
        """A program's command line, for people to run here."""
        return quoted_command(*words) if self.host is None else quoted_command("ssh", self.host, *words)

    def _words(self, words: Sequence[str]) -> list[str]:
        # Through sh, as the user's shell there may be another one. A question for a password would wait for ever.
        names = " ".join(f"${{!{beginning}@}}" for beginning in self.unset)
        script = _SCRIPT.replace("{unset}", f" unset {names};" if names else "")
        remote = quoted_command("sh", "-c", script, "sh", *words)
        ssh = str(find_tool("ssh", "openssh-client"))
        return [ssh, "-T", "-o", "BatchMode=yes", "--", str(self.host), remote]

    def _unreachable(self, what: str, answer: str) -> MachineError:
        return MachineError(
            f"cannot {what}: ssh to {self.host} failed",
            why=answer.strip() or "It printed nothing.",
            fix=f"`ssh -o BatchMode=yes {self.host} true` must work without a question: add your key to an agent, "
            "accept the host's key, or describe the host in ~/.ssh/config.",
        )
