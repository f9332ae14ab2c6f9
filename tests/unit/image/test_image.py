"""What `envbuild image` prints of an image."""

import pytest
from helpers.errors import error_of
from helpers.placed_images import RECORD

from envbuild.cli.image import _summary
from envbuild.core.errors import ConfigurationError
from envbuild.image.image import ImageResult
from envbuild.image.output import PlacedImage
from envbuild.image.record import ImageRecord
from envbuild.store.record import load


@pytest.mark.parametrize(
    ("done", "state"),
    [
        ({}, "nothing to do: the image is there"),
        ({"built": True, "placed": True}, "built"),
        ({"placed": True}, "put in place from the store"),
        ({"loaded": True, "engine": "docker 27"}, "put in place from the store"),
    ],
)
def test_summary_has_what_was_done_and_what_was_not_checked(tmp_path, done, state):
    record = RECORD.model_copy(update={"not_checked": {"typing.io": "a placeholder"}, "wheels": {"ssm": "sha256:ab"}})
    values = {"built": False, "placed": False, "loaded": False, "engine": None, "tag": "s:b-t", **done}
    lines = _summary(ImageResult(image=PlacedImage(tmp_path, record, "s"), **values))
    assert lines[0].startswith(f"{state}: ")
    assert "not checked: typing.io: a placeholder" in lines
    assert any(line.startswith("from the wheelhouse: ssm") for line in lines)
    assert any("in docker 27" in line for line in lines) == (values["engine"] is not None)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"schema": "envbuild.image/2"}'])
def test_error_for_a_damaged_record_has_help(tmp_path, text):
    file = tmp_path / "record.json"
    file.write_text(text)
    assert "envbuild image" in error_of(ConfigurationError, load, file, ImageRecord).fix
