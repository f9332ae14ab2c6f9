"""What uv found becomes pins and hashes; the tool hashes local wheels itself."""

import pytest
from helpers.locks import lock_context, resolved_package

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import NetworkError
from envbuild.lock.requirement_lines import read_requirements
from envbuild.lock.uv.resolution import Resolution, throw_away, with_local_hashes
from envbuild.lock.uv.torch_builds import TorchSource
from envbuild.lock.uv_lock import UvLock

WHEEL = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
BLOCK = "torch==2.13.0+cpu ; sys_platform == 'linux'\n    # via megatron-core"
HASHED = "numpy==2 \\\n    --hash=sha256:aa"


@pytest.mark.parametrize("fraction", ["", ".1", ".12", ".123", ".1234", ".123456", ".123456789"])
def test_seconds_of_an_upload_time(fraction):
    table = {"name": "lib", "wheels": [{"upload-time": f"2026-01-02T03:04:05{fraction}Z"}]}
    assert resolved_package(table).upload_seconds == [1767323045]


@pytest.fixture
def source(tmp_path) -> TorchSource:
    (tmp_path / WHEEL).write_bytes(b"the wheel")
    (tmp_path / WHEEL.replace("cp311", "cp312")).write_bytes(b"for another Python")
    (tmp_path / "torchvision-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").write_bytes(b"another package")
    return TorchSource("find-links", str(tmp_path))


def resolution(wheels: list[dict[str, str]]) -> Resolution:
    packages = ({"name": "torch", "wheels": wheels}, {"name": "numpy"})
    return Resolution(UvLock(package=tuple(map(resolved_package, packages))))


@pytest.mark.parametrize("key", ["path", "filename"])
def test_with_local_hashes_adds_the_digest_of_the_listed_wheel(source, key):
    done, hashed = with_local_hashes(read_requirements(f"{BLOCK}\n{HASHED}"), resolution([{key: WHEEL}]), source)
    assert hashed == HASHED
    assert done.splitlines() == [
        "torch==2.13.0+cpu ; sys_platform == 'linux' \\",
        f"    --hash={sha256_bytes(b'the wheel')}",
        "    # via megatron-core",
    ]


@pytest.mark.parametrize("place", ["folder", "page", "index"])
def test_package_without_any_hash_is_refused(source, place):
    places = {
        "folder": source,
        "page": TorchSource("find-links", "https://wheels.example/"),
        "index": TorchSource("package-index", None),
    }
    for block in (BLOCK, "torch==2.13.0+cpu \\\n    --hash=md5:0123"):
        with pytest.raises(NetworkError, match=r"states no sha256 of torch==2\.13\.0\+cpu$"):
            with_local_hashes(read_requirements(block), resolution([]), places[place])


def test_upload_times_are_those_of_every_file():
    files = [{"upload-time": "2026-01-02T03:04:05Z"}, {"upload-time": "2026-01-02T03:04:07Z"}, {}]
    package = {"name": "lib", "wheels": files, "sdist": {"upload-time": "2026-01-02T03:04:06Z"}}
    assert resolved_package(package).upload_seconds == [1767323045, 1767323047, 1767323046]
    assert Resolution(UvLock(package=(resolved_package(package),))).newest_upload == 1767323047


def test_package_that_is_there_twice_has_no_one_version():
    tables = [{"name": "lib", "version": "1"}, {"name": "lib", "version": "2"}, {"name": "numpy", "version": "2"}]
    own = {"name": "project", "version": "0", "source": {"virtual": "."}}
    actual = Resolution(UvLock(package=tuple(map(resolved_package, [*tables, own]))))
    assert (actual.pins, [*actual.packages]) == ({"numpy": "2"}, ["lib", "numpy"])


def test_every_throw_away_project_has_a_folder_of_its_own(tmp_path):
    context = lock_context(tmp_path)
    first, second = throw_away("one", context), throw_away("two", context)
    assert first != second
    assert [(folder / "pyproject.toml").read_text() for folder in (first, second)] == ["one", "two"]
