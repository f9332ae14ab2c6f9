"""What the bases that come with envbuild have."""

import pytest

from envbuild.catalog.base import Mmdebstrap, PythonSource
from envbuild.catalog.catalog import Catalog
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import Device

BASES = [path.stem for path in sorted((data_root() / "envs" / "bases").glob("*.toml"))]


@pytest.mark.parametrize("name", BASES)
def test_a_base_for_gpus_can_compile_what_triton_makes_where_it_runs(tmp_path, name):
    """A launcher in C, with Python's headers; without them torch.compile fails, and on GPU machines alone."""
    base = Catalog.open(tmp_path).base(name)
    if not isinstance(base.obtain, Mmdebstrap):
        return  # an image of NVIDIA's, which has a compiler
    wanted = {"gcc", "libc6-dev"}
    if base.python.source is PythonSource.BASE:
        wanted.add(f"libpython{base.python.version}-dev")  # others have their headers themselves
    # On a CPU nothing is compiled, and the image stays small.
    assert wanted & {*base.obtain.packages} == (wanted if base.device is Device.CUDA else set())
