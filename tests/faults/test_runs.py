"""Faults between plan, run and judge: results that are of something else, and networks that are not what they were."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import corruptions
from faults.catalogue import fault_named
from faults.environments import Environment
from faults.harness import FAILED, PASSED, REFUSED, Harness, Outcome
from faults.kinds import Fault
from faults.over_nodes import Cluster
from faults.record import Record
from helpers.placed_images import place_image

from envbuild.certify.run.plan import Network
from envbuild.core.digests import sha256_file
from envbuild.lock.lockfile import LockDirectory

# A network namespace of its own, whose loopback can be limited to 5 MB/s. Its packets have up to 64 kB, and what is
# larger than the burst never arrives.
NAMESPACE = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
LOOPBACK = 'ip link set lo up && "$@"'
SLOW_LOOPBACK = 'ip link set lo up && tc qdisc add dev lo root tbf rate 40mbit burst 256kb latency 2s && "$@"'
SWEEP = {"sizes_bytes": [2**20], "floor_gigabytes_per_second": 0.02, "devices": ["cpu"]}


def written_plan(harness: Harness, folder: Path, *more: str) -> Path:
    """A plan of one case for another machine."""
    matrix = harness.matrix("faults-runs", [fault_named("results-of-another-plan")])
    outcome = harness.run("--matrix", matrix, *more, "--plan-out", folder)
    assert outcome.status == PASSED, outcome.words
    return folder


def in_an_image(lock_digest: str, folder: Path, python: Path) -> list[str | Path]:
    """The words before a command that show it this machine with the fingerprint of an image of a lock."""
    fingerprint = folder / "fingerprint.json"
    fingerprint.write_text(json.dumps({"lock_digest": lock_digest, "python": str(python)}))
    loader = ["--ro-bind", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    return [
        *("bwrap", "--dev-bind", "/", "/", "--tmpfs", "/etc", *loader),
        *("--ro-bind", fingerprint, "/etc/envbuild/fingerprint.json", "--"),
    ]


def run_by_hand(
    harness: Harness, folder: Path, *more: str | Path, before: Sequence[str | Path] = (), status: int = 0
) -> str:
    """Run a plan as its README shows; what it says."""
    words = ["run", "--plan", folder / "plan.json", "--out", folder / "results", *more]
    command = [*before, harness.stack.python, folder / "smoke.pyz", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stderr


def judged(harness: Harness, folder: Path, *more: str) -> Outcome:
    return harness.run("--matrix", "faults-runs", "--judge", folder, *more)


def note(record: Record, name: str, outcome: Outcome, case: str | None = None) -> bool:
    """Put on record what became of a fault; true when it was found by the check that is named."""
    fault = fault_named(name)
    caught = outcome.finds(fault, case)
    record.add(fault, caught=caught, checks=outcome.checks(), seconds=outcome.seconds)
    return caught


@pytest.mark.fault
@pytest.mark.slow
def test_results_of_another_plan(harness: Harness, record: Record, tmp_path: Path) -> None:
    """The same cases, planned twice: what ran for one is not evidence for the other."""
    fault = fault_named("results-of-another-plan")
    first, second = (written_plan(harness, tmp_path / name, "--in", "venv") for name in ("first", "second"))
    run_by_hand(harness, first)
    assert judged(harness, first).status == PASSED
    shutil.copytree(first / "results", second / "results", dirs_exist_ok=True)
    outcome = judged(harness, second)
    assert note(record, fault.id, outcome), outcome.document
    assert outcome.status == REFUSED


@pytest.mark.fault
@pytest.mark.slow
def test_results_of_another_image(harness: Harness, record: Record, mcore_lock: LockDirectory, tmp_path: Path) -> None:
    """The runner hashes the image that it was given; the plan is for one that was made since.

    The runner refuses that, and the judge does what a runner did that did not look.
    """
    fault = fault_named("results-of-another-image")
    own = ("--out-dir", str(tmp_path / "out"))
    image = place_image(tmp_path / "out", mcore_lock)
    old = tmp_path / "old.sqsh"
    old.write_bytes(b"the image that was there before")
    right, stale = (written_plan(harness, tmp_path / name, *own) for name in ("right", "stale"))
    inside = in_an_image(mcore_lock.lock.digest, tmp_path, harness.stack.python)
    run_by_hand(harness, right, "--image", image.sqsh(), before=inside)
    refused = run_by_hand(harness, stale, "--image", old, before=inside, status=2)
    assert f"is {sha256_file(old)}, and the plan is for {sha256_file(image.sqsh())}" in refused
    run_by_hand(harness, stale, "--image", image.sqsh(), before=inside)
    results = stale / "results/results.jsonl"
    first, rest = results.read_text().split("\n", 1)
    header = json.loads(first)
    header["image"]["file_digest"] = sha256_file(old)
    results.write_text(f"{json.dumps(header)}\n{rest}")
    healthy, outcome = judged(harness, right, *own), judged(harness, stale, *own)
    assert healthy.status == PASSED, healthy.words
    assert note(record, fault.id, outcome), outcome.document
    assert outcome.status == REFUSED


@pytest.mark.fault
@pytest.mark.slow
def test_another_python_in_the_image(
    harness: Harness, record: Record, mcore_lock: LockDirectory, tmp_path: Path
) -> None:
    """As pyxis with a home folder mounted: the file that is hashed is the image, and what trains is not."""
    fault = fault_named("another-python-in-the-image")
    own = ("--out-dir", str(tmp_path / "out"))
    image = place_image(tmp_path / "out", mcore_lock)
    folder = written_plan(harness, tmp_path / "plan", *own)
    inside = in_an_image(mcore_lock.lock.digest, tmp_path, Path("/opt/envbuild/venv/bin/python"))
    run_by_hand(harness, folder, "--image", image.sqsh(), before=inside)
    outcome = judged(harness, folder, *own)
    assert note(record, fault.id, outcome), outcome.document
    assert outcome.status == FAILED


@pytest.mark.fault
@pytest.mark.soak
def test_slow_network(harness: Harness, record: Record) -> None:
    """The ranks speak through a loopback that passes a hundredth of what it did."""
    fault = fault_named("slow-network")
    name = harness.matrix("faults-network", [fault], bandwidth=SWEEP)
    words = ("--matrix", name, "--in", "venv", "--venv", harness.stack.folder)
    healthy = harness.run(*words, before=[*NAMESPACE, LOOPBACK, "sh"])
    assert healthy.status == PASSED, f"{healthy.document}\n{healthy.words}"
    outcome = harness.run(*words, before=[*NAMESPACE, SLOW_LOOPBACK, "sh"])
    assert note(record, fault.id, outcome), outcome.document
    assert outcome.status == FAILED


@pytest.mark.fault
@pytest.mark.soak
def test_noise(harness: Harness, record: Record) -> None:
    """Gradients differ in their last bits from one run to the next: repeats do not agree, whatever the bands say."""
    fault = fault_named("noise")
    case, _ = harness.cases_of(fault)
    name = harness.matrix("faults-repeats", [fault])
    healthy = harness.certify(harness.switched, name, "--repeat", "3")
    assert healthy.status == PASSED, f"{healthy.document}\n{healthy.words}"
    outcome = harness.certify(harness.switched, name, "--repeat", "3", variables={"ENVBUILD_FAULT": "noise"})
    assert note(record, fault.id, outcome, case.id), outcome.document
    assert outcome.status == FAILED
    assert "repeats" in outcome.checks()


@pytest.mark.fault
@pytest.mark.soak
def test_results_of_a_part(harness: Harness, record: Record, tmp_path: Path) -> None:
    """Somebody ran the baseline alone: all that is there passed, and what is not there did not."""
    fault = fault_named("results-of-a-part")
    case, baseline = harness.cases_of(fault)
    folder = written_plan(harness, tmp_path / "plan", "--in", "venv")
    run_by_hand(harness, folder, "--only", baseline.id)
    outcome = judged(harness, folder)
    assert note(record, fault.id, outcome, case.id), outcome.document
    assert outcome.status == FAILED


@pytest.mark.fault
@pytest.mark.soak
def test_transport_by_sockets(harness: Harness, record: Record) -> None:
    """NCCL runs on GPUs alone: here the sweep is gloo's, and next to it lies what NCCL writes on a node."""
    fault = fault_named("transport-by-sockets")
    name = harness.matrix("faults-transport", [fault], bandwidth=SWEEP)
    healthy = harness.certify(harness.switched, name, variables={"ENVBUILD_FAULT": "nccl-by-nvlink"})
    assert healthy.status == PASSED, f"{healthy.document}\n{healthy.words}"
    outcome = harness.certify(harness.switched, name, variables={"ENVBUILD_FAULT": "nccl-by-sockets"})
    assert note(record, fault.id, outcome), outcome.document
    assert outcome.status == FAILED


@dataclass(frozen=True)
class Nodes:
    """Runs over nodes of this machine; those of a test have the cases of one fault."""

    harness: Harness
    fault: Fault
    scratch: Path

    def certify(self, name: str, *nodes: Environment | str, **network: object) -> Outcome:
        """Certify over these nodes, without a problem unless one has a fault."""
        # A slow node is no node that hangs.
        matrix = self.harness.matrix("faults-nodes", [self.fault], time_limit_seconds=600)
        cluster = Cluster(self.harness.switched, self.harness.project, self.scratch / name)
        return cluster.certify(matrix, Network(nodes=len(nodes), **network), nodes)

    def healthy(self, *nodes: str, **network: object) -> None:
        outcome = self.certify("healthy", *nodes, **network)
        assert outcome.status == PASSED, f"{outcome.document}\n{outcome.words}"


@pytest.mark.fault
@pytest.mark.soak
def test_networks_between_nodes(harness: Harness, record: Record, tmp_path: Path) -> None:
    """Four nodes, each with what NCCL writes there: all of them, or one, by another network than the cluster's."""
    by, instead = "nccl-by-infiniband", "nccl-by-sockets"
    every, one = fault_named("sockets-between-nodes"), fault_named("one-node-by-sockets")
    nodes = Nodes(harness, every, tmp_path)
    nodes.healthy(by, by, by, by, transport="NET/IB")
    outcome = nodes.certify("every", instead, instead, instead, instead, transport="NET/IB")
    assert note(record, every.id, outcome), outcome.document
    assert outcome.checks() == ["transport"]
    outcome = nodes.certify("one", by, by, by, instead, transport="NET/IB")
    assert note(record, one.id, outcome), outcome.document
    assert outcome.checks() == ["bad-node", "transport"]


@pytest.mark.fault
@pytest.mark.slow
def test_node_with_another_package(harness: Harness, record: Record, tmp_path: Path) -> None:
    """Somebody updated a package on one node: what trains there is not what trains on the others."""
    fault = fault_named("another-package-on-one-node")
    nodes = Nodes(harness, fault, tmp_path)
    nodes.healthy("", "")
    other = harness.switched.copy(tmp_path / "other")
    corruptions.other_version(other)
    outcome = nodes.certify("planted", "", other)
    assert note(record, fault.id, outcome), outcome.document
    # No case was started.
    assert outcome.checks() == [fault.check, "not-reported"]


@pytest.mark.fault
@pytest.mark.soak
def test_node_that_reads_other_samples(harness: Harness, record: Record, tmp_path: Path) -> None:
    """One node has another copy of the data. All of its cases agree with each other."""
    fault = fault_named("other-samples-on-one-node")
    nodes = Nodes(harness, fault, tmp_path)
    nodes.healthy("", "", "")
    outcome = nodes.certify("planted", "", "", "other-samples-on-one-node")
    assert note(record, fault.id, outcome), outcome.document
    assert outcome.checks() == [fault.check]


@pytest.mark.fault
@pytest.mark.soak
def test_slow_node(harness: Harness, record: Record, tmp_path: Path) -> None:
    """One node takes twice as long as the others until it communicates, alone and with others."""
    fault = fault_named("slow-node")
    nodes = Nodes(harness, fault, tmp_path)
    nodes.healthy("one-second-a-step", "one-second-a-step", "one-second-a-step")
    outcome = nodes.certify("planted", "one-second-a-step", "two-seconds-a-step", "one-second-a-step")
    assert note(record, fault.id, outcome), outcome.document
    assert outcome.checks() == [fault.check]
