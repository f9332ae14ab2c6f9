"""BuildKit's messages: read from the wire as its control.proto describes them, damaged ones passed over."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.image.docker.trace import TRACE, Steps, fields


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def vertex(digest, name, *, cached=False, error=""):
    parts = [field(1, digest), field(2, b"input"), field(3, name)]
    parts += [field(4, 1)] if cached else []
    parts += [field(7, error.encode())] if error else []
    return field(1, b"".join(parts))


def log(digest, text):
    return field(3, field(1, digest) + field(2, field(1, 1700000000)) + field(3, 1) + field(4, text))


def said(*parts):
    return {"id": TRACE, "aux": base64.b64encode(b"".join(parts)).decode()}


def test_steps_and_their_output_are_told_as_they_come():
    steps = Steps()
    assert list(steps.take(said(vertex(b"a", b"RUN one")))) == ["RUN one"]
    assert list(steps.take(said(vertex(b"a", b"RUN one")))) == []
    assert list(steps.take(said(log(b"a", b"first\nsec")))) == ["first"]
    assert list(steps.take(said(log(b"a", b"ond\r\n")))) == ["second"]
    assert list(steps.take(said(vertex(b"b", b"RUN two", cached=True)))) == ["RUN two", "RUN two: from the cache"]
    assert steps.failed() is None


def test_failed_step_is_the_one_with_an_error_of_its_own():
    steps = Steps()
    for message in (
        said(vertex(b"a", b"RUN one", error="context canceled")),
        said(vertex(b"b", b"RUN two"), log(b"b", b"no such")),
        said(log(b"b", b" file"), vertex(b"b", b"RUN two", error="exit code: 2")),
        {"error": "short", "errorDetail": {"message": "executor failed: exit code: 2"}},
    ):
        list(steps.take(message))
    failed = steps.failed()
    assert (failed.name, failed.output()) == ("RUN two", "no such file")
    assert steps.error == "executor failed: exit code: 2"


def test_image_id_and_plain_streams_are_read():
    steps = Steps()
    assert list(steps.take({"stream": "STEP 1/2\nrest"})) == ["STEP 1/2"]
    list(steps.take({"id": "moby.image.id", "aux": {"ID": "sha256:1"}}))
    assert steps.image_id == "sha256:1"
    list(steps.take({"error": "it failed"}))
    assert (steps.error, steps.failed().output()) == ("it failed", "STEP 1/2\nrest")


@pytest.mark.parametrize(
    "aux", ["no base64!", base64.b64encode(b"\x0a\xff").decode(), base64.b64encode(b"\x0b").decode()]
)
def test_damaged_message_is_passed_over(aux):
    assert list(Steps().take({"id": TRACE, "aux": aux})) == []


@given(st.binary(max_size=200))
def test_reader_ends_on_any_bytes(data):
    try:
        read = list(fields(data))
    except ValueError:
        return
    assert sum(len(value) if isinstance(value, bytes) else 1 for _, value in read) <= len(data)


@pytest.mark.parametrize("cut", [cut for cut in range(1, 21) if cut != len(field(2, 1 << 40))])
def test_cut_off_message_is_refused(cut):
    whole = field(1, b"x" * 12) + field(2, 1 << 40)
    with pytest.raises(ValueError, match=r"cut off|wire type"):
        list(fields(whole[: len(whole) - cut]))
