"""Runs over two nodes: two processes of the real command line on this machine, with fake ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.smoke_plans import Document, case_document, plan_document, read_results
from unit.smoke.conftest import BASELINE, FAKE_COMMAND, two_ranks

from envbuild.core.digests import sha256_file
from envbuild_smoke.cli import INTERRUPTED, LOST_HEAD
from envbuild_smoke.plan.axes import Layout
from envbuild_smoke.plan.json_reader import as_json

HERE = Path(__file__).resolve().parents[1]


def over(name: str, nodes: int = 2, **changes: Any) -> Document:
    return two_ranks(name, nodes=nodes, **changes)


@dataclass
class Nodes:
    """The nodes of one run, started one by one."""

    folder: Path
    environment: Mapping[str, str]
    token: str = "token"
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def write(self, *cases: Document, count: int = 2, **changes: Any) -> None:
        # As envbuild plans it: what is over all nodes runs once.
        over_all = [max(case["nodes"], case["continue_nodes"] or 1) == count for case in cases]
        homes = [{**case, "home_node": 0} if once else case for case, once in zip(cases, over_all, strict=True)]
        (self.folder / "plan.json").write_text(json.dumps({**plan_document(*homes), "nodes": count, **changes}))
        self.write_token()

    def write_token(self) -> None:
        token = self.folder / self.token
        token.write_text("0123456789abcdef" * 4)
        token.chmod(0o600)

    def start(
        self,
        rank: int,
        *words: str,
        nodes: int = 2,
        out: str = "out",
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        own = ["--nodes", str(nodes), "--node-rank", str(rank), "--head", "127.0.0.1:0", "--token-file", self.token]
        command = [*before, *FAKE_COMMAND, "run", "--plan", "plan.json", "--out", out, *own, *words]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.environment, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *cases: Document, count: int = 2, environment: Mapping[str, str] | None = None) -> None:
        """Run cases on all nodes to their end."""
        self.write(*cases, count=count)
        running = [self.start(rank, nodes=count, environment=environment) for rank in range(count)]
        ends = [process.communicate(timeout=120) for process in running]
        assert [process.returncode for process in running] == [0] * count, ends

    @property
    def lines(self) -> list[Document]:
        return read_results(self.folder / "out")

    @property
    def cases(self) -> dict[tuple[str, int], Document]:
        return {(line["case"], line["repeat"]): line for line in self.lines if line["type"] == "case"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    path = os.pathsep.join([str(HERE), *(str(HERE.parents[2] / name) for name in ("smoke", "tests"))])
    nodes = Nodes(tmp_path, {**os.environ, "PYTHONPATH": path})
    yield nodes
    for process in nodes.started:
        process.kill()
        process.communicate()


def test_all_nodes_run_the_cases_of_one_but_those_at_home_on_one_and_two_those_of_two(nodes: Nodes) -> None:
    nodes.run(BASELINE, over("train-n2"), two_ranks("train-one"), two_ranks("train-home", home_node=1))
    assert {key: (case["status"], case["nodes"]) for key, case in nodes.cases.items()} == {
        ("train-baseline", 1): ("completed", [0]),
        ("train-baseline", 2): ("completed", [1]),
        ("train-one", 1): ("completed", [0]),
        ("train-one", 2): ("completed", [1]),
        ("train-home", 2): ("completed", [1]),
        ("train-n2", 1): ("completed", [0, 1]),
    }
    assert not list((nodes.folder / "out").glob(".canary*"))


def test_resumed_case_goes_on_on_fewer_nodes_and_on_more(nodes: Nodes) -> None:
    two = as_json(Layout(data=2))
    fewer = {**case_document("train-fewer", "train-baseline", data=4), "nodes": 2, "continue_in": two}
    more = two_ranks("train-more", continue_nodes=2)
    nodes.run(BASELINE, {**fewer, "resume_at": 2, "continue_nodes": 1}, {**more, "resume_at": 2})
    for name, parts in (("train-fewer", [(4, 2), (2, 2)]), ("train-more", [(2, 2), (2, 1)])):
        case = nodes.cases[name, 1]
        assert (case["status"], case["nodes"], len(case["steps"])) == ("completed", [0, 1], 5)
        said = [line for line in (nodes.folder / "out" / case["logs"][1]).read_text().splitlines() if "hello" in line]
        assert said == [f"hello from rank 1 of {size}, {here} here" for size, here in parts]


def test_port_that_an_earlier_run_left_is_not_the_last_word(nodes: Nodes) -> None:
    nodes.write(BASELINE, over("train-n2"))
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    (nodes.folder / "out").mkdir()
    (nodes.folder / "out/head.port").write_text(f"{port}\n")
    other, head = nodes.start(1), nodes.start(0)
    _, errors = head.communicate(timeout=120)
    other.communicate(timeout=60)
    assert (head.returncode, other.returncode) == (0, 0), errors


def test_small_cases_have_other_nodes_each_time(nodes: Nodes) -> None:
    nodes.run(BASELINE, over("train-n2"), count=3)
    pairs = [nodes.cases["train-n2", repeat]["nodes"] for repeat in (1, 2, 3)]
    assert pairs == [[0, 1], [1, 2], [2, 0]]
    assert {line["node"] for line in nodes.lines if line["type"] == "node"} == {1, 2}


def test_results_have_what_runs_on_each_node_and_its_clock(nodes: Nodes) -> None:
    nodes.run(BASELINE, over("train-n2"))
    first, other = nodes.lines[:2]
    assert (first["type"], other["type"], other["node"]) == ("run", "node", 1)
    for name in ("environment", "environment_findings", "machine", "image", "host"):
        assert other[name] == first[name], name
    # Of one machine.
    assert abs(other["clock_ahead_seconds"]) <= other["clock_error_seconds"] < 1
    assert other["free_bytes"] > 0


def test_every_node_reads_its_gpus_when_no_rank_is_left(nodes: Nodes) -> None:
    nodes.run(BASELINE, over("train-n2"), count=3)
    # No GPU, no state.
    assert nodes.lines[-1]["nodes"] == [{"node": node, "gpu_states": []} for node in (1, 2)]


def test_no_node_is_silent_while_it_reads_what_runs_there(nodes: Nodes) -> None:
    nodes.run(BASELINE, over("train-n2"), environment={"FAKE_STATE": "waits"})


def test_a_lost_node_ends_its_cases_by_name_and_no_other(nodes: Nodes) -> None:
    # Two slots a node: the first takes all, and the others wait.
    whole = {**case_document("waits-n2", "train-baseline", data=4), "nodes": 2}
    after = {**case_document("train-n2", "train-baseline", data=4), "nodes": 2}
    nodes.write(BASELINE, whole, two_ranks("train-one"), after)
    head, other = nodes.start(0), nodes.start(1)
    wait_for_line(head, '"case-started", "case": "waits-n2"')
    other.send_signal(signal.SIGKILL)
    _, errors = head.communicate(timeout=120)
    other.communicate()
    assert head.returncode == 1, errors
    cases = nodes.cases
    assert cases["train-one", 1]["status"] == "completed"
    for case in (cases["waits-n2", 1], cases["train-n2", 1]):
        assert "node 1 (" in case["failure"]["message"]
        assert "was lost: " in case["failure"]["message"]
        assert case["failure"]["kind"] == "node-lost"


def test_an_agent_whose_head_is_gone_ends_with_its_ranks(nodes: Nodes) -> None:
    nodes.write(BASELINE, over("hangs-n2", time_limit_seconds=100))
    head, other = nodes.start(0), nodes.start(1)
    assert head.stdout is not None
    for line in head.stdout:
        if '"case-started"' in line and "hangs" in line:
            break
    head.kill()
    head.communicate()
    _, errors = other.communicate(timeout=60)
    assert other.returncode == LOST_HEAD
    assert "node 0: " in errors


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("plan", "node 0 refuses this node: its plan is another one than node 0's"),
        ("token", "it does not have this run's token"),
    ],
)
def test_nodes_that_do_not_belong_together(nodes: Nodes, change: str, expected: str) -> None:
    nodes.write(BASELINE, over("train-n2"))
    head = nodes.start(0)
    assert head.stdout is not None
    next(line for line in head.stdout if '"listening"' in line)
    if change == "plan":
        nodes.write(BASELINE, over("train-other"))
    else:
        (nodes.folder / "token").write_text("f" * 64)
    other = nodes.start(1)
    _, errors = other.communicate(timeout=60)
    assert other.returncode == LOST_HEAD
    assert expected in errors
    head.terminate()
    head.communicate(timeout=60)


def test_a_run_that_was_started_again_elsewhere_ends_and_the_other_start_goes_on(nodes: Nodes) -> None:
    """As where Slurm does not reach node 0: what runs there lives on."""
    running = start_hanging(nodes)
    (nodes.folder / nodes.token).unlink()
    nodes.token = "another"
    nodes.write_token()
    again = [nodes.start(rank, "--resume", environment={"HANGS": "no"}) for rank in range(2)]
    ends = [process.communicate(timeout=120) for process in (*running, *again)]
    assert running[0].returncode == INTERRUPTED, ends
    assert [process.returncode for process in again] == [0, 0], ends
    assert nodes.cases["hangs-n2", 1]["status"] == "completed"


def test_a_replaced_start_that_loses_a_node_records_nothing(nodes: Nodes) -> None:
    """Its nodes end one after the other: what ran on the first did not fail."""
    head, other = start_hanging(nodes)
    (nodes.folder / nodes.token).unlink()
    other.kill()
    other.communicate()
    head.communicate(timeout=120)
    assert head.returncode == INTERRUPTED
    assert ("hangs-n2", 1) not in nodes.cases


def test_a_node_that_cannot_take_part_is_named_at_once(nodes: Nodes) -> None:
    """It was started from another image; node 0 would wait a quarter of an hour for it."""
    (nodes.folder / "image.sqsh").write_text("right")
    (nodes.folder / "other.sqsh").write_text("wrong")
    digest = sha256_file(nodes.folder / "image.sqsh")
    nodes.write(BASELINE, over("train-n2"), subject={"form": "sqsh", "sqsh_digest": digest})
    head, other = nodes.start(0, "--image", "image.sqsh"), nodes.start(1, "--image", "other.sqsh")
    _, errors = head.communicate(timeout=120)
    other.communicate(timeout=60)
    assert (head.returncode, other.returncode) == (3, 2)
    assert "this environment cannot run the plan: node 1: --image other.sqsh is sha256:" in errors
    assert f"and the plan is for {digest}" in errors


def test_a_results_folder_that_is_not_shared(nodes: Nodes) -> None:
    nodes.write(BASELINE, over("train-n2"))
    (nodes.folder / "elsewhere").mkdir()
    head = nodes.start(0)
    assert head.stdout is not None
    next(line for line in head.stdout if '"listening"' in line)
    (nodes.folder / "elsewhere/head.port").write_text((nodes.folder / "out/head.port").read_text())
    other = nodes.start(1, out="elsewhere")
    _, errors = head.communicate(timeout=300)
    other.communicate(timeout=60)
    assert head.returncode == 3
    assert "is not the same on node 1 as on node 0" in errors


def start_hanging(nodes: Nodes, *cases: Document) -> list[subprocess.Popen[str]]:
    """Both nodes, when a case runs that does not end."""
    nodes.write(BASELINE, *cases, over("hangs-n2", time_limit_seconds=100))
    head, other = nodes.start(0), nodes.start(1)
    wait_for_line(head, '"case-started", "case": "hangs-n2"')
    return [head, other]


def wait_for_line(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    assert any(words in line for line in process.stdout), process.communicate()


def test_a_second_agent_of_a_node_is_refused(nodes: Nodes) -> None:
    running = start_hanging(nodes)
    # Another folder: of its own the first one holds the lock.
    (nodes.folder / "elsewhere").mkdir()
    (nodes.folder / "elsewhere/head.port").write_text((nodes.folder / "out/head.port").read_text())
    second = nodes.start(1, out="elsewhere")
    _, errors = second.communicate(timeout=60)
    assert second.returncode == LOST_HEAD
    assert "node 0 refuses this node: node 1 has an agent already, on " in errors
    running[0].terminate()
    for process in running:
        process.communicate(timeout=60)


def test_several_runs_at_once_on_the_same_nodes(nodes: Nodes) -> None:
    nodes.write(BASELINE, over("meets-n2"))
    running = [nodes.start(rank, out=out) for out in ("one", "two") for rank in range(2)]
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * 4, ends
    assert (nodes.folder / "one/head.port").read_text() != (nodes.folder / "two/head.port").read_text()


def test_nodes_that_differ_train_nothing_and_the_results_have_both(nodes: Nodes) -> None:
    nodes.write(BASELINE, over("train-n2"))
    package = nodes.folder / "more/odd-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    path = os.pathsep.join([nodes.environment["PYTHONPATH"], str(package.parent)])
    running = [nodes.start(0), nodes.start(1, environment={"PYTHONPATH": path})]
    (_, errors), _ = [process.communicate(timeout=120) for process in running]
    assert running[0].returncode == 1
    assert "node 1 (" in errors
    assert "differs from node 0, and no case was started" in errors
    run, node, end = nodes.lines
    assert (end["type"], end["cases"]) == ("end", 0)
    assert node["environment"]["versions"] == {**run["environment"]["versions"], "odd": "1.0"}
    # It goes on once they are alike.
    running = [nodes.start(rank, "--resume") for rank in range(2)]
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    assert [line["type"] for line in nodes.lines] == ["run", "node", "resumed", "node", "case", "case", "case", "end"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_that_lost_a_node_is_resumed_and_all_cases_complete(nodes: Nodes, victim: int) -> None:
    """Of node 1, node 0 ends the cases there by name, and comes to its end."""
    running = start_hanging(nodes, two_ranks("train-one"))
    running[victim].kill()
    ends = [process.communicate(timeout=60) for process in running]
    assert running[1 - victim].returncode == (1 if victim else LOST_HEAD), ends
    running = [nodes.start(rank, "--resume", environment={"HANGS": "no"}) for rank in range(2)]
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    assert {key: case["status"] for key, case in nodes.cases.items()} == {
        **{(name, repeat): "completed" for name in ("train-baseline", "train-one") for repeat in (1, 2)},
        ("hangs-n2", 1): "completed",
    }


def test_full_disk_of_one_node_ends_the_cases_there_by_name(nodes: Nodes) -> None:
    nodes.write(BASELINE, over("writes-n2"), two_ranks("writes-one"), two_ranks("train-one"))
    running = [nodes.start(0), nodes.start(1, environment={"FULL": "yes"})]
    (_, errors), _ = [process.communicate(timeout=120) for process in running]
    assert running[0].returncode == 1, errors
    failed = {key: case["failure"] for key, case in nodes.cases.items() if case["failure"] is not None}
    assert set(failed) == {("writes-n2", 1), ("writes-one", 2)}
    assert failed["writes-n2", 1]["rank"] == 1
    for failure in failed.values():
        assert failure["message"] == "OSError: [Errno 28] No space left on device"


def test_clocks_of_nodes_tell_which_rank_failed_first(nodes: Nodes) -> None:
    """The monotonic clock of node 1 is a day ahead: there its rank raised first."""
    nodes.write(BASELINE, over("raises-n2"))
    running = [nodes.start(0), nodes.start(1, before=("unshare", "--user", "--time", "--monotonic", "86400", "--fork"))]
    (_, errors), _ = [process.communicate(timeout=120) for process in running]
    assert running[0].returncode == 1, errors
    failure = nodes.cases["raises-n2", 1]["failure"]
    assert (failure["rank"], failure["message"]) == (1, "ValueError: planted in rank 1")
