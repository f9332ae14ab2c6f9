"""The GPUs before a run: a stand-in nvidia-smi gives the answers that no machine of ours does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from envbuild_smoke.environment import gpus
from envbuild_smoke.environment.imported import Ready, describe
from envbuild_smoke.plan.models import WantedGpu
from envbuild_smoke.results import Gpu
from envbuild_smoke.runner import unseen_gpus

H200 = [f"{n}, GPU-{n}{n}{n}{n}-abcd, NVIDIA H200, 143771 MiB, 570.86.10, 9.0" for n in range(4)]
HOPPER = WantedGpu(sm=("90a",))

Answer = Callable[..., None]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Sets what the stand-in answers: four H200s that nothing uses, but for what is given."""
    program, file = tmp_path / "bin" / "nvidia-smi", tmp_path / "answers.json"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable} -S\n"
        "import json, sys\n"
        f"answers = json.load(open({str(file)!r}))\n"
        "kind = 'apps' if sys.argv[1].startswith('--query-compute-apps') else 'gpus'\n"
        "kind = 'states' if 'clocks.sm' in sys.argv[1] else kind\n"
        "unknown = 'event_reasons' in sys.argv[1] and answers.get('old')\n"
        "sys.exit(2) if unknown else None\n"
        "print('GPU0 GPU1' if sys.argv[1] == 'topo' else '\\n'.join(answers[kind]))\n"
        "sys.exit(answers['status'])\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def answer(**changes: object) -> None:
        file.write_text(json.dumps({"gpus": H200, "apps": [], "states": [], "status": 0, **changes}))

    answer()
    return answer


def indices(chosen: tuple[Gpu, ...]) -> list[int]:
    return [gpu.index for gpu in chosen]


def test_all_gpus_are_used_unless_some_are_named(nvidia_smi: Answer) -> None:
    chosen = gpus.select(HOPPER, 2, ())
    assert indices(chosen) == [0, 1, 2, 3]
    assert chosen[1] == Gpu(1, "GPU-1111-abcd", "NVIDIA H200", "143771 MiB", "570.86.10", "9.0")
    assert gpus.topology() == "GPU0 GPU1"


def test_states_are_those_of_the_gpus_used(nvidia_smi: Answer) -> None:
    rows = [f"{n}, 1980 MHz, 3201 MHz, 4{n}, 120.5 W, 4 MiB, 0, 0x0000000000000000" for n in range(4)]
    used = gpus.select(HOPPER, 2, ("1", "2"))
    for old in (False, True):
        nvidia_smi(states=rows, old=old)
        states = gpus.states(used)
        assert [(state["index"], state["temperature_celsius"]) for state in states] == [("1", "41"), ("2", "42")]
        assert states[0]["throttle_reasons"] == "0x0000000000000000"
    # Nothing is decided by them.
    nvidia_smi(states=[], status=9)
    assert gpus.states(used) == []
    assert gpus.states(()) == []


@pytest.mark.parametrize("names", [("2", "0"), ("GPU-2222-abcd", "GPU-0000"), ("2", "GPU-00")])
def test_gpus_are_named_by_index_or_uuid(nvidia_smi: Answer, names: tuple[str, ...]) -> None:
    assert indices(gpus.select(HOPPER, 2, names)) == [0, 2]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("7",), "--gpus names '7'; the GPUs here are: 0 = GPU-0000-abcd, 1 ="),
        (("GPU-ffff",), "--gpus names 'GPU-ffff'"),
        (("GPU-",), "--gpus names 'GPU-'"),
        (("-1",), "--gpus names '-1'"),
        (("1", "GPU-1111"), "--gpus names GPU 1 twice"),
    ],
)
def test_unknown_gpus_are_refused(nvidia_smi: Answer, names: tuple[str, ...], words: str) -> None:
    with pytest.raises(gpus.UnknownGpuError, match=words):
        gpus.select(HOPPER, 1, names)


def test_scheduler_s_choice_is_kept(nvidia_smi: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert indices(gpus.select(HOPPER, 2, ())) == [1, 3]
    with pytest.raises(gpus.CannotRunError, match=r"needs 4 GPUs; available: 1 \(NVIDIA H200\), 3"):
        gpus.select(HOPPER, 4, ())


L40S = "2, GPU-2, NVIDIA L40S, 46068 MiB, 570.86.10, 8.9"
MEMORY = ("4 MiB", "80000 MiB", "9000 MiB", "[N/A]")
FULL = {"states": [f"{n}, 1980 MHz, 3201 MHz, 40, 120.5 W, {used}, 0, 0x0" for n, used in enumerate(MEMORY)]}
USED = {"apps": ["GPU-2222-abcd, 4711, python, 1024 MiB"]}
FAILED = {"status": 9, "gpus": ["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."]}


@pytest.mark.parametrize(
    ("answers", "wanted", "count", "reason", "words"),
    [
        ({}, HOPPER, 5, "too-few-gpus", "needs 5 GPUs; available: 0 (NVIDIA H200), 1"),
        (USED, HOPPER, 2, "gpus-in-use", "GPU 2: process 4711, python, 1024 MiB"),
        (
            FULL,
            HOPPER,
            2,
            "gpus-in-use",
            "(GPU 1: 80000 MiB of 143771 MiB), by processes that nvidia-smi does not list",
        ),
        ({}, WantedGpu(sm=("100",)), 1, "wrong-gpu", "9.0; the plan's target wants 10.0"),
        ({"gpus": [*H200[:2], L40S]}, HOPPER, 2, "wrong-gpu", "GPU 2 is a NVIDIA L40S of compute capability 8.9"),
        (FAILED, HOPPER, 1, "no-driver", "status 9: NVIDIA-SMI has failed"),
        ({"gpus": ["No devices were found"]}, HOPPER, 1, "no-driver", "'No devices were found'"),
    ],
)
def test_gpus_that_do_not_meet_the_plan_are_refused(
    nvidia_smi: Answer, answers: dict[str, object], wanted: WantedGpu, count: int, reason: str, words: str
) -> None:
    nvidia_smi(**answers)
    with pytest.raises(gpus.CannotRunError) as caught:
        gpus.select(wanted, count, ())
    assert caught.value.reason == reason
    assert words in str(caught.value)


@pytest.mark.parametrize("answers", [USED, {"gpus": [*H200[:2], L40S]}])
def test_gpu_that_cannot_be_used_can_be_left_out(nvidia_smi: Answer, answers: dict[str, object]) -> None:
    nvidia_smi(**answers)
    assert indices(gpus.select(HOPPER, 2, ("0", "1"))) == [0, 1]


def test_one_of_several_generations_is_enough(nvidia_smi: Answer) -> None:
    assert gpus.select(WantedGpu(sm=("90", "100")), 1, ())


def test_topology_of_a_driver_that_fails_is_absent(nvidia_smi: Answer) -> None:
    nvidia_smi(**FAILED)
    assert gpus.topology() is None


@pytest.mark.parametrize(("sm", "capability"), [("90a", "9.0"), ("90", "9.0"), ("100a", "10.0"), ("120f", "12.0")])
def test_compute_capability_of_an_sm(sm: str, capability: str) -> None:
    assert gpus.capability(sm) == capability


@pytest.mark.parametrize("devices", [[], ["nvidia0", "nvidiactl"]])
def test_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]) -> None:
    for name in devices:
        (tmp_path / name).touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    with pytest.raises(gpus.CannotRunError) as caught:
        gpus.select(HOPPER, 1, ())
    assert caught.value.reason == "no-driver"
    words = "NVIDIA_DRIVER_CAPABILITIES" if devices else "no NVIDIA driver"
    assert words in str(caught.value)


def test_gpus_that_torch_does_not_see_are_explained_with_driver_and_cuda() -> None:
    chosen = [Gpu(index, f"GPU-{index}", "NVIDIA H200", "143771 MiB", "470.1", "9.0") for index in range(2)]
    assert unseen_gpus(chosen, Ready(cuda_devices=2, versions={"cuda": "13.0"})) is None
    text = unseen_gpus(chosen, Ready(cuda_error="too old", versions={"cuda": "13.0"}))
    assert text is not None
    assert text.startswith("nvidia-smi lists 2 GPUs for this run; torch sees 0. Driver 470.1 may be too old for ")
    assert "torch's CUDA 13.0" in text
    assert text.endswith("is not for these GPUs: too old")


@pytest.mark.parametrize("too_old", [False, True])
def test_gpus_that_nvml_counts_and_torch_cannot_use_are_none(monkeypatch: pytest.MonkeyPatch, too_old: bool) -> None:
    """As of torch 2.11 the count is NVML's, whatever CUDA says of the driver."""

    def init() -> None:
        if too_old:
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040)")

    nccl = SimpleNamespace(version=lambda: (2, 28, 9))
    cuda = SimpleNamespace(_is_in_bad_fork=lambda: False, init=init, device_count=lambda: 4, nccl=nccl)
    torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    described = describe([])
    assert (described.cuda_devices, described.versions["nccl"]) == (0 if too_old else 4, "2.28.9")
    assert ("too old (found version 12040)" in (described.cuda_error or "")) is too_old
