"""What parallel builds refuse before anything is built."""

from pathlib import Path

import pytest

from envbuild.core.errors import MachineError
from envbuild.wheels.build.parallel import _refuse_path


@pytest.mark.parametrize(("name", "shown"), [("it's", '"\'"'), ("two words", "a space"), ("a:b,c", "',' and ':'")])
def test_a_cache_whose_path_ends_commands_is_refused(name, shown):
    with pytest.raises(MachineError) as caught:
        _refuse_path(Path("/cache", name))
    assert f"/cache/{name}" in caught.value.what
    assert f"Its path has {shown} in it" in caught.value.why
    assert "ENVBUILD_CACHE_DIR" in caught.value.fix


def test_an_ordinary_cache_is_not():
    _refuse_path(Path("/home/me/.cache/envbuild-1.0+x@y~z"))
