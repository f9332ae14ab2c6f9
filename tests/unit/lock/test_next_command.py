"""The command that a refused lock ends with."""

import shlex
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.ledger_rows import digest, lock_row

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.cli.lock import _last_good_lock
from envbuild.core.errors import BuildError, CheckRefusedError, ResolutionError
from envbuild.ledger.ledger import Ledger
from envbuild.lock.checks.findings import CheckFinding, LockRefusedError
from envbuild.lock.inputs.request import LockRequest, NoReleaseError
from envbuild.lock.next_command import GoodLock, with_next_command

NOW = datetime(2026, 11, 22, 20, tzinfo=timezone.utc)
REFUSED = LockRefusedError("w", fix="f", findings=[CheckFinding(code="glibc", what="w", fix="f")])


DRIFT = LockRefusedError(
    "w", findings=[CheckFinding(code="api-drift", what="w", fix="f", packages=("megatron-core", "nemo-toolkit"))]
)


def no_release(version: str) -> ResolutionError:
    error = NoReleaseError("w", fix="f")
    error.nearest_pins = {"nemo-toolkit": version}
    return error


def clashing(*pins: str) -> ResolutionError:
    error = ResolutionError("w", fix="f")
    error.clashing_pins = pins
    return error


@pytest.mark.parametrize(
    ("error", "request_", "expected"),
    [
        (
            clashing("nemo-toolkit", "torch"),
            LockRequest(pins={"torch": "2", "nemo-toolkit": "main", "apex": "1"}, exact=True),
            "--base B --pin nemo-toolkit=main --pin apex=1 --exact",
        ),
        (
            clashing("nemo-toolkit"),
            LockRequest(pins={"nemo-toolkit": "2"}, exact=True),
            "--base B --pin nemo-toolkit=2",
        ),
        (clashing(), LockRequest(exact=True), "--base B"),
        (REFUSED, LockRequest(exact=True, as_of="2025-01-01", base_named=False), "--as-of 2025-01-01"),
        (clashing(), LockRequest(base_named=True), "--target h200"),
        (no_release("3.0.0"), LockRequest(pins={"nemo-toolkit": "99"}), "--base B --pin nemo-toolkit=3.0.0"),
        (DRIFT, LockRequest(pins={"nemo-toolkit": "2", "megatron-core": "9"}), "--base B --pin nemo-toolkit=2"),
        (DRIFT, LockRequest(pins={"nemo-toolkit": "2"}), "--target h200 --pin nemo-toolkit=2"),
        (REFUSED, LockRequest(base_named=False), f"--allow {REFUSED.findings[0].id}"),
        (BuildError("w"), LockRequest(as_of="2025-03-05", base_named=False), "--as-of 2025-02-26"),
    ],
)
def test_a_refusal_ends_with_a_command(error, request_, expected):
    selection = Selection(Catalog.open(Path("/nonexistent")), "nemo", "ubuntu2404-cu130", "h200")
    refusal = with_next_command(error, selection, request_, ["--name", "x"], NOW, ["--no-verify"])
    assert type(refusal) is type(error)
    command = refusal.fix.splitlines()[-1].partition(": ")[2]
    wanted = f"envbuild lock --stack nemo {expected} --name x --no-verify"
    assert shlex.split(command) == wanted.replace("--base B", "--base ubuntu2404-cu130").split()
    assert refusal.fix.startswith(error.fix)


def test_where_nothing_else_is_left_a_lock_that_is_there_is_named():
    selection = Selection(Catalog.open(Path("/nonexistent")), "nemo", "ubuntu2404-cu130", "h200")
    refusal = with_next_command(clashing(), selection, LockRequest(base_named=False), [], NOW)
    assert refusal.fix.endswith("comes with envbuild: envbuild lock --stack nemo-2.7 --base ubuntu2404-cu130")
    of_mcore = Selection(Catalog.open(Path("/nonexistent")), "mcore", "ubuntu2404-cu130", "h200")
    refusal = with_next_command(clashing(), of_mcore, LockRequest(base_named=False), [], NOW)
    assert refusal.fix.endswith("--as-of 2026-11-15")


@pytest.mark.parametrize(
    ("stack", "error", "request_", "last"),
    [
        ("mcore", BuildError("w"), {}, "envbuild lock --stack mcore --target h200 --as-of 2026-11-19"),
        ("nemo", BuildError("w"), {}, "envbuild lock --stack nemo-2.7 --base ubuntu2404-cu130"),
        ("nemo", REFUSED, {}, f"envbuild lock --stack nemo --allow {REFUSED.findings[0].id}"),
        # Not for what came out before it, nor for a pin that no index has.
        ("nemo", BuildError("w"), {"as_of": "2026-11-10"}, "envbuild lock --stack nemo --as-of 2026-11-03"),
        ("nemo", NoReleaseError("w"), {}, None),
    ],
)
def test_the_last_good_lock_is_named_with_the_day_that_makes_it(stack, error, request_, last):
    selection = Selection(Catalog.open(Path("/nonexistent")), stack, "ubuntu2404-cu130", "h200")
    good = GoodLock("sha256:" + "a" * 64, datetime(2026, 11, 20, 2, tzinfo=timezone.utc))
    request = LockRequest(base_named=False, **request_)
    lines = with_next_command(error, selection, request, [], NOW, good=good).fix.splitlines()
    known = [line for line in lines if line.startswith("The last good lock")]
    days = [] if request_ or last is None else ["2026-11-19"]
    assert [line.rpartition(" ")[2] for line in known] == days
    assert all("aaaaaaaaaaaa, is as of 2026-11-20T02:00:00Z: envbuild lock --stack" in line for line in known)
    assert last is None or lines[-1].endswith(last)


def sentence(error, stack="mcore", base="debian12", target="cpu", now=NOW, **request):
    selection = Selection(Catalog.open(Path("/nonexistent")), stack, base, target)
    return with_next_command(error, selection, LockRequest(**request), [], now).fix


def test_an_earlier_day_counts_from_the_stacks_own(tmp_path):
    (tmp_path / "envs/stacks").mkdir(parents=True)
    path = tmp_path / "envs/stacks/dated.toml"
    path.write_text('extends = "mcore"\nas_of = "2025-10-01"\n')
    selection = Selection(Catalog.open(tmp_path), "dated", "debian12", "cpu")
    refusal = with_next_command(BuildError("w"), selection, LockRequest(base_named=False), [], NOW)
    assert refusal.fix.endswith("a week earlier: envbuild lock --stack dated --as-of 2025-09-24")
    path.write_text('extends = "mcore"\nas_of = "release"\nanchor = "megatron-core"\n')
    selection = Selection(Catalog.open(tmp_path), "dated", "debian12", "cpu")
    refusal = with_next_command(BuildError("w"), selection, LockRequest(base_named=False), [], NOW)
    assert "--as-of" not in refusal.fix


@pytest.mark.parametrize(
    "why",
    [
        "Because there is no version of lib==9 and your project depends on lib==9",
        "Because lib==2.0 requires Python >=3.13 and your project depends on lib==2.0",
    ],
)
def test_no_command_is_printed_that_cannot_change_the_cause(why):
    error = ResolutionError("w", why=why, fix="f")
    assert sentence(error, base_named=False) == "f"
    assert sentence(error, base_named=True) == "f"
    assert sentence(NoReleaseError("w", fix="f"), exact=True) == "f"


@pytest.mark.parametrize(
    "why",
    [
        "Because lib==2.0 depends on Python>=3.12 and",
        "hint: Wheels are available for `lib` (v2.0) with the following Python ABI\n tags: `cp312`, `cp313`\n",
    ],
)
def test_bases_with_the_python_that_is_needed_are_named(why):
    error = ResolutionError("w", why=why, fix="f")
    error.nearest_pins = {"lib": "1.0"}
    assert "The other bases of the stack (ubuntu2404) are tried without --base" in sentence(error)


def test_pins_get_a_name():
    selection = Selection(Catalog.open(Path("/nonexistent")), "nemo", "ubuntu2404-cu130", "h200")
    refusal = with_next_command(
        DRIFT, selection, LockRequest(pins={"nemo-toolkit": "2", "torch": "2"}, base_named=False), [], NOW
    )
    assert "--pin torch=2 --allow" in refusal.fix
    assert refusal.fix.endswith("--name NAME")


def test_the_anchors_pin_names_its_lock_itself():
    selection = Selection(Catalog.open(Path("/nonexistent")), "nemo", "ubuntu2404-cu130", "h200")
    refusal = with_next_command(no_release("3.0.0"), selection, LockRequest(pins={"nemo-toolkit": "99"}), [], NOW)
    assert refusal.fix.endswith("--pin nemo-toolkit=3.0.0")


def test_other_bases_are_others():
    selection = Selection(Catalog.open(Path("/nonexistent")), "mcore", "debian12-cu130", "h200")
    of_cuda = CheckRefusedError("w", codes=["cuda-mixed"])
    refusal = with_next_command(of_cuda, selection, LockRequest(base_named=True), [], NOW)
    assert "The other bases of the stack (ubuntu2404-cu130) are tried without --base" in refusal.fix


def test_a_target_that_chose_the_base_is_kept():
    selection = Selection(Catalog.open(Path("/nonexistent")), "mcore", "debian12-cu130", "h200")
    refusal = with_next_command(REFUSED, selection, LockRequest(base_named=False), [], NOW)
    allow = f"--allow {REFUSED.findings[0].id}"
    assert refusal.fix.endswith(f"The whole command: envbuild lock --stack mcore --target h200 {allow}")


def test_declared_ranges_that_exclude_each_other_name_the_table_that_cures_them():
    why = (
        "Because a==1 depends on dep<2 and b==1 depends on dep>=2, we can conclude that a==1 and b==1 are incompatible."
    )
    text = sentence(ResolutionError("w", why=why, fix="f"), base_named=False)
    assert "a declares dep<2, b dep>=2." in text
    assert '[overrides.dep] with version, against = ["a"] and reason' in text


def test_the_last_good_lock_is_the_newest_of_its_name_in_the_ledger(tmp_path):
    path = tmp_path / "ledger.sqlite"
    session = SimpleNamespace(ledger_file=path)
    assert _last_good_lock(session, "mcore", "mcore") is None
    moments = {"a": "2026-11-18T02:00:00Z", "b": "2026-11-20T02:00:00Z", "c": ""}
    with Ledger.open(path) as ledger:
        ledger.record(*(lock_row(word, as_of=as_of) for word, as_of in moments.items()))
        ledger.record(lock_row("d", as_of="2026-11-21T02:00:00Z", name="variant"))
    assert _last_good_lock(session, "mcore", "mcore").digest == digest("b")
    path.write_text("no ledger")
    assert _last_good_lock(session, "mcore", "mcore") is None
