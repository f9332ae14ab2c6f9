"""A uv.lock is read once; what has another form than uv's is refused there."""

import pytest

from envbuild.core.errors import MachineError
from envbuild.lock.uv.resolution import written_lock
from envbuild.lock.uv_lock import parse_uv_lock

PACKAGE = '[[package]]\nname = "lib"\nversion = "1.0"\nsource = { registry = "https://x/simple" }\n'


def test_keys_that_are_not_known_are_uvs_own():
    (package,) = parse_uv_lock(f'version = 1\n{PACKAGE}new = 1\n[options]\nprerelease-mode = "allow"\n').packages
    assert (package.title, package.source, package.files) == ("lib 1.0", {"registry": "https://x/simple"}, ())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("version = 1", "package is missing"),
        (PACKAGE.replace("name", "nom"), "package.0.name is missing"),
        (PACKAGE.replace('"1.0"', "1.0"), "package.0.version has a wrong value"),
        (PACKAGE.replace("version", "versions"), "lib has no version"),
        (PACKAGE.replace("source", "origin"), "package.0.source is missing"),
        (f"{PACKAGE}dependencies = [{{ extra = ['x'] }}]", "package.0.dependencies.0.name is missing"),
        (f"{PACKAGE}wheels = [{{ size = 'large' }}]", "package.0.wheels.0.size has a wrong value"),
        (f"{PACKAGE}sdist = {{ upload-time = 'soon' }}", "package.0.sdist.upload-time has a wrong value"),
    ],
)
def test_another_form_is_refused_where_it_is_read(tmp_path, text, why):
    (tmp_path / "uv.lock").write_text(text)
    with pytest.raises(MachineError, match=r"cannot understand the uv\.lock that uv wrote") as caught:
        written_lock(tmp_path)
    assert why in caught.value.why
    assert caught.value.fix
