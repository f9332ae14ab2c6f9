"""Every known failure is found in the text it was taken from."""

import re
import time

import pytest

from envbuild.diagnose.signatures import match_text, signatures

ALL = signatures()


@pytest.mark.parametrize("signature", ALL, ids=lambda signature: signature.id)
def test_signature_matches_its_own_sample(signature):
    assert signature.pattern.search(signature.sample)
    assert signature.id in [match.id for match in match_text(f"before\n{signature.sample}\nafter\n")]


@pytest.mark.parametrize("signature", ALL, ids=lambda signature: signature.id)
def test_signature_has_cause_fix_and_source(signature):
    assert all((signature.stage, signature.cause, signature.fix, signature.source))


def test_ids_are_unique_and_of_one_form():
    ids = [signature.id for signature in ALL]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[A-Z]{2}\d\d[a-z]?", name) for name in ids)


@pytest.mark.parametrize("signature", ALL, ids=lambda signature: signature.id)
def test_signature_does_not_match_harmless_text(signature):
    for text in ("", "\n", "done in 3.2 s\n", "$ uv lock\nResolved 14 packages in 1.2s\n"):
        assert not signature.pattern.search(text)


TORCH = "ModuleNotFoundError: No module named 'torch'"
CUDNN = "Could NOT find CUDNN (missing: CUDNN_INCLUDE_DIR CUDNN_LIBRARY)"


@pytest.mark.parametrize("texts", [(TORCH, CUDNN), (CUDNN, TORCH)])
def test_matches_come_in_the_order_of_the_text(texts):
    ids = [match.id for match in match_text("\n".join(texts))]
    assert ids == (["BI01", "BR12"] if texts[0] == TORCH else ["BR12", "BI01"])


def test_signature_that_occurs_twice_is_reported_once():
    assert [match.id for match in match_text(f"{CUDNN}\n{CUDNN}\n")] == ["BR12"]


@pytest.mark.parametrize("unit", ["x", "x=", "1.", "sm_", "ab: ", "[", "/x", "error: x "])
def test_long_line_costs_no_more_than_others(unit):
    """A rank may say a megabyte; a pattern that took its square as steps would take hours."""
    began = time.process_time()
    assert match_text(unit * ((1 << 20) // len(unit)) + f"\n{CUDNN}")[-1:] == match_text(CUDNN)
    assert time.process_time() - began < 5


def test_match_as_json():
    (match,) = match_text(CUDNN)
    assert match.as_json() == {"id": "BR12", "cause": match.cause, "fix": match.fix, "source": match.source}


# ---- LK01: no wheel for this glibc. uv names the tag of the machine also where glibc has no part in it.


NO_WHEELS = (
    "Because {who} no wheels with a matching platform tag (e.g., `manylinux_2_36_x86_64`) and you require lib, we can "
    "conclude that your requirements are unsatisfiable.\n\nhint: Wheels are available for `{named}` (v1.1) on the "
    "following platforms: {tags}\n"
)
ONLY_HAS = (
    "error: Distribution `lib==1.1 @ registry+https://index.example/simple` can't be installed because it doesn't have "
    "a source distribution or wheel for the current platform\n\nhint: You're on Linux (`manylinux_2_36_x86_64`), but "
    "`lib` (v1.1) only has wheels for the following platforms: {tags}; consider adding \"sys_platform == 'linux'\"\n"
)
NEWER, FOR_ARM = "`manylinux_2_39_x86_64`", "`manylinux_2_39_aarch64`"


def no_wheels(tags, who="all versions of lib have", named="lib"):
    return NO_WHEELS.format(who=who, named=named, tags=tags)


@pytest.mark.parametrize(
    "text",
    [
        no_wheels(NEWER),
        no_wheels(f"{FOR_ARM}, {NEWER}"),
        no_wheels(f"{NEWER}, `win_amd64`", who="lib==1.1 has"),
        no_wheels(NEWER, who="lib{sys_platform != 'darwin'}>=1.0 has"),
        ONLY_HAS.format(tags=NEWER),
        ONLY_HAS.format(tags=f"{FOR_ARM}, {NEWER}"),
    ],
)
def test_wheels_for_a_newer_glibc_are_known(text):
    assert [match.id for match in match_text(text)] == ["LK01"]


@pytest.mark.parametrize(
    "text",
    [
        no_wheels("`win_amd64`"),
        no_wheels("`macosx_11_0_arm64`, `win_amd64`"),
        no_wheels(FOR_ARM),
        no_wheels("`musllinux_1_2_x86_64`"),
        no_wheels(NEWER, named="other"),  # the hint is about another package
        no_wheels(NEWER).partition("\n")[0],  # nothing says which wheels there are
        ONLY_HAS.format(tags="`win_amd64`"),
        ONLY_HAS.format(tags=FOR_ARM),
        "Because all versions of lib have no `sys_platform == 'linux'`-compatible wheels, we can conclude",
    ],
)
def test_wheels_for_other_platforms_are_no_matter_of_glibc(text):
    assert match_text(text) == []
