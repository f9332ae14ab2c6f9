"""Every known failure is found in the text it was taken from."""

import re

import pytest

from envbuild.diagnose.signatures import match_text, signatures

ALL = signatures()


@pytest.mark.parametrize("signature", ALL, ids=lambda signature: signature.id)
def test_signature_matches_its_own_sample(signature):
    assert signature.pattern.search(signature.sample)
    assert signature.id in [match.id for match in match_text(f"before\n{signature.sample}\nafter\n")]


@pytest.mark.parametrize("signature", ALL, ids=lambda signature: signature.id)
def test_signature_says_cause_cure_and_source(signature):
    assert all((signature.stage, signature.cause, signature.fix, signature.source))


def test_ids_are_unique_and_of_one_form():
    ids = [signature.id for signature in ALL]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[A-Z]{2}\d\d[a-z]?", name) for name in ids)


@pytest.mark.parametrize("signature", ALL, ids=lambda signature: signature.id)
def test_signature_does_not_match_what_says_nothing(signature):
    for text in ("", "\n", "done in 3.2 s\n", "$ uv lock\nResolved 14 packages in 1.2s\n"):
        assert not signature.pattern.search(text)


TORCH = "ModuleNotFoundError: No module named 'torch'"
NINJA = "ninja: build stopped: subcommand failed."


@pytest.mark.parametrize("texts", [(TORCH, NINJA), (NINJA, TORCH)])
def test_matches_come_in_the_order_of_the_text(texts):
    found = [match.id for match in match_text("\n".join(texts))]
    assert found == (["BI01", "BR03"] if texts[0] == TORCH else ["BR03", "BI01"])


def test_signature_that_occurs_twice_is_told_once():
    assert [match.id for match in match_text(f"{NINJA}\n{NINJA}\n")] == ["BR03"]


def test_text_without_known_failures():
    assert match_text("all is well") == []


def test_match_as_json():
    (match,) = match_text(NINJA)
    assert match.as_json() == {"id": "BR03", "cause": match.cause, "fix": match.fix, "source": match.source}
