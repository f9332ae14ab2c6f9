"""What parallel builds refuse before anything is built."""

from pathlib import Path
from typing import Any

import pytest
from unit.wheels.plans import plan

from envbuild.core.errors import MachineError
from envbuild.core.progress import SilentReporter
from envbuild.store.local import LocalStore
from envbuild.wheels.build.limits import Limits
from envbuild.wheels.build.parallel import BuildContext, _refuse_path, make_wheels
from envbuild.wheels.cache.wheelhouse import Wheelhouse
from envbuild.wheels.sources import WheelSources


@pytest.mark.parametrize(("name", "shown"), [("it's", '"\'"'), ("two words", "a space"), ("a:b,c", "',' and ':'")])
def test_a_cache_whose_path_ends_commands_is_refused(name, shown):
    with pytest.raises(MachineError) as caught:
        _refuse_path(Path("/cache", name))
    assert f"/cache/{name}" in caught.value.what
    assert f"Its path has {shown} in it" in caught.value.why
    assert "ENVBUILD_CACHE_DIR" in caught.value.fix


def never() -> Any:
    pytest.fail("the path is refused before anything is asked for")


def test_make_wheels_refuses_such_a_cache_before_it_asks_for_compilers(tmp_path):
    store = LocalStore(tmp_path / "two words", SilentReporter())
    sources = WheelSources(base=None, site=None, store=store, reporter=store.reporter)  # type: ignore[arg-type]
    limits = Limits(jobs=1, memory_gib=4)
    context = BuildContext(toolchain=never, sources=sources, wheelhouse=Wheelhouse(store), limits=limits)
    with pytest.raises(MachineError, match="cannot be compiled in the cache directory"):
        make_wheels([plan()], never, context)


def test_ordinary_cache_path_is_accepted():
    path = Path("/home/me/.cache/envbuild-1.0+x@y~z")
    assert _refuse_path(path) is None  # type: ignore[func-returns-value]
