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
def test_what_is_no_sm_is_refused(sm):
    with pytest.raises(ValueError, match="no SM version"):
        dotted(sm)


def test_ptx_is_of_the_newest():
    wanted = Architectures.for_target(target("100a", "80", "90", ptx=True))
    assert wanted == Architectures(sass=("80", "90", "100a"), ptx=("100a",))
    assert wanted.torch_list() == "8.0;9.0;10.0a+PTX"
    assert wanted.text() == "sm_80, sm_90, sm_100a, PTX 100a"
    assert Architectures.for_target(target("90")).ptx == ()


def test_sums_hold_each_once():
    assert Architectures.of(["90"]) + Architectures.of(["80", "90"], ["90"]) == Architectures.of(["80", "90"], ["90"])
    assert Architectures().text() == "no GPU code"
