"""`envbuild lock` over a real history: on each day of a branch, or of each release, is there a lock that imports?

For a day, `envbuild lock --nemo REF --as-of DAY` runs with the repositories as they were on that day and nothing newer
from the package index. A day counts as verified if the command succeeds and the driver's entry point was imported
(`nemo.collections.llm.recipes`, or `megatron.bridge.recipes` and `megatron.bridge.training.pretrain`). The record has
for each day the exit code, seconds, attempts, the lock's digest, the commit, what
deviates from upstream's pins, and the failure. Exits 1 when a number is missed.

    python benchmarks/bench_history.py --work DIR --from 2025-03-01 --to 2025-09-20 --every 10 \\
        --repository https://github.com/NVIDIA-NeMo/NeMo=PATH --repository https://github.com/NVIDIA/Megatron-LM=PATH \\
        --record benchmarks/records/history-nemo.json
    python benchmarks/bench_history.py --work DIR --releases 'nemo-toolkit>=2.2.1,<=3.0.0' --record FILE.json

--repository takes a local copy (bare, all branches) in the place of an address; without it git goes to the address.
A NeMo copy whose main is release 3.0.0 makes the days of Megatron-Bridge's main, as its takeover. The work folder is
kept: days that are done are not run again (--retry: but those that failed; --fresh: all). uv's own cache is the user's:
a day's packages are 6 to 8 GB, and most days share them. A table is written beside the record.

Without days and releases, the committed records are held to the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from history_record import (
    Result,
    attempts,
    branch,
    failure,
    line,
    misses,
    not_imported,
    step_seconds,
    summary,
    write_record,
)
from packaging.requirements import Requirement
from packaging.version import Version

from envbuild.core import tomlread
from envbuild.lock.uv.program import uv_program

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
ENVBUILD = [sys.executable, "-m", "envbuild"]
TIMED_OUT = 124
# The component whose branch is followed.
LEADS = {"nemo": "nemo-toolkit", "bridge": "megatron-bridge"}
# How a release is asked for. Megatron-Bridge is NeMo's LLM code from NeMo 3.0 on.
RELEASE_OPTIONS = {
    "nemo-toolkit": ("--nemo", "{version}"),
    "megatron-bridge": ("--nemo", "3.0.0", "--pin", "megatron-bridge={version}"),
}


@dataclass(frozen=True)
class Case:
    """A day or a release, and the options of `envbuild lock` for it."""

    name: str
    options: tuple[str, ...]


class History:
    """Runs `envbuild lock`, each case in a folder of its own below one that is kept."""

    def __init__(self, work: Path, repositories: Mapping[str, Path], limit_seconds: float) -> None:
        self.work = work
        self.repositories = repositories
        self.limit_seconds = limit_seconds
        work.mkdir(parents=True, exist_ok=True)
        self.env = {**os.environ, "ENVBUILD_CACHE_DIR": str(work / "cache"), "GIT_LFS_SKIP_SMUDGE": "1"}
        # Packages in such a folder have no date: one that is newer than the day would be taken.
        self.env.pop("UV_FIND_LINKS", None)
        if repositories:
            config = work / "gitconfig"
            config.write_text(git_config(repositories))
            # uv asks GitHub's API before git, and that knows of no local copy.
            self.env |= {"GIT_CONFIG_GLOBAL": str(config), "UV_NO_GITHUB_FAST_PATH": "1"}

    def result(self, case: Case, *, fresh: bool, retry: bool) -> Result:
        """The kept result, or that of a new run."""
        folder = self.work / "cases" / case.name
        kept = folder / "result.json"
        if kept.is_file() and not fresh:
            found = Result.from_json(json.loads(kept.read_text()))
            if found.verified or not retry:
                return found
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        result = self._run(case, folder)
        kept.write_text(json.dumps(result.as_json(), indent=1) + "\n")
        return result

    def _run(self, case: Case, folder: Path) -> Result:
        command = [*ENVBUILD, "lock", *case.options, "--name", "history", "--json"]
        started = time.perf_counter()
        with (folder / "log").open("w") as log, (folder / "stdout").open("w") as out:
            process = subprocess.Popen(
                command, cwd=folder, env=self.env, stdout=out, stderr=log, start_new_session=True
            )
            try:
                status = process.wait(self.limit_seconds)
            except subprocess.TimeoutExpired:
                status = TIMED_OUT
                stop(process)
            except BaseException:
                stop(process)
                raise
        seconds = round(time.perf_counter() - started, 1)
        log_text = (folder / "log").read_text(errors="replace")
        common: dict[str, Any] = {
            "name": case.name,
            "exit_code": status,
            "seconds": seconds,
            "attempts": attempts(log_text),
            "step_seconds": step_seconds(log_text),
            "envbuild": own_commit(),
        }
        if status != 0:
            late = f"not done after {self.limit_seconds:g} s" if status == TIMED_OUT else ""
            return Result(**common, failure=late or self._neutral(failure(log_text)))
        return Result(**common, **self._of_lock(json.loads((folder / "stdout").read_text())))

    def _of_lock(self, printed: Mapping[str, Any]) -> dict[str, Any]:
        """What the command printed and the lock's record say."""
        record = tomlread.loads((Path(printed["path"]) / "stack.lock.toml").read_text())
        driver = printed["driver"]
        lead = record["components"][LEADS[driver]]
        missing = not_imported(driver, printed["verified"])
        return {
            "driver": driver,
            "base": printed["base"],
            "digest": printed["digest"],
            "version": lead["version"],
            "commit": lead.get("commit", ""),
            "verified": not missing,
            "verified_in": (printed["verified"] or {}).get("where", ""),
            "stubbed": tuple((printed["verified"] or {}).get("stubbed", ())),
            "deviations": tuple(record.get("deviations", ())),
            "failure": f"not imported: {', '.join(missing)}" if missing else "",
        }

    def _neutral(self, text: str) -> str:
        """Without this machine's paths."""
        for address, place in self.repositories.items():
            text = text.replace(f"file://{place}", address).replace(str(place), address)
        return text.replace(str(self.work), "WORK").replace(str(Path.home()), "~")


def git_config(repositories: Mapping[str, Path]) -> str:
    """A configuration of git that takes local copies in the place of addresses."""
    lines = ["[safe]", "\tdirectory = *", '[protocol "file"]', "\tallow = always"]
    # Clones without blobs, and single commits, as GitHub serves them.
    lines += ["[uploadpack]", "\tallowFilter = true", "\tallowAnySHA1InWant = true"]
    for address, place in repositories.items():
        plain = address.removesuffix(".git")
        lines += [f'[url "file://{place}"]', f"\tinsteadOf = {plain}", f"\tinsteadOf = {plain}.git"]
    return "\n".join(lines) + "\n"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a command and all that it started."""
    # Not SIGINT, which is ignored below a shell's background job.
    for number, seconds in ((signal.SIGTERM, 30.0), (signal.SIGKILL, None)):
        os.killpg(process.pid, number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        return


def own_commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def days(first: date, last: date, every: int) -> list[date]:
    """One day in ``every``, from the first one on."""
    return [first + timedelta(days=number) for number in range(0, (last - first).days + 1, every)]


def releases(requirement: str) -> list[str]:
    """The releases that the index has in a range, the oldest first, without those that were yanked."""
    wanted = Requirement(requirement)
    found: list[str] = []
    # uv takes no release that was yanked, and no pre-release: the newest below the last one, until there is none.
    while True:
        limits = ",".join(filter(None, [str(wanted.specifier), *(f"<{version}" for version in found[-1:])]))
        command = [str(uv_program()), "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate"]
        env = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
        done = subprocess.run(
            [*command, "--python-version", "3.12", "-"],
            input=f"{wanted.name}{limits}\n", capture_output=True, text=True, env=env, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            if found and "No solution found" in done.stderr:
                return sorted(found, key=Version)
            sys.exit(f"cannot list releases of {wanted.name}:\n{done.stderr}")
        found.append(done.stdout.strip().partition("==")[2])


def hold(name: str, numbers: Mapping[str, Any]) -> bool:
    """Print a summary and what it misses."""
    print(f"{name}: {line(numbers)}")
    missed = misses(numbers)
    for text in missed:
        print(f"missed: {text}")
    return not missed


def repositories_of(words: Sequence[str]) -> dict[str, Path]:
    found = {}
    for word in words:
        address, equals, place = word.partition("=")
        if not equals or not Path(place).is_dir():
            sys.exit(f"--repository {word}: write ADDRESS=PATH, with the path of a bare copy")
        found[address.removesuffix(".git")] = Path(place).resolve()
    return found


def cases_of(options: argparse.Namespace) -> list[Case]:
    base = ("--base", options.base) if options.base else ()
    if options.releases:
        requirement = Requirement(options.releases)
        words = RELEASE_OPTIONS[requirement.name]
        return [
            Case(version, (*(word.format(version=version) for word in words), *base))
            for version in releases(options.releases)
        ]
    chosen = [*options.day, *(days(options.first, options.last, options.every) if options.first else [])]
    return [Case(str(day), ("--nemo", options.ref, "--as-of", str(day), *base)) for day in sorted(set(chosen))]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for locks, logs and caches; kept")
    parser.add_argument("--repository", action="append", default=[], metavar="ADDRESS=PATH", help="may be repeated")
    parser.add_argument("--ref", default="main", help="NeMo's branch")
    parser.add_argument("--from", dest="first", type=date.fromisoformat, metavar="DAY")
    parser.add_argument("--to", dest="last", type=date.fromisoformat, metavar="DAY")
    parser.add_argument("--every", type=int, default=10, metavar="DAYS")
    parser.add_argument("--day", action="append", default=[], type=date.fromisoformat, help="one more; may be repeated")
    parser.add_argument("--releases", metavar="REQUIREMENT", help="such as 'nemo-toolkit>=2.2.1,<=3.0.0'")
    parser.add_argument("--base", help="the stack's own by default")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="of one case")
    parser.add_argument("--fresh", action="store_true", help="run everything again")
    parser.add_argument("--retry", action="store_true", help="run what failed again")
    parser.add_argument("--record", type=Path, metavar="FILE.json")
    options = parser.parse_args(arguments)
    if (options.first is None) != (options.last is None):
        parser.error("--from and --to go together")
    wanted = options.first or options.day or options.releases
    if wanted and options.work is None:
        parser.error("--work is missing")
    if options.releases and Requirement(options.releases).name not in RELEASE_OPTIONS:
        parser.error(f"--releases: one of {', '.join(RELEASE_OPTIONS)}")
    options.run = bool(wanted)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    if not options.run:
        found = sorted([*RECORDS.glob("history-*.json"), *RECORDS.glob("releases-*.json")])
        held = [hold(path.stem, json.loads(path.read_text())["summary"]) for path in found]
        return int(not all(held))
    history = History(options.work.resolve(), repositories_of(options.repository), options.limit)
    results: list[Result] = []
    what = options.releases or f"NeMo {options.ref}"
    base = f", base {options.base}" if options.base else ""
    for case in cases_of(options):
        result = history.result(case, fresh=options.fresh, retry=options.retry)
        results.append(result)
        outcome = "verified" if result.verified else result.failure
        print(f"{case.name}: {result.seconds:.0f} s, {result.attempts} attempts, {outcome}", flush=True)
        if not options.releases:
            what = branch(options.ref, results)
        if options.record:
            write_record(options.record, f"`envbuild lock`, {what}{base}", results)
    return int(not hold(what, summary(results)))


if __name__ == "__main__":
    sys.exit(main())
