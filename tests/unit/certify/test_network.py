"""What is judged of the network between nodes: its transport, its floors, and which nodes are bad."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest
from helpers.fake_runner import bandwidth_line, node_line, resumed_line
from unit.certify.plans import lines_of, plan_of, read, typed

from envbuild.certify.judge.judge import run_problems
from envbuild.certify.judge.network import drain_commands, network_problems
from envbuild.certify.judge.results import Results
from envbuild.core.errors import ResultsRefusedError
from envbuild_smoke.network.limits import networks_in, outcomes_of
from envbuild_smoke.network.rounds import next_round
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.results import BandwidthLine

SLOW = "all_reduce of 16 ranks reaches 12 GB/s, the floor is 80"
DRAIN = 'scontrol update NodeName=%s State=DRAIN Reason="envbuild: '
SIZES = [1 << 20, 1 << 30]
# As people report it of two A3 Mega nodes.
FLOORS = {"all_reduce": 80, "all_gather": 180}
IB = ("NET/IB", "P2P/CUMEM")

Changes = Callable[[tuple[int, ...]], dict[str, Any]]


def points(speed: float) -> list[dict[str, Any]]:
    speeds = {"algorithm_gigabytes_per_second": speed, "bus_gigabytes_per_second": speed}
    return [{"bytes": size, "seconds": 0.1, **speeds} for size in SIZES]


def planned(nodes: int = 4, **changes: Any) -> dict[str, Any]:
    sweep = {"ranks": 8, "sizes_bytes": SIZES, "floor_gigabytes_per_second": None}
    sweep |= {"node_floors": {"all_reduce": 300}, "network_floors": FLOORS}
    return plan_of(**{"nodes": nodes, "bandwidth": sweep, "transport": "NET/IB", **changes})


def measured(plan: Plan, change: Changes) -> list[dict[str, Any]]:
    """The sweeps that a runner makes of a cluster of which `change` says what is not as it should be."""
    assert plan.bandwidth is not None
    lines: list[dict[str, Any]] = []

    def done() -> list[BandwidthLine]:
        return [read_object(BandwidthLine, line, "bandwidth") for line in lines]

    while groups := next_round(range(plan.nodes), plan.bandwidth.ranks, outcomes_of(plan, done())):
        for group in groups:
            between = len(group.nodes) > 1
            speeds = {name: points(200 if between else 400) for name in ("points", "all_gather", "all_to_all")}
            line = {"sweep": group.sweep, "nodes": list(group.nodes), "ranks": 8 * len(group.nodes), **speeds}
            line["transports"] = list(IB if between else ("P2P/CUMEM",))
            lines.append(bandwidth_line({"ranks": 8, "sizes_bytes": SIZES}, **{**line, **change(group.nodes)}))
    return lines


@pytest.fixture
def judged(tmp_path) -> Callable[..., tuple[list[tuple[str, str]], tuple[str, ...]]]:
    """The problems of a run over nodes called h0, h1, ..., and what to drain."""

    def judge(change: Changes, plan=None, drop: int = 0, hosts=None, **run: Any):
        document = plan or planned()
        rest = [line for line in lines_of(document, **run) if line["type"] != "bandwidth"]
        for line in rest:
            if line["type"] in ("run", "node"):
                node = line.get("node", 0)
                line["host"] = (hosts or {}).get(node, f"h{node}")
        sweeps = measured(typed(document), change)
        results: Results = read(tmp_path / "r.jsonl", document, [*rest[:-1], *sweeps[: len(sweeps) - drop], rest[-1]])
        problems = [(problem.check, problem.text) for problem in run_problems(typed(document), results)]
        return problems, drain_commands(typed(document), results)

    return judge


def healthy(nodes: tuple[int, ...]) -> dict[str, Any]:
    return {}


def between(**changes: Any) -> Changes:
    """Every sweep over several nodes is so."""
    return lambda nodes: changes if len(nodes) > 1 else {}


def with_node(node: int, **changes: Any) -> Changes:
    """Every sweep of this node with others is so."""
    return lambda nodes: changes if node in nodes and len(nodes) > 1 else {}


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 9])
def test_a_network_as_it_has_to_be(judged, nodes):
    assert judged(healthy, planned(nodes)) == ([], ())


@pytest.mark.parametrize("nodes", range(1, 18))
def test_sweeps_of_the_fake_runner_are_those_of_a_run(tmp_path, nodes):
    document = planned(nodes)
    results = read(tmp_path / "r.jsonl", document, lines_of(document))
    assert network_problems(typed(document), results) == []


def test_no_transport_is_judged_where_the_file_says_none(judged):
    sockets = between(transports=["NET/Socket"])
    assert judged(sockets, planned(transport=None)) == ([], ())
    assert judged(sockets, planned(transport="NET/Socket")) == ([], ())


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({"points": points(79)}, "all_reduce of 16 ranks reaches 79 GB/s, the floor is 80"),
        ({"all_gather": points(179)}, "all_gather of 16 ranks reaches 179 GB/s, the floor is 180"),
        ({"all_to_all": points(0)}, "a measured bandwidth of all_to_all is not positive"),
        ({"points": points(80), "all_gather": points(180), "all_to_all": points(1)}, None),
        ({"ranks": 8}, "the plan asks for 16 ranks and 2 sizes; all_reduce has 8 ranks and 2 sizes"),
        (
            {"points": [{**point, "bytes": 2 * point["bytes"]} for point in points(200)]},
            "the plan asks for 16 ranks and 2 sizes; all_reduce has 16 ranks and other sizes",
        ),
        ({"all_to_all": []}, "the plan asks for 16 ranks and 2 sizes; all_to_all has 16 ranks and 0 sizes"),
        (
            {"backend": None, "failure": {"kind": "timeout", "message": "not done after 300 s", "log": "rank1.log"}},
            "measuring it failed: not done after 300 s (rank1.log)",
        ),
    ],
)
def test_a_pair_against_the_floors_of_each_collective(judged, speeds, expected):
    failure = speeds.get("failure")
    whole = {**speeds, "failure": {"rank": None, "exit_status": None, **failure}} if failure else speeds
    problems, drain = judged(between(**whole), planned(2))
    assert problems == ([("bandwidth", f"node 0 (h0) and node 1 (h1): {expected}")] if expected else [])
    assert drain == ()


@pytest.mark.parametrize(
    ("matrix", "cluster", "speed", "floor"),
    [(350, 300, 349, 350), (300, 350, 349, 350), (None, 350, 349, 350), (350, None, 349, 350), (300, 300, 349, None)],
)
def test_the_higher_floor_of_matrix_and_cluster_counts_on_a_node(judged, matrix, cluster, speed, floor):
    plan = planned(1)
    floors = {"all_reduce": cluster} if cluster else {}
    plan["bandwidth"] |= {"floor_gigabytes_per_second": matrix, "node_floors": floors}
    problems, _ = judged(lambda _nodes: {"points": points(speed)}, plan)
    text = f"all_reduce of 8 ranks reaches {speed} GB/s, the floor is {floor}"
    assert problems == ([("bandwidth", text)] if floor else [])


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"nodes": [1, 0]}, "schema", "The bandwidth of pair 1, 0 is of other nodes than such a sweep has."),
        ({"nodes": [0, 0]}, "schema", "is of other nodes than such a sweep has"),
        ({"nodes": [0]}, "schema", "is of other nodes than such a sweep has"),
        ({"sweep": "ramp"}, "schema", "The bandwidth of ramp 0, 1 is of other nodes than such a sweep has."),
        ({"sweep": "node"}, "schema", "The bandwidth of node 0, 1 is of other nodes than such a sweep has."),
        ({"nodes": [0, 2]}, "repeated-case", "The bandwidth of pair 0, 2 is in it twice."),
    ],
)
def test_sweeps_that_no_runner_writes_are_refused(tmp_path, change, reason, words):
    document = planned(3)
    lines = lines_of(document)
    sweeps = measured(typed(document), healthy)
    pair = next(sweep for sweep in sweeps if sweep["nodes"] == [0, 1])
    pair.update(change)
    rest = [line for line in lines if line["type"] != "bandwidth"]
    with pytest.raises(ResultsRefusedError) as caught:
        read(tmp_path / "r.jsonl", document, [*rest[:-1], *sweeps, rest[-1]])
    assert caught.value.reason == reason
    assert words in caught.value.why


def test_a_ramp_that_does_not_scale(judged):
    problems, _ = judged(lambda nodes: {"points": points(79)} if len(nodes) > 4 else {}, planned(9))
    assert problems == [("bandwidth", "8 nodes: all_reduce of 64 ranks reaches 79 GB/s, the floor is 80")]


def test_one_bad_node_among_four_is_named_and_drained_by_people(judged):
    problems, drain = judged(with_node(3, points=points(12)))
    assert problems == [
        (
            "bandwidth",
            f"node 2 (h2) and node 3 (h3); node 1 (h1) and node 3 (h3): {SLOW}",
        ),
        ("bad-node", "node 3 (h3): fails with h1 and with h2, where other nodes pass"),
    ]
    assert drain == (
        'scontrol update NodeName=h3 State=DRAIN Reason="envbuild: fails with h1 and with h2, where other nodes pass"',
    )
    assert shlex.split(drain[0])[2:] == [
        "NodeName=h3",
        "State=DRAIN",
        "Reason=envbuild: fails with h1 and with h2, where other nodes pass",
    ]


def test_a_node_that_is_slow_by_itself_is_named(judged):
    problems, drain = judged(lambda nodes: {"points": points(299)} if nodes == (2,) else {})
    assert problems[0] == ("bandwidth", "node 2 (h2): all_reduce of 8 ranks reaches 299 GB/s, the floor is 300")
    assert problems[1] == ("bad-node", "node 2 (h2): fails by itself, where other nodes pass")
    assert drain == (
        'scontrol update NodeName=h2 State=DRAIN Reason="envbuild: fails by itself, where other nodes pass"',
    )


def test_names_that_a_shell_would_read_are_not_in_a_command(judged):
    hosts = {1: '$(touch x)"'}
    _, drain = judged(with_node(3, points=points(1)), hosts=hosts)
    assert drain == (f'{DRAIN % "h3"}fails with node 1 and with h2, where other nodes pass"',)
    assert judged(with_node(1, points=points(1)), hosts=hosts)[1] == ()


def test_a_network_that_is_slow_everywhere_names_no_node(judged):
    problems, drain = judged(between(points=points(4)))
    ((check, text),) = problems
    assert (check, drain) == ("bandwidth", ())
    assert text.endswith("all_reduce of 16 ranks reaches 4 GB/s, the floor is 80")


def test_sweeps_that_are_missing(judged):
    problems, _ = judged(healthy, drop=1)
    assert problems == [("bandwidth", "4 nodes: the plan asks for it, and it was not measured")]
    problems, _ = judged(healthy, drop=4)
    assert problems == [("bandwidth", "node 3 (h3): the plan asks for it, and it was not measured")]


@pytest.mark.parametrize(("hosts", "drained"), [(("h0", "h1", "h2", "h3"), "h3"), (("a", "b", "c", "d"), "d")])
def test_sweeps_of_hosts_that_a_run_left_do_not_count(tmp_path, hosts, drained):
    """It was preempted, and went on elsewhere; on the hosts of before each pair was slow."""
    document = planned()
    plan = typed(document)
    first, *rest = [line for line in lines_of(document) if line["type"] != "bandwidth"]
    nodes = [line for line in rest if line["type"] == "node"]
    for line in (first, *nodes):
        line["host"] = f"h{line.get('node', 0)}"
    again = [resumed_line(first, host=hosts[0]), *(node_line(first, node, host=hosts[node]) for node in (1, 2, 3))]
    before = measured(plan, between(points=points(1)))[:6] if hosts[0] != "h0" else []
    after = measured(plan, with_node(3, points=points(12)))
    lines = [first, *rest[:-1], *before, *again, *after, rest[-1]]
    results = read(tmp_path / "r.jsonl", document, lines)
    assert [problem.check for problem in network_problems(plan, results)] == ["bandwidth", "bad-node"]
    (command,) = drain_commands(plan, results)
    assert f"NodeName={drained} " in command


NO_PLUGIN = "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin."
NO_DEVICE = "NET/IB : No device found."
DISABLED = "NCCL_IB_DISABLE set by environment to 1."


@pytest.mark.parametrize(
    ("expected", "used", "log", "variables", "words"),
    [
        ("NET/IB", "NET/Socket", [DISABLED], {}, "NCCL_IB_DISABLE is set"),
        ("NET/IB", "NET/Socket", [], {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE is set"),
        ("NET/IB", "NET/Socket", [NO_PLUGIN, NO_DEVICE], {}, "/dev/infiniband is not in the job"),
        ("NET/IB", "NET/Socket", ["Failed to open libibverbs.so[.1]"], {}, "libibverbs is not in the image"),
        ("NET/IB", "NET/Socket", ["NCCL_NET set by environment to Socket"], {}, "NCCL_NET asks for sockets"),
        ("NET/IB", "NET/Socket", [], {}, "usual causes: NCCL_IB_DISABLE, no /dev/infiniband"),
        ("NET/FasTrak", "NET/Socket", [NO_PLUGIN, DISABLED], {}, "NCCL found no plugin: its folder is not mounted"),
        ("NET/IB", "NET/Socket", [NO_PLUGIN], {}, "usual causes: NCCL_IB_DISABLE, no /dev/infiniband"),
        ("NET/gIB", "NET/Socket", [NO_DEVICE, DISABLED], {}, "usual causes: the plugin's folder is not mounted"),
        ("NET/gIB", "NET/IB", [], {}, "usual causes: the plugin's folder is not mounted"),
        ("NET/OFI", "NET/Socket", ["Plugin load (libnccl-net.so) returned 2"], {}, "NCCL found no plugin"),
        ("NET/Socket", "NET/IB", [], {}, "Name the network that is there in the cluster's file"),
    ],
)
def test_another_network_fails_at_any_speed_and_its_cause_is_named(judged, expected, used, log, variables, words):
    change = between(transports=[used], network_log=log, points=points(900))
    problems, drain = judged(change, planned(2, transport=expected), variables=variables)
    ((check, text),) = problems
    prefix = f"node 0 (h0) and node 1 (h1): ranks communicated by {used}; the cluster's file expects {expected}. "
    assert (check, drain) == ("transport", ())
    assert text.startswith(prefix)
    assert words in text


@pytest.mark.parametrize("node", [0, 1])
def test_a_variable_of_either_node_is_a_cause(tmp_path, node):
    document = planned(2)
    lines = lines_of(document)
    state = next(line for line in lines if line["type"] == ("node" if node else "run"))
    state["machine"] = {**state["machine"], "variables": {"NCCL_IB_DISABLE": "1"}}
    sweeps = measured(typed(document), between(transports=["NET/Socket"]))
    rest = [line for line in lines if line["type"] != "bandwidth"]
    results = read(tmp_path / "r.jsonl", document, [*rest[:-1], *sweeps, rest[-1]])
    (problem,) = network_problems(typed(document), results)
    assert problem.text.endswith("expects NET/IB. NCCL_IB_DISABLE is set")


def test_one_rank_that_fell_back_to_sockets_is_seen(judged):
    problems, drain = judged(with_node(3, transports=["NET/IB", "NET/Socket"]))
    assert "ranks communicated by NET/IB and NET/Socket; the cluster's file expects NET/IB" in problems[0][1]
    assert [check for check, _ in problems] == ["transport", "bad-node"]
    assert drain[0].startswith("scontrol update NodeName=h3 ")


def test_what_nccl_had_chosen_before_a_sweep_failed_is_judged(judged):
    failure = {"kind": "timeout", "message": "not done", "rank": None, "exit_status": None, "log": None}

    def checks(transports: list[str] | None) -> list[str]:
        problems, _ = judged(between(failure=failure, transports=transports, backend=None), planned(2))
        return [check for check, _ in problems]

    assert checks(["NET/Socket"]) == ["bandwidth", "transport"]
    assert checks(None) == ["bandwidth"]


def test_gloo_has_no_transport_that_a_cluster_could_expect(judged):
    def gloo(_nodes: tuple[int, ...]) -> dict[str, Any]:
        return {"backend": "gloo", "transports": None}

    assert judged(gloo, planned(2, transport=None)) == ([], ())
    ((check, text),) = judged(gloo, planned(2))[0]
    assert check == "transport"
    assert "ranks communicated by gloo; the cluster's file expects NET/IB. Leave [transport] out" in text


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        (["NET/IBext_v8", "P2P/CUMEM"], ("NET/IB",)),
        (["NET/IBext"], ("NET/IB",)),
        (["NET/AWS Libfabric"], ("NET/OFI",)),
        (["NET/Libfabric"], ("NET/OFI",)),
        (["NET/GPUDirectTCPX_v7"], ("NET/GPUDirectTCPX",)),
        (["NET/gIB", "NET/Socket"], ("NET/Socket", "NET/gIB")),
        (["NET/FasTrak", "SHM/direct/direct"], ("NET/FasTrak",)),
        (["P2P/CUMEM"], ()),
        (None, ()),
    ],
)
def test_networks_by_what_plugins_call_themselves(logged, expected):
    assert networks_in(logged) == expected
