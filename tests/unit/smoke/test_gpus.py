"""The GPUs before a run: a stand-in nvidia-smi gives the answers that no machine of ours does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from envbuild_smoke.environment import gpus
from envbuild_smoke.plan.models import WantedGpu

H200 = [f"{n}, GPU-{n}{n}{n}{n}-abcd, NVIDIA H200, 143771 MiB, 570.86.10, 9.0" for n in range(4)]
HOPPER = WantedGpu(sm=("90a",), names=())

Setup = dict[str, object]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """What the stand-in answers: change it before the call."""
    answers: Setup = {"gpus": list(H200), "apps": [], "status": 0, "error": ""}
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-smi"
    file = tmp_path / "answers.json"

    class Written(dict[str, object]):
        def __setitem__(self, key: str, value: object) -> None:
            super().__setitem__(key, value)
            file.write_text(json.dumps(self))

    written = Written(answers)
    written["status"] = 0
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        f"answers = json.load(open({str(file)!r}))\n"
        "if answers['status']:\n"
        "    print(answers['error'])\n"
        "    sys.exit(answers['status'])\n"
        "kind = 'apps' if sys.argv[1].startswith('--query-compute-apps') else 'gpus'\n"
        "print('GPU0 GPU1' if sys.argv[1] == 'topo' else '\\n'.join(answers[kind]))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return written


def indices(chosen: tuple[gpus.Gpu, ...]) -> list[int]:
    return [gpu.index for gpu in chosen]


def test_all_gpus_are_used_unless_some_are_named(nvidia_smi: Setup) -> None:
    chosen = gpus.select(HOPPER, 2, ())
    assert indices(chosen) == [0, 1, 2, 3]
    assert chosen[1] == gpus.Gpu(1, "GPU-1111-abcd", "NVIDIA H200", "143771 MiB", "570.86.10", "9.0")
    assert gpus.topology() == "GPU0 GPU1"


@pytest.mark.parametrize("names", [("2", "0"), ("GPU-2222-abcd", "GPU-0000"), ("2", "GPU-00")])
def test_gpus_are_named_by_index_or_uuid(nvidia_smi: Setup, names: tuple[str, ...]) -> None:
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
def test_unknown_gpus_are_refused(nvidia_smi: Setup, names: tuple[str, ...], words: str) -> None:
    with pytest.raises(gpus.UnknownGpuError, match=words):
        gpus.select(HOPPER, 1, names)


def test_scheduler_s_choice_is_kept(nvidia_smi: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert indices(gpus.select(HOPPER, 2, ())) == [1, 3]
    with pytest.raises(gpus.CannotRunError, match=r"needs 4 GPUs; available: 1 \(NVIDIA H200\), 3"):
        gpus.select(HOPPER, 4, ())


@pytest.mark.parametrize("count", [5, 8])
def test_too_few(nvidia_smi: Setup, count: int) -> None:
    with pytest.raises(gpus.CannotRunError) as caught:
        gpus.select(HOPPER, count, ())
    assert caught.value.reason == "too-few-gpus"
    assert f"needs {count} GPUs" in str(caught.value)


def test_used_by_others(nvidia_smi: Setup) -> None:
    nvidia_smi["apps"] = ["GPU-2222-abcd, 4711, python, 1024 MiB"]
    with pytest.raises(gpus.CannotRunError) as caught:
        gpus.select(HOPPER, 2, ())
    assert caught.value.reason == "gpus-in-use"
    assert "GPU 2: process 4711, python, 1024 MiB" in str(caught.value)
    assert indices(gpus.select(HOPPER, 2, ("0", "1"))) == [0, 1]


@pytest.mark.parametrize("sm", ["100", "89", "80"])
def test_another_generation(nvidia_smi: Setup, sm: str) -> None:
    with pytest.raises(gpus.CannotRunError) as caught:
        gpus.select(WantedGpu(sm=(sm,), names=()), 1, ())
    assert caught.value.reason == "wrong-gpu"
    assert f"9.0; the plan's target wants {gpus.capability(sm)}" in str(caught.value)


def test_one_of_another_generation_can_be_left_out(nvidia_smi: Setup) -> None:
    nvidia_smi["gpus"] = [*H200[:2], "2, GPU-2, NVIDIA L40S, 46068 MiB, 570.86.10, 8.9"]
    with pytest.raises(gpus.CannotRunError, match=r"GPU 2 is a NVIDIA L40S of compute capability 8\.9"):
        gpus.select(HOPPER, 2, ())
    assert indices(gpus.select(HOPPER, 2, ("0", "1"))) == [0, 1]


def test_another_name(nvidia_smi: Setup) -> None:
    with pytest.raises(gpus.CannotRunError, match=r"wants 9\.0 and a name with H100"):
        gpus.select(WantedGpu(sm=("90a",), names=("H100",)), 1, ())
    assert gpus.select(WantedGpu(sm=("90", "100"), names=("h100", "H200")), 1, ())


@pytest.mark.parametrize(("sm", "capability"), [("90a", "9.0"), ("90", "9.0"), ("100a", "10.0"), ("120f", "12.0")])
def test_compute_capability_of_an_sm(sm: str, capability: str) -> None:
    assert gpus.capability(sm) == capability


def test_driver_that_does_not_answer(nvidia_smi: Setup) -> None:
    nvidia_smi["error"] = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    nvidia_smi["status"] = 9
    with pytest.raises(gpus.CannotRunError, match="status 9: NVIDIA-SMI has failed") as caught:
        gpus.select(HOPPER, 1, ())
    assert caught.value.reason == "no-driver"
    assert gpus.topology() is None


def test_answer_that_is_no_list_of_gpus(nvidia_smi: Setup) -> None:
    nvidia_smi["gpus"] = ["No devices were found"]
    with pytest.raises(gpus.CannotRunError, match="'No devices were found'") as caught:
        gpus.select(HOPPER, 1, ())
    assert caught.value.reason == "no-driver"


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
