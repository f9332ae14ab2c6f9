"""The folder that a lock is exported to: its context, and what of a lock becomes which instruction."""

import io
import tarfile
from copy import copy
from types import SimpleNamespace

import pytest
from helpers.errors import error_of
from helpers.locks import MAIN, make_lock
from helpers.simple_index import make_sdist
from helpers.sites import context_of

from envbuild.catalog.base import RegistryImage
from envbuild.catalog.catalog import Catalog, HostDistribution, definition_digest, select
from envbuild.catalog.data import data_root
from envbuild.catalog.stack import Phase
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError, ConfigurationError
from envbuild.image import base as bases
from envbuild.image.docker import compile as compile_stage
from envbuild.image.docker.export import export_dockerfile
from envbuild.image.inputs import ImageInputs
from envbuild.image.record import BaseConfig, BaseRecord
from envbuild.lock import lockfile
from envbuild.lock.lockfile import read_lock
from envbuild.lock.models import LockedComponent, LockedPhase
from envbuild.rootfs.layer_writer import LayerWriter
from envbuild.store.record import dump
from envbuild.wheels.sources import WheelSources
from envbuild.wheels.toolchain.index_toolkit import Pinned

CATALOG = Catalog.open(data_root())
CPU = select(CATALOG, "mcore", "cpu", "debian12", HostDistribution("debian", "12"))
CUDA = select(CATALOG, "mcore", "h200", "debian12-cu130", HostDistribution("debian", "12"))
HOST = "secret-mirror.example"
SDIST = LockedComponent(asked="==1.0", version="1.0", phase=Phase.COMPILE, sdist="sha256:1")
GIT = LockedComponent(
    asked="main", version="0.5", phase=Phase.MAIN, git="https://git.example/pure", commit="c" * 40, subdirectory="sub"
)


@pytest.fixture
def context(tmp_path):
    return context_of(
        tmp_path,
        apt_mirror=f"http://{HOST}/debian",
        find_links=(f"https://{HOST}/links",),
        torch_index=f"https://{HOST}/{{build}}",
    )


@pytest.fixture(autouse=True)
def _sources(monkeypatch, tmp_path):
    monkeypatch.setattr(bases.mmdebstrap, "mmdebstrap_version", lambda: "mmdebstrap 1.3.5")
    files = {"setup.py": "", "sub/setup.py": ""}
    monkeypatch.setattr(
        WheelSources,
        "archive",
        lambda _, origin: make_sdist(tmp_path / "made", origin.package, origin.version, files=files).read_bytes(),
    )


def with_base(selection, **changes):
    """A selection whose base is defined otherwise."""
    changed = copy(selection)
    changed.__dict__["base"] = selection.base.model_copy(update=changes)
    return changed


def put_base(context, selection, *layers, config=None):
    """A base in the store; each layer is a dictionary of files."""

    def build(folder):
        (folder / "layers").mkdir(parents=True)
        records = []
        for number, files in enumerate(layers):
            with LayerWriter(folder / "made", 5) as writer:
                for name, data in files.items():
                    writer.add_bytes(name, data)
            records.append(writer.record(f"base-{number}"))
            (folder / "made").rename(folder / "layers" / records[-1].digest.removeprefix("sha256:"))
        record = BaseRecord(
            schema="envbuild.base/2",
            layers=tuple(records),
            made_by="x",
            config=config or BaseConfig(),
            packages={"libc6": "2.36"},
        )
        (folder / "record.json").write_bytes(dump(record))

    context.store.get_or_build(bases.KIND, bases.base_key(selection.base), build)


def lock_of(folder, selection, main=MAIN, components=None, **texts):
    """A lock for the base; ``texts`` are the requirements of phases compile and git."""
    record = make_lock(folder, main)
    phases = dict(record.phases)
    for phase, text in texts.items():
        (folder / f"{phase}.txt").write_text(text)
        count = sum(line[:1].isalnum() for line in text.splitlines())
        phases[phase] = LockedPhase(file=f"{phase}.txt", packages=count, digest=sha256_bytes(text.encode()))
    base = record.base.model_copy(
        update={
            "name": selection.base_name,
            "definition_digest": definition_digest(selection.base),
            "cuda": selection.base.cuda,
        }
    )
    found = {**record.components, **(components or {})}
    digest = lockfile.content_digest(base.definition_digest, record.torch, found, phases)
    changed = record.model_copy(update={"base": base, "components": found, "phases": phases, "digest": digest})
    (folder / lockfile.RECORD_FILE).write_text(lockfile.render(lockfile.sealed(changed)))
    return read_lock(folder)


def export(context, selection, lock, wheels, out):
    export_dockerfile(ImageInputs(selection=selection, lock=lock, wheels=wheels), context, out)


def names_in(file):
    with tarfile.open(file) as tar:
        return {member.name for member in tar if member.isfile()}


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_context_of_a_lock_of_wheels(context, tmp_path):
    put_base(context, CPU, {"etc/os-release": b"ID=debian"})
    lock = lock_of(tmp_path / "lock", CPU)
    out = tmp_path / "new/out"
    export(context, CPU, lock, {}, out)
    assert files_of(out) == [
        "Dockerfile", "base.tar.gz", "configuration.tar.gz", "lock/main.txt", "lock/packages.txt", "tools/uv",
    ]  # fmt: skip
    assert (out / "lock/main.txt").read_text() == MAIN
    assert (out / "lock/packages.txt").read_text() == "megatron-core==0.16.1\ntorch==2.13.0+cpu\nuvicorn==0.30\n"
    assert names_in(out / "base.tar.gz") == {"etc/os-release"}
    assert "etc/envbuild/fingerprint.json" in names_in(out / "configuration.tar.gz")
    text = (out / "Dockerfile").read_text()
    assert "TORCH_INDEX_URL=https://...   an index with torch's build cpu" in text
    assert "ARG TORCH_INDEX_URL\n" in text
    assert not [path for path in out.rglob("*.txt") if HOST in path.read_text()]
    assert HOST not in text
    assert oct(out.stat().st_mode)[-3:] == "755"
    # None is the store's own, or uv's of this environment.
    assert all(path.stat().st_nlink == 1 for path in out.rglob("*") if path.is_file())


def test_export_is_replaced_and_another_folder_is_not(context, tmp_path):
    put_base(context, CPU, {"a": b""})
    lock = lock_of(tmp_path / "lock", CPU)
    out = tmp_path / "out"
    for _ in range(2):
        export(context, CPU, lock, {}, out)
        (out / "stale").write_text("")
    export(context, CPU, lock, {}, out)
    assert "stale" not in files_of(out)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "Dockerfile").write_text("FROM debian\n")
    (tmp_path / "link").symlink_to(out)
    for place in (mine, tmp_path / "link", mine / "Dockerfile"):
        with pytest.raises(ConfigurationError, match="holds something else"):
            export(context, CPU, lock, {}, place)
    assert files_of(mine) == ["Dockerfile"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_base_of_several_layers_is_one_tar_without_whiteouts(context, tmp_path):
    put_base(context, CPU, {"a": b"old", "gone": b""}, {".wh.gone": b"", "a": b"new"})
    export(context, CPU, lock_of(tmp_path / "lock", CPU), {}, tmp_path / "out")
    with tarfile.open(tmp_path / "out/base.tar.gz") as tar:
        assert {member.name: tar.extractfile(member).read() for member in tar} == {"a": b"new"}


def test_base_on_a_registry_is_named_by_its_digest(context, tmp_path):
    obtain = RegistryImage(method="oci", image="registry.example:5000/a/b:tag", digest="sha256:" + "a" * 64)
    selection = with_base(CPU, obtain=obtain)
    config = BaseConfig(environment={"PATH": "/base/bin", "PYTHONPATH": "/x", "OWN": "1"}, entrypoint=("/start",))
    put_base(context, selection, {"a": b""}, config=config)
    export(context, selection, lock_of(tmp_path / "lock", selection), {}, tmp_path / "out")
    text = (tmp_path / "out/Dockerfile").read_text()
    assert f"FROM registry.example:5000/a/b@sha256:{'a' * 64} AS base" in text
    assert "base.tar.gz" not in [*files_of(tmp_path / "out"), text]
    assert 'ENV PYTHONPATH="" \\\n    PATH="/opt/envbuild/venv/bin:/base/bin" \\\n' in text
    assert 'OWN="1"' in text
    assert "ENTRYPOINT []" in text


def test_base_that_was_not_resolved_is_refused(context, tmp_path):
    obtain = RegistryImage(method="oci", image="registry.example/a/b:tag")
    selection = with_base(CPU, obtain=obtain)
    with pytest.raises(CheckRefusedError, match="was not resolved"):
        export(context, selection, lock_of(tmp_path / "lock", selection), {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wheel_of_the_wheelhouse_is_in_the_context_and_is_not_compiled(context, tmp_path):
    put_base(context, CPU, {"a": b""})
    lock = lock_of(tmp_path / "lock", CPU, components={"ext": SDIST}, compile="ext==1.0 --hash=sha256:1\n")
    wheel = tmp_path / "ext-1.0-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"wheel")
    built = SimpleNamespace(wheel=wheel, record=SimpleNamespace(digest="sha256:w"))
    export(context, CPU, lock, {"ext": built}, tmp_path / "out")
    text = (tmp_path / "out/Dockerfile").read_text()
    assert (tmp_path / "out/wheels" / wheel.name).read_bytes() == b"wheel"
    assert "RUN uv pip install --no-deps --no-index --find-links /build/wheels ext\n" in text
    assert not [word for word in ("AS wheels", "apt-get", "compile.txt") if word in text]


def test_sources_of_phase_compile_have_a_stage_with_compilers(context, tmp_path):
    put_base(context, CPU, {"a": b""})
    lock = lock_of(tmp_path / "lock", CPU, components={"ext": SDIST}, compile="ext==1.0 --hash=sha256:1\n")
    export(context, CPU, lock, {}, tmp_path / "out")
    text = (tmp_path / "out/Dockerfile").read_text()
    assert names_in(tmp_path / "out/sources/ext.tar.gz") >= {"ext/setup.py"}
    stage = text.partition("AS wheels")[2].partition("FROM")[0]
    assert "ARG APT_MIRROR\nRUN : ${APT_MIRROR:?name a mirror of debian: " in stage
    assert '"deb $APT_MIRROR-security bookworm-security main"' in stage
    assert "gcc g++ make libc6-dev python3.11-dev" in stage
    assert "--out-dir /wheels /build/sources/ext\n" in stage
    assert "COPY --from=wheels /wheels/ /build/wheels/\nRUN uv pip install --no-deps --no-index" in text


def test_sources_with_gpu_code_are_compiled_for_the_target_with_the_index_toolkit(context, tmp_path, monkeypatch):
    put_base(context, CUDA, {"a": b""})
    plan = SimpleNamespace(
        name="ext 1.0",
        asked=SimpleNamespace(torch_list=lambda: "9.0"),
        parts=SimpleNamespace(package="ext", headers=("nvidia/cudnn/include",), variables={"FLAGS": "-O2"}),
        patches=(),
    )
    monkeypatch.setattr(compile_stage, "plan_wheels", lambda *_: (plan,))
    pinned = (Pinned(name="nvidia-cuda-nvcc", version="13.0.88", hashes=("sha256:1", "sha256:2")),)
    monkeypatch.setattr(compile_stage, "pinned_packages", lambda *_: pinned)
    lock = lock_of(tmp_path / "lock", CUDA, components={"ext": SDIST}, compile="ext==1.0 --hash=sha256:1\n")
    export(context, CUDA, lock, {}, tmp_path / "out")
    text = (tmp_path / "out/Dockerfile").read_text()
    assert (tmp_path / "out/lock/toolkit.txt").read_text() == (
        "nvidia-cuda-nvcc==13.0.88 --hash=sha256:1 --hash=sha256:2\n"
    )
    assert "tools/toolkit.sh" in files_of(tmp_path / "out")
    assert "RUN sh /build/tools/toolkit.sh /cuda/nvidia/cu13\nENV CUDA_HOME=/cuda/nvidia/cu13 " in text
    assert "TORCH_CUDA_ARCH_LIST=9.0" in text
    assert "CPATH=/opt/envbuild/venv/lib/python3.11/site-packages/nvidia/cudnn/include" in text
    assert 'NVIDIA_REQUIRE_ARCH="arch>=9.0,' in text


def test_cuda_without_a_toolkit_on_the_index_names_envbuild_wheels(context, tmp_path, monkeypatch):
    monkeypatch.setattr(
        compile_stage, "plan_wheels", lambda *_: (SimpleNamespace(parts=SimpleNamespace(package="ext")),)
    )
    selection = with_base(CUDA, cuda="12.8")
    put_base(context, selection, {"a": b""})
    lock = lock_of(tmp_path / "lock", selection, components={"ext": SDIST}, compile="ext==1.0 --hash=sha256:1\n")
    error = error_of(CheckRefusedError, export, context, selection, lock, {}, tmp_path / "out")
    assert "envbuild wheels --stack mcore --base debian12-cu130 --target h200" in error.fix


def test_package_from_git_is_built_from_its_sources(context, tmp_path):
    put_base(context, CPU, {"a": b""})
    git = f"pure @ git+https://git.example/pure@{'c' * 40}\nother @ https://files.example/other-1.0-py3-none-any.whl\n"
    lock = lock_of(tmp_path / "lock", CPU, components={"pure": GIT}, git=git)
    export(context, CPU, lock, {}, tmp_path / "out")
    text = (tmp_path / "out/Dockerfile").read_text()
    with tarfile.open(fileobj=io.BytesIO((tmp_path / "out/sources/pure.tar.gz").read_bytes())) as tar:
        assert "pure/sub/setup.py" in tar.getnames()
    assert "RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_PURE=0.5 \\\n" in text
    assert "--out-dir /build/wheels /build/sources/pure/sub\n" in text
    assert (tmp_path / "out/lock/git.txt").read_text() == git.splitlines(keepends=True)[1]
