"""Results are read whole, as their schema has them, and of one plan; everything else is refused, with its reason."""

import json
import os
from dataclasses import replace

import pytest
from helpers.fake_runner import resumed_line
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.certify.plans import BASELINE, SUBJECT, TP2, bytes_of, line, lines_of, plan_of, read, typed, with_case

from envbuild.certify.judge.results import read_results
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import ResultsRefusedError
from envbuild.launch.launchers import Placement
from envbuild_smoke.plan.json_reader import as_json
from envbuild_smoke.results import BandwidthLine

PLAN = plan_of()
DIGEST = sha256_bytes(bytes_of(PLAN))
HEALTHY = lines_of(PLAN)
PLAN_WITH_WEIGHTS = plan_of(cases=with_case(TP2, compare_weights=True))
TEXT = "".join(json.dumps(line) + "\n" for line in HEALTHY)
OTHER = sha256_bytes(b"other")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def refused(path, data, plan=PLAN, **options):
    """Why, and the reason."""
    if data is not None:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ResultsRefusedError, match="cannot be judged") as caught:
        read_results(path, typed(plan), **options)
    assert (caught.value.exit_code, caught.value.log) == (13, path)
    assert caught.value.fix
    return caught.value.reason, caught.value.why


def text_of(lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_results_are_read_with_everything_in_them(path):
    lines = lines_of(PLAN, variables={"NCCL_DEBUG": "INFO"})
    line(lines, TP2)["steps"][0]["loss"] = None
    lines.insert(3, resumed_line(lines[0]))
    results = read(path, PLAN, lines)
    assert results.case(TP2).steps[0].loss is None
    assert results.case(TP2).steps[1].loss == 6.25
    assert results.case(BASELINE).devices == (0,)
    assert results.case(BASELINE, 2) is None
    assert results.run.machine.variables == {"NCCL_DEBUG": "INFO"}
    assert results.run.image.file_digest == SUBJECT.sqsh_digest


# ---- of another plan, image or runner


@pytest.mark.parametrize("key", ["nonce", "plan_digest", "subject"])
def test_results_of_another_plan_are_refused(path, key):
    lines = [dict(HEALTHY[0]), *HEALTHY[1:]]
    lines[0][key] = {"nonce": "0" * 32, "plan_digest": OTHER, "subject": {**HEALTHY[0]["subject"], "stack": "x"}}[key]
    reason, why = refused(path, text_of(lines))
    assert reason == "plan"
    assert why.startswith(f"They are of another plan: its {key.removeprefix('plan_')} is ")


@pytest.mark.parametrize(
    ("place", "digests", "named"),
    [
        ("sqsh", {"oci_digest": OTHER, "sqsh_digest": SUBJECT.sqsh_digest}, SUBJECT.sqsh_digest),
        ("oci", {"oci_digest": OTHER, "sqsh_digest": None}, OTHER),
        ("docker", {"oci_digest": OTHER, "sqsh_digest": None}, OTHER),
    ],
)
def test_results_of_another_image_are_refused(path, place, digests, named):
    plan = plan_of(subject=replace(SUBJECT, place=Placement.parse(place), **digests))
    assert read(path, plan, lines_of(plan)).run.image.file_digest == named
    for hashed in (None, sha256_bytes(b"yesterday's")):
        lines = lines_of(plan)
        lines[0]["image"] = hashed and {**lines[0]["image"], "file_digest": hashed}
        reason, why = refused(path, text_of(lines), plan)
        assert reason == "image"
        assert named in why
        assert (hashed or "--image FILE") in why


@pytest.mark.parametrize("place", ["venv", "here"])
def test_results_about_a_lock_are_of_no_image(path, place):
    plan = plan_of(subject=replace(SUBJECT, place=Placement.parse(place), oci_digest=None, sqsh_digest=None))
    assert read(path, plan, lines_of(plan)).run.image is None
    reason, why = refused(path, text_of(lines_of(plan, image=OTHER)), plan)
    assert (reason, why) == ("image", f"The plan is about a lock, and it ran in image {OTHER}.")


@pytest.mark.parametrize(
    ("fingerprint", "words"),
    [
        (None, "The runner hashed the image's file, and ran outside of it"),
        ({"lock_digest": OTHER}, f"The plan is about lock {SUBJECT.lock_digest}; the image that ran was made from"),
        ({}, "from lock None"),
    ],
)
def test_results_of_an_image_that_is_of_another_lock_or_of_none_are_refused(path, fingerprint, words):
    reason, why = refused(path, text_of(lines_of(PLAN, fingerprint=fingerprint)))
    assert reason == "image"
    assert words in why


def test_results_of_another_runner_are_refused(path):
    lines = lines_of(PLAN, smoke_digest=OTHER)
    assert read(path, PLAN, lines, smoke_digest=OTHER).case(TP2)
    assert refused(path, None, smoke_digest=DIGEST)[0] == "smoke"
    assert refused(path, TEXT, smoke_digest=DIGEST)[1].endswith("it ran with one from its sources.")


# ---- not whole


def test_missing_results_are_refused(path):
    assert refused(path, None) == ("missing", "The runner wrote no results: there is no such file.")
    for text in ("", "\n\n"):
        assert refused(path, text) == ("missing", "The file is empty.")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(st.integers(0, len(TEXT) - 1))
def test_any_truncation_is_refused(tmp_path, length):
    path = tmp_path / "cut.jsonl"
    path.write_text(TEXT[:length])
    with pytest.raises(ResultsRefusedError) as caught:
        read_results(path, typed(PLAN))
    assert caught.value.reason in ("truncated", "missing")


@pytest.mark.parametrize("position", [1, len(HEALTHY) - 2])
def test_results_that_lost_the_line_of_a_case_are_refused(path, position):
    reason, why = refused(path, text_of([*HEALTHY[:position], *HEALTHY[position + 1 :]]))
    assert reason == "truncated"
    assert why == f"Its end states {len(HEALTHY) - 2} of {len(HEALTHY) - 2} completed cases; it has 5 of 5."


def test_case_that_is_there_twice_is_refused(path):
    lines = [*HEALTHY[:-1], line(HEALTHY, TP2), HEALTHY[-1]]
    assert refused(path, text_of(lines)) == ("repeated-case", f"Case {TP2} is in it twice (repeat 1).")


@pytest.mark.parametrize("change", [{"case": "other"}, {"repeat": 2}])
def test_case_that_the_plan_has_not_is_refused(path, change):
    lines = [*HEALTHY[:-2], {**HEALTHY[-2], **change}, HEALTHY[-1]]
    assert refused(path, text_of(lines))[0] == "plan"


@pytest.mark.parametrize(
    "lines",
    [
        [*HEALTHY, HEALTHY[-1]],
        [*HEALTHY, HEALTHY[1]],
        [HEALTHY[0], *HEALTHY],
        HEALTHY[1:],
        [HEALTHY[-1], *HEALTHY[:-1]],
    ],
    ids=["two-ends", "after-the-end", "two-runs", "no-run", "end-first"],
)
def test_lines_out_of_their_places_are_refused(path, lines):
    assert refused(path, text_of(lines))[0] == "schema"


# ---- not as the schema has them


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"schema": "envbuild.results/2"', '"schema": "envbuild.results/1"', 'run.schema: found "envbuild.results/1"'),
        ('"type": "run"', '"type": "ran"', "has an unknown type: 'ran'"),
        ('"type": "run", ', "", "has an unknown type: 'None'"),
        ('"nonce"', '"once"', "Line 1: run"),
        ('"steps"', '"step"', "Line 2: case"),
        ('"seconds": 1.5', '"seconds": null', "Line 2: case.seconds: "),
        ('"loss": 6.375', '"loss": "x"', "Line 2: case.steps[0].loss: "),
        ('"loss": 6.375', '"loss": NaN', "JSON has no NaN"),
        ('"loss": 6.375', '"loss": -Infinity', "JSON has no -Infinity"),
        ('"repeat": 1', '"repeat": 0', "Line 2: case.repeat: "),
        ('"repeat": 1', '"repeat": 1, "repeat": 1', "has a key twice"),
        ('"status": "completed"', '"status": "Completed"', "Line 2: case"),
        ('"isolation": "live"', '"isolation": "live", "approved": true', "Line 1: run: unknown key 'approved'"),
    ],
)
def test_malformed_results_are_refused(path, old, new, message):
    assert old in TEXT
    reason, why = refused(path, TEXT.replace(old, new, 1))
    assert reason == "schema"
    assert message in why


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gradient_buckets", None),
        ("trainable_parameters", "all"),
        ("hugging_face", {"tensors": 1, "differing": 5, "logits": 0.0, "spread": 0.0}),
        ("hugging_face", {"tensors": 1, "differing": [], "logits": "0", "spread": 0.0}),
    ],
)
def test_observed_values_of_another_type_are_refused(path, name, value):
    lines = lines_of(PLAN)
    line(lines, TP2)["observed"][name] = value
    reason, why = refused(path, text_of(lines))
    assert (reason, f"case.observed.{name}" in why) == ("schema", True)


@pytest.mark.parametrize("place", [(), ("observed",), ("steps", 0), ("weights",), ("gradients", 0), ("reference",)])
def test_line_that_lost_a_key_is_refused(path, place):
    """With a default in the place of a key, a check that needs it would pass."""
    optional = {"perturbed"} if place == ("reference",) else set()
    for key in set(part_of(lines_of(PLAN_WITH_WEIGHTS), place)) - optional:
        lines = lines_of(PLAN_WITH_WEIGHTS)
        del part_of(lines, place)[key]
        reason, why = refused(path, text_of(lines), PLAN_WITH_WEIGHTS)
        assert reason == "schema"
        assert key in why or key == "type"


def part_of(lines, place):
    """A part of the first case's line; final weights are those of the second."""
    part = line(lines, TP2 if place == ("weights",) else BASELINE)
    for key in place:
        part = part[key]
    return part


def test_gradient_with_another_number_of_projections_is_refused(path):
    lines = lines_of(PLAN)
    line(lines, TP2)["gradients"][0]["projections"] = [1.0] * 3
    assert refused(path, text_of(lines))[0] == "schema"


FAILURE = {"kind": "exit", "message": "m", "rank": None, "exit_status": None, "log": None}


@pytest.mark.parametrize(("status", "failure"), [("completed", FAILURE), ("failed", None)])
def test_a_case_has_a_failure_unless_it_completed(path, status, failure):
    lines = lines_of(PLAN)
    line(lines, TP2).update(status=status, failure=failure)
    reason, why = refused(path, text_of(lines))
    assert (reason, f"{TP2} is {status} with" in why) == ("schema", True)


def test_bandwidth_without_a_backend_is_refused(path):
    sweep = as_json(BandwidthLine(ranks=2))
    reason, why = refused(path, text_of([*HEALTHY[:-1], sweep, HEALTHY[-1]]))
    assert (reason, why) == ("schema", "The bandwidth of node 0 has neither a backend nor a failure.")


@pytest.mark.parametrize(
    ("started", "finished", "message"),
    [
        ("2026-01-01T00:02:00Z", "2026-01-01T00:01:00Z", "began at 2026-01-01T00:02:00Z and ended at"),
        ("2026-01-01T00:00:00Z", "2999-01-01T00:00:00Z", "which is in the future"),
    ],
)
def test_results_of_no_possible_time_are_refused(path, started, finished, message):
    lines = lines_of(PLAN)
    lines[0]["started_at"], lines[-1]["finished_at"] = started, finished
    reason, why = refused(path, text_of(lines))
    assert reason == "moment"
    assert message in why


def test_results_that_are_no_plain_file_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name, message in (("pipe", "a pipe"), ("zero", "a device")):
        with pytest.raises(ResultsRefusedError) as caught:
            read_results(tmp_path / name, typed(PLAN))
        assert caught.value.reason == "schema"
        assert message in caught.value.why


@pytest.mark.parametrize(
    "text", ["[]\n", "1\n", "null\n", '"run"\n', "\x00\n", "{}\n", "[" * 100_000 + "\n", "{\n", b"\xff\n"]
)
def test_other_files_are_refused(path, text):
    assert refused(path, text)[0] == "schema"


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e999", "-1e999"])
def test_number_beyond_all_floats_is_refused(path, number):
    reason, why = refused(path, TEXT.replace('"loss": 6.375', f'"loss": {number}', 1))
    assert reason == "schema"
    assert "is too large" in why
