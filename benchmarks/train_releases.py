"""Each release of megatron-core trained on the CPU: a matrix healthy, and what is known to be wrong, by release.

    python benchmarks/train_releases.py --python STACK/bin/python --work DIR --record FILE [--releases 0.14.0,0.19.2]

STACK is an environment with torch for CPUs, numpy and psutil; each release gets a copy of it. A record that is there is
continued: what it has is not trained again. `out_of_range` of the record lists cases of entries in envs/conflicts/
whose result is not what the entry's range says.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_matrix import NO_DIGEST, ROOT, options_of
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.conflict import Conflict
from envbuild.catalog.fields import Device
from envbuild.catalog.stack import Driver
from envbuild.certify.cases.case import Capabilities, Case
from envbuild.certify.cases.expansion import expand
from envbuild.certify.judge.judge import judge
from envbuild.certify.judge.results import read_results
from envbuild.certify.run.plan import Environment, Subject, make_plan
from envbuild.core.files import write_atomic
from envbuild.launch.launchers import Placement
from envbuild.lock.uv.program import uv_program
from envbuild.sync.zipapp import smoke_bytes
from envbuild_smoke.plan.reader import parse_plan

FIRST = Version("0.14.0")
CPU = Capabilities(device=Device.CPU)
SUBJECT = Subject(
    name="bench", stack="mcore", base="here", target="cpu", lock_digest=NO_DIGEST, place=Placement.parse("venv")
)
PASSED = "passed"


@dataclass(frozen=True, kw_only=True)
class Known:
    """An entry of envs/conflicts/ whose case a CPU can train, and the releases that it is about."""

    name: str
    matrix: str
    case: str
    releases: SpecifierSet


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a folder for environments and results")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--releases", help="of megatron-core, with commas between them; default: all since 0.14.0")
    given = parser.parse_args()
    record = json.loads(given.record.read_text()) if given.record.is_file() else {"healthy": {}, "known": {}}
    known = list(entries())
    releases = given.releases.split(",") if given.releases else all_releases()
    for release in releases:
        python = environment(given.python, given.work / f"mc-{release}", release)
        wanted = [(given.matrix, None, "healthy")]
        wanted += [(name, ids, "known") for name, ids in by_matrix(known).items()]
        for matrix, ids, part in wanted:
            done = record[part].setdefault(release, {})
            if (ids and set(ids) <= done.keys()) or (not ids and done):
                continue
            done.update(train(python, matrix, ids, given.work / f"run-{release}-{matrix}"))
            record["out_of_range"] = out_of_range(record["known"], known)
            write_atomic(given.record, json.dumps(record, indent=1) + "\n")
            failed = sum(result != PASSED for result in done.values())
            print(f"{release} {matrix}: {failed} of {len(done)} cases failed", flush=True)
    for line in record.get("out_of_range", []):
        print(line)


def entries() -> list[Known]:
    """The entries about megatron-core alone whose case runs on CPUs."""
    catalog = Catalog.open(ROOT)
    shown = []
    for name, entry in catalog.conflicts.items():
        if entry.shown_by and set(entry.packages) == {"megatron-core"} and _runs_here(catalog, entry):
            releases = SpecifierSet(entry.packages["megatron-core"])
            shown.append(Known(name=name, matrix=entry.shown_by.matrix, case=entry.shown_by.case, releases=releases))
    return shown


def _runs_here(catalog: Catalog, entry: Conflict) -> bool:
    assert entry.shown_by
    matrix = catalog.matrix(entry.shown_by.matrix)
    return Device.CPU in matrix.devices and entry.shown_by.case in {
        case.id for case in expand(matrix, entry.shown_by.matrix, CPU)
    }


def by_matrix(known: Sequence[Known]) -> dict[str, list[str]]:
    return {name: [each.case for each in known if each.matrix == name] for name in sorted({k.matrix for k in known})}


def all_releases() -> list[str]:
    """The releases on the index since FIRST, without those before a release."""
    command = ["pip", "index", "versions", "megatron-core", "--python-version", "3.12", "--only-binary", ":all:"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = re.findall(r"Available versions: (.*)", listed)
    return [str(version) for version in sorted(map(Version, line.split(", "))) if version >= FIRST]


def environment(base: Path, folder: Path, release: str) -> Path:
    """A copy of an environment with a release; return its Python."""
    python = folder / "bin" / "python"
    if python.exists():
        return python
    # Files are shared: nothing of the copy is edited.
    subprocess.run(["cp", "-al", base.parent.parent, folder], check=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    for installed in (site / "megatron", *site.glob("megatron_core-*.dist-info")):
        shutil.rmtree(installed, ignore_errors=True)
    # From 0.17 on it asks for Python 3.12, of which nothing that cases import has need.
    install = [uv_program(), "pip", "install", "-q", "--no-deps"]
    command = [*install, "--python-version", "3.12", "--target", site, f"megatron-core=={release}"]
    subprocess.run(command, check=True)
    # From 0.18 on it imports triton, which a torch for CPUs does not bring.
    subprocess.run([*install, "--python", python, "triton"], check=True)
    return python


def train(python: Path, matrix_name: str, only: Sequence[str] | None, work: Path) -> dict[str, str]:
    """Train cases of a matrix; return by case "passed", or the first problem that the judge has."""
    matrix = Catalog.open(ROOT).matrix(matrix_name)
    every = tuple(case for case in expand(matrix, matrix_name, CPU) if case.nodes == 1)
    cases = every if only is None else _with_baselines(every, only)
    content = json.dumps(make_plan(SUBJECT, Environment(capabilities=CPU, driver=Driver.MCORE), matrix, cases)).encode()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "plan.json").write_bytes(content)
    (work / "smoke.pyz").write_bytes(smoke_bytes())
    words = [python, "-I", work / "smoke.pyz", "run", "--plan", work / "plan.json", "--out", work / "out"]
    subprocess.run(words, check=False, capture_output=True)
    plan = parse_plan(content)
    verdicts = judge(cases, matrix, read_results(work / "out" / "results.jsonl", plan), plan)
    shutil.rmtree(work / "out" / "checkpoints", ignore_errors=True)
    return {verdict.id: str(verdict.problems[0]) if verdict.problems else PASSED for verdict in verdicts}


def _with_baselines(cases: tuple[Case, ...], only: Sequence[str]) -> tuple[Case, ...]:
    needed = {*only, *(case.baseline_id for case in cases if case.id in only)}
    return tuple(case for case in cases if case.id in needed)


def out_of_range(results: Mapping[str, Mapping[str, str]], known: Sequence[Known]) -> list[str]:
    """What was trained and is not as an entry says: wrong outside of its range, or right in it."""
    lines = []
    for entry in known:
        for release, by_case in results.items():
            if (result := by_case.get(entry.case)) is None:
                continue
            inside = entry.releases.contains(release)
            if inside is (result == PASSED):
                place = "in" if inside else "outside of"
                lines.append(f"{entry.name}: {release} is {place} {entry.releases}, and {entry.case}: {result[:160]}")
    return lines


if __name__ == "__main__":
    main()
