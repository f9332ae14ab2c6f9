"""What is wrong with a run as a whole: the network between its ranks, and an environment that is not the lock's."""

import pytest
from helpers.fake_runner import bandwidth_line
from unit.certify.plans import TP2, line, lines_of, plan_of, read, typed

from envbuild.certify.judge.judge import run_problems
from envbuild_smoke.results import Finding

SWEEP = {"ranks": 2, "sizes_bytes": [1 << 20, 1 << 30], "floor_gigabytes_per_second": 250.0}


@pytest.fixture
def problems(tmp_path):
    """The problems of a run with a bandwidth line, as (check, text)."""

    def problems_with(sweep=SWEEP, bandwidth=None, **run):
        plan = plan_of(bandwidth=sweep)
        lines = [line for line in lines_of(plan, **run) if line["type"] != "bandwidth"]
        if bandwidth is not None:
            lines.insert(-1, bandwidth_line(SWEEP, **bandwidth))
        results = read(tmp_path / "results.jsonl", plan, lines)
        return [(problem.check, problem.text) for problem in run_problems(typed(plan), results)]

    return problems_with


def points(*speeds):
    return [
        {"bytes": size, "seconds": 1, "algorithm_gigabytes_per_second": speed, "bus_gigabytes_per_second": speed}
        for size, speed in zip(SWEEP["sizes_bytes"], speeds, strict=False)
    ]


@pytest.mark.parametrize("floor", [None, 300.0])
def test_bandwidth_at_the_floor_on_nvlink_passes(problems, floor):
    assert problems({**SWEEP, "floor_gigabytes_per_second": floor}, {}) == []
    assert problems(None) == []


@pytest.mark.parametrize(
    ("bandwidth", "check", "message"),
    [
        (None, "bandwidth", "was not measured"),
        ({"points": points(20, 249)}, "bandwidth", "reaches 249 GB/s, the floor is 250"),
        ({"points": points(0, 300)}, "bandwidth", "not positive"),
        ({"all_gather": points(20, 249)}, "bandwidth", "all_gather of 2 ranks reaches 249 GB/s, the floor is 250"),
        (
            {"points": points(300)},
            "bandwidth",
            "asks for 2 ranks and 2 sizes; all_reduce has 2 ranks and 1 sizes",
        ),
        ({"ranks": 1}, "bandwidth", "all_reduce has 1 ranks"),
        (
            {"transports": ["P2P/CUMEM", "NET/Socket/0"]},
            "transport",
            "one node communicate by NET/Socket/0; they",
        ),
        ({"transports": []}, "transport", "names no transport"),
        ({"transports": None}, "transport", "names no transport"),
    ],
)
def test_slow_or_wrong_network_is_a_problem(problems, bandwidth, check, message):
    ((code, text),) = problems(SWEEP, bandwidth)
    assert code == check
    assert message in text


def test_bandwidth_that_could_not_be_measured_is_a_problem(problems):
    failure = {"rank": 0, "exit_status": 1, "kind": "exception", "message": "NCCL error", "log": None}
    assert problems(SWEEP, {"failure": failure}) == [("bandwidth", "measuring it failed: NCCL error")]


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [("0", "0", 0), ("2", "2", 0), ("2", "5", 3), ("[N/A]", "[N/A]", 0), ("0", "\u00b2", 0), ("0", "9" * 5000, 0)],
)
def test_errors_of_a_gpus_memory_are_a_problem(tmp_path, before, after, count):
    plan = plan_of()
    lines = lines_of(plan)
    for ending, errors in ((lines[0], before), (lines[-1], after)):
        ending["gpu_states"] = [
            {"index": "0", "uncorrected_ecc_errors": "0"},
            {"index": "1", "uncorrected_ecc_errors": errors},
        ]
    problems = run_problems(typed(plan), read(tmp_path / "results.jsonl", plan, lines))
    text = f"GPU 1 had {count} uncorrectable ECC errors while the cases ran"
    assert [(problem.check, problem.text) for problem in problems] == ([("hardware", text)] if count else [])


@pytest.fixture
def on_gpus(tmp_path):
    """The problems of a run of the six cases on four H200, with changes of its machine and of its cases."""

    def problems_with(names=("NVIDIA H200",) * 4, link="NV18", capability="9.0", case=None, **sweep):
        planned = {**SWEEP, "floor_gigabytes_per_second": None, **sweep.pop("planned", {})}
        plan = plan_of(bandwidth=planned, device="cuda", gpu={"sm": ["90a"]})
        gpus = [{"index": index, "name": name, "compute_capability": capability} for index, name in enumerate(names)]
        lines = [line for line in lines_of(plan, gpus=gpus) if line["type"] != "bandwidth"]
        lines.insert(-1, bandwidth_line(SWEEP, **sweep))
        head = "\t".join(f"GPU{index}" for index in range(len(names)))
        rows = ["\t".join([f"GPU{own}", *("X" if own == other else link for other in range(len(names))), "0-63"])
                for own in range(len(names))]  # fmt: skip
        lines[0]["machine"]["topology"] = "\n".join([f"\t{head}\tCPU Affinity", *rows, "", "Legend:"])
        line(lines, TP2).update(case or {})
        results = read(tmp_path / "results.jsonl", plan, lines)
        return [(problem.check, problem.text) for problem in run_problems(typed(plan), results)]

    return problems_with


def test_run_on_the_gpus_that_the_plan_asks_for(on_gpus):
    assert on_gpus() == []
    assert on_gpus(names=["NVIDIA L40S"] * 4, link="PHB") == []
    assert on_gpus(link="PHB", planned={"floor_gigabytes_per_second": 20.0}) == []
    assert on_gpus(names=["NVIDIA L40S"] * 4, link="PHB", transports=["SHM/direct/direct"]) == []


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({"capability": "8.0"}, "hardware", "is a NVIDIA H200 of compute capability 8.0; the plan asks for sm_90"),
        ({"names": ()}, "hardware", "for 1 GPUs was trained on 1, of 0 that were recorded"),
        ({"case": {"devices": [0]}}, "hardware", f"{TP2} for 2 GPUs was trained on 1, of 4 that were recorded"),
        ({"case": {"devices": [1, 1]}}, "hardware", f"{TP2} for 2 GPUs was trained on 1"),
        ({"backend": "gloo", "transports": None}, "transport", "GPUs communicated by gloo, not by nccl"),
        (
            {"transports": ["SHM/direct/direct"]},
            "transport",
            "ranks of one node communicate by SHM/direct/direct; they have NVLink",
        ),
        ({"link": "PHB"}, "transport", "GPU0 and GPU1 (NVIDIA H200) are joined by PHB and not by NVLink"),
        ({"names": ["NVIDIA H100 80GB HBM3"] * 2, "link": "SYS"}, "transport", "are joined by SYS and not by NVLink"),
    ],
)
def test_run_on_other_gpus_than_the_plan_asks_for(on_gpus, changes, check, words):
    code, text = on_gpus(**changes)[0]
    assert code == check
    assert words in text


def test_variables_explain_sockets(problems):
    variables = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "IB", "NCCL_CUMEM_DISABLE": "0"}
    ((_, text),) = problems(SWEEP, {"transports": ["NET/Socket"]}, variables=variables)
    assert "(NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1)" in text
    assert text.endswith("the variables ask for InfiniBand")


def test_gloo_needs_no_transport(problems):
    assert problems(SWEEP, {"backend": "gloo", "transports": None}) == []


def test_environment_that_is_not_the_locks_is_a_problem(problems):
    findings = [
        {"code": "shadowed", "package": "torch", "expected": "a", "found": "b"},
        {"code": "unusable", "package": None, "expected": None, "found": "boom"},
    ]
    assert problems(None, findings=findings) == [
        ("environment", "shadowed: torch: expected a, found b"),
        ("environment", "unusable: the environment: expected none, found boom"),
    ]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "package-missing: megatron-core: expected 0.16.1, found none"),
        ("0.15.0", "version-mismatch: megatron-core: expected 0.16.1, found 0.15.0"),
    ],
)
def test_versions_on_record_count_where_the_runner_found_nothing(tmp_path, version, message):
    plan = {**plan_of(), "expected_versions": {"megatron-core": "0.16.1"}}
    lines = lines_of(plan)
    lines[0]["environment"]["versions"] = {} if version is None else {"megatron-core": version}
    results = read(tmp_path / "results.jsonl", plan, lines)
    assert [(line.check, line.text) for line in run_problems(typed(plan), results)] == [("environment", message)]
    finding = {"code": message.split(":")[0], "package": "megatron-core", "expected": "0.16.1", "found": version}
    lines[0]["environment_findings"] = [finding]
    results = read(tmp_path / "results.jsonl", plan, lines)
    assert len(run_problems(typed(plan), results)) == 1


def test_module_outside_the_lock_is_a_problem_of_the_run(tmp_path):
    plan = plan_of()
    lines = lines_of(plan)
    stranger = {"code": "imported-unlisted", "package": "apex", "expected": None, "found": "/x/apex.py"}
    for case in lines:
        if case["type"] == "case":
            case["observed"]["unlisted"] = [stranger]
    results = read(tmp_path / "results.jsonl", plan, lines)
    assert results.findings == (Finding(**stranger),)
    message = "imported-unlisted: apex: expected none, found /x/apex.py"
    assert [(line.check, line.text) for line in run_problems(typed(plan), results)] == [("environment", message)]
