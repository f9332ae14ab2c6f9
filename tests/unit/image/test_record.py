"""Records: read back as written, and refused when damaged."""

import pytest
from helpers.errors import error_of

from envbuild.core.errors import ConfigurationError
from envbuild.image.record import ImageRecord
from envbuild.store.record import load


@pytest.mark.parametrize("text", ["", "{", "{}", '{"schema": "envbuild.image/2"}'])
def test_error_for_a_damaged_record_has_help(tmp_path, text):
    file = tmp_path / "record.json"
    file.write_text(text)
    assert "envbuild image" in error_of(ConfigurationError, load, file, ImageRecord).fix
