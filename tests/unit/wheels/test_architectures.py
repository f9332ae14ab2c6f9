"""SM lists in the spellings of torch and of people."""

import pytest

from envbuild.catalog.models import Target
from envbuild.wheels.architectures import Architectures, dotted


def target(*sm: str, ptx: bool = False) -> Target:
    return Target.model_validate({"summary": "t", "device": "cuda", "sm": sm, "ptx": ptx, "platform": "linux/amd64"})


@pytest.mark.parametrize(("sm", "text"), [("80", "8.0"), ("90a", "9.0a"), ("100f", "10.0f"), ("120", "12.0")])
def test_dotted(sm, text):
    assert dotted(sm) == text


@pytest.mark.parametrize("sm", ["", "9", "90b", "sm_90"])
def test_invalid_sm_is_refused(sm):
    with pytest.raises(ValueError, match="not an SM version"):
        dotted(sm)


def test_ptx_is_of_the_newest():
    wanted = Architectures.for_target(target("100a", "80", "90", ptx=True))
    assert wanted == Architectures(sass=("80", "90", "100a"), ptx=("100a",))
    assert wanted.torch_list() == "8.0;9.0;10.0a+PTX"
    assert wanted.text() == "sm_80, sm_90, sm_100a, PTX 100a"
    assert Architectures.for_target(target("90")).ptx == ()


def test_sums_hold_each_once():
    assert Architectures.named(["90"]) + Architectures.named(["80", "90"], ["90"]) == Architectures.named(
        ["80", "90"], ["90"]
    )
    assert Architectures().text() == "no GPU code"


@pytest.mark.parametrize(
    ("sass", "ptx", "runs", "does_not"),
    [
        (["80"], [], ["80", "86", "89"], ["75", "87", "90"]),
        (["86"], [], ["86", "89"], ["80", "90"]),
        (["87"], [], ["87"], ["86", "89"]),
        (["90"], [], ["90", "90a"], ["89", "100"]),
        (["90a"], [], ["90", "90a"], ["89", "100"]),
        (["100"], [], ["100", "103", "100a"], ["90", "110", "120", "101"]),
        (["100a"], [], ["100"], ["103", "120"]),
        (["100f"], [], ["100", "103", "107"], ["90", "110", "120"]),
        (["103f"], [], ["103", "107"], ["100"]),
        (["120f"], [], ["120", "121"], ["100"]),
        ([], ["80"], ["80", "87", "90", "121"], ["75"]),
        ([], ["90a"], ["90"], ["100"]),
        ([], ["100f"], ["100", "103"], ["90", "120"]),
        ([], [], [], ["80", "90"]),
        (["75", "90a"], ["120"], ["75", "90", "120", "121"], ["80", "100"]),
    ],
)
def test_machine_code_and_ptx_run_on_these_gpus(sass, ptx, runs, does_not):
    found = Architectures.named(sass, ptx)
    assert [sm for sm in [*runs, *does_not] if found.runs_on(sm)] == runs
