"""SM lists in the spellings of torch and of people."""

import pytest

from envbuild.wheels.architectures import Architectures, dotted


@pytest.mark.parametrize("sm", ["", "9", "90b", "sm_90"])
def test_invalid_sm_is_refused(sm):
    with pytest.raises(ValueError, match="not an SM version"):
        dotted(sm)


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
