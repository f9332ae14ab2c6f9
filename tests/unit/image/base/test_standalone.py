"""The standalone Python of a base: where it lies, what uv is asked for, and what is refused."""

import tarfile
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest
from helpers.stack_files import write_base

from envbuild.catalog.catalog import Catalog
from envbuild.core.errors import CheckRefusedError, NetworkError
from envbuild.core.process import Finished
from envbuild.core.progress import SilentReporter
from envbuild.image.base import mmdebstrap, standalone
from envbuild.image.base.base import obtain
from envbuild.store.local import LocalStore

EXECUTABLE = "/opt/python/bin/python3.11"


@pytest.fixture
def base(tmp_path):
    write_base(tmp_path)
    path = tmp_path / "envs/bases/small.toml"
    text = path.read_text().replace('"base"', '"standalone"').replace("/usr/bin/python3.11", EXECUTABLE)
    path.write_text(text)
    return Catalog((tmp_path / "envs",)).base("small")


@pytest.fixture
def rootfs(tmp_path):
    folder = tmp_path / "staged/entry/rootfs"
    (folder / "opt").mkdir(parents=True)
    return folder


class Uv:
    """A uv that installs a Python of a few files, or fails."""

    def __init__(self, status=0):
        self.status = status
        self.calls = []

    def __call__(self, argv, *, options, **_):
        self.calls.append((list(map(str, argv))[1:], options.env))
        if "python" in map(str, argv):
            folder = options.working_on / "standalone"
            made = folder / "cpython-3.11.7-linux-x86_64-gnu"
            if not self.status:
                (made / "bin").mkdir(parents=True)
                (made / "bin/python3.11").write_text("program")
                (made / "bin/python3.11").chmod(0o700)
                (made / "lib/python3.11").mkdir(parents=True)
                (made / "lib/python3.11/_sysconfigdata.py").write_text(f"prefix = '{made}'\n")
                (made / "lib/libx.so").write_bytes(f"\0{made}".encode())
                (folder / "cpython-3.11-linux-x86_64-gnu").symlink_to(made)
        return Finished(status=self.status, output="error: Failed to download\n", seconds=0.1)


def add(base, rootfs, uv, monkeypatch):
    monkeypatch.setattr(standalone, "run", uv)
    monkeypatch.setattr(standalone.sandbox, "probe", lambda: "bwrap")
    log, reporter = rootfs.parent / "log", SilentReporter()
    installed = standalone.download(rootfs.parent.parent, base, "small", log, reporter)
    return standalone.add_python(installed, rootfs, base, "small", log, reporter)


def test_python_is_a_layer_of_its_own_and_knows_its_final_place(base, rootfs, monkeypatch):
    monkeypatch.setenv("UV_PYTHON", "3.9")
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    uv = Uv()
    found = add(base, rootfs, uv, monkeypatch)
    (words, environment), (compiling, _) = uv.calls
    assert words[-4:] == ["python", "install", "cpython-3.11-linux-x86_64-gnu", "--no-bin"]
    assert environment["UV_PYTHON_DOWNLOADS"] == "manual"
    assert "UV_PYTHON" not in environment
    assert "/opt/python/lib/python3.11" in compiling
    assert found.made_by.startswith("CPython 3.11.7 by uv ")
    assert (rootfs / "opt/python/lib/python3.11/_sysconfigdata.py").read_text() == "prefix = '/opt/python'\n"
    assert b"/opt/python" not in (rootfs / "opt/python/lib/libx.so").read_bytes(), "a binary is left as it is"
    with tarfile.open(found.layer.file) as tar:
        modes = {member.name: member.mode for member in tar}
    assert modes["opt/python/bin/python3.11"] == 0o755
    assert list(modes)[:2] == ["opt", "opt/python"]


def test_uv_that_cannot_download_names_its_mirrors(base, rootfs, monkeypatch):
    with pytest.raises(NetworkError, match=r"uv does not install Python 3\.11") as caught:
        add(base, rootfs, Uv(status=2), monkeypatch)
    assert "UV_PYTHON_INSTALL_MIRROR" in caught.value.fix
    assert "Failed to download" in caught.value.why


def test_a_python_that_cannot_be_downloaded_is_known_before_the_distribution_is_made(base, rootfs, monkeypatch):
    monkeypatch.setattr(standalone, "run", Uv(status=2))
    monkeypatch.setattr(mmdebstrap, "build", lambda *_: pytest.fail("mmdebstrap takes minutes"))
    selection = SimpleNamespace(base=base, base_name="small")
    reporter = SilentReporter()
    store = LocalStore(rootfs.parent.parent / "store", reporter)
    (store.root / "logs").mkdir(parents=True)
    with pytest.raises(NetworkError, match="uv does not install"):
        obtain(rootfs.parent, selection, SimpleNamespace(store=store, reporter=reporter), at=datetime.now(timezone.utc))


def test_nothing_is_put_over_what_a_base_has(base, rootfs, monkeypatch):
    (rootfs / "opt/python").mkdir()
    with pytest.raises(CheckRefusedError, match="has something at /opt/python"):
        add(base, rootfs, Uv(), monkeypatch)
