"""The checks of wheels, each against files that the real compilers made: wrong SM, wrong torch, wrong system."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.compiled import gpu_library, shared
from helpers.wheels import make_wheel, record_digest
from unit.wheels.plans import plan

from envbuild.core.errors import CheckRefusedError
from envbuild.lock.uv.program import uv_program
from envbuild.wheels.audit.audit import AuditedWheel, check_wheel
from envbuild.wheels.audit.elf import read_binary
from envbuild.wheels.audit.retag import retagged

HERE = f"cp3{sys.version_info.minor}"
LINUX = f"{HERE}-{HERE}-linux_x86_64"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment like phase main: a torch of two libraries, of which libc10.so has `c10::size(int)`."""
    venv = tmp_path / "venv"
    subprocess.run([uv_program(), "venv", "-q", "--python", sys.executable, venv], check=True)
    torch = site_packages(venv) / "torch"
    shared(torch / "lib/libc10.so", "namespace c10 { int size(int of) { return of; } }")
    shared(torch / "lib/libtorch_cpu.so", "namespace at { int threads() { return 1; } }")
    loads = "import ctypes, os\nfolder = os.path.join(os.path.dirname(__file__), 'lib')\n"
    loads += "for name in os.listdir(folder): ctypes.CDLL(os.path.join(folder, name), mode=ctypes.RTLD_GLOBAL)\n"
    (torch / "__init__.py").write_text(loads)
    return venv


def site_packages(venv: Path) -> Path:
    return next(venv.glob("lib/python3*/site-packages"))


def made(folder: Path, libraries: Mapping[str, Path], tags: str = LINUX) -> Path:
    """The wheel of causal-conv1d 1.7.0 with these libraries."""
    files = {name: path.read_bytes() for name, path in libraries.items()}
    return make_wheel(folder / "made", "causal_conv1d", "1.7.0", tags, sources=files)


def checked(
    wheel: Path, environment: Path, folder: Path, recipe: Mapping[str, Any] | None = None, **parts: Any
) -> AuditedWheel:
    wanted = plan({"gpu_code": False, **(recipe or {})}, python=HERE, **parts)
    return check_wheel(wheel, wanted, environment, folder / "unpacked", folder / "log")


def refused(wheel: Path, environment: Path, folder: Path, **more: Any) -> str:
    with pytest.raises(CheckRefusedError) as error:
        checked(wheel, environment, folder, **more)
    return error.value.why


def test_a_wheel_for_another_sm_is_refused(environment: Path, tmp_path: Path, nvcc: Path) -> None:
    wheel = made(tmp_path, {"causal_conv1d/k.so": gpu_library(tmp_path / "k.so", nvcc, ["80"])})
    why = refused(wheel, environment, tmp_path, recipe={"gpu_code": True})
    assert why == "It contains sm_80; asked for was sm_90."


WAITS = "import time\n\n\ndef wait():\n    time.sleep(3600)\n\n\nwait()\n"


@pytest.mark.slow
def test_import_of_a_module_has_a_time_limit(environment: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "made", "causal_conv1d", "1.7.0", LINUX, module=WAITS)
    with pytest.raises(CheckRefusedError) as caught:
        checked(wheel, environment, tmp_path, recipe={"check_limit_seconds": 5})
    error = caught.value
    assert error.what.endswith("loading what it contains did not end within 5 s")
    assert "It was at: import causal_conv1d" in error.why
    assert '__init__.py", line 5 in wait' in error.why
    assert "raise check_limit_seconds in envs/wheels/causal-conv1d.toml" in error.fix


def test_a_module_that_ends_the_interpreter_is_refused(environment: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "made", "causal_conv1d", "1.7.0", LINUX, module="import os\nos._exit(0)\n")
    assert "ended the interpreter that loaded it" in refused(wheel, environment, tmp_path)


def test_a_wheel_of_this_machine_is_refused_for_an_old_base(environment: Path, tmp_path: Path) -> None:
    source = (
        "#include <iostream>\n#include <pthread.h>\nint use() { std::cout << 1; return pthread_join({}, nullptr); }"
    )
    wheel = made(tmp_path, {"causal_conv1d/k.so": shared(tmp_path / "k.so", source)})
    assert checked(wheel, environment, tmp_path).tag.policy == "manylinux_2_34"
    why = refused(wheel, environment, tmp_path, glibc="2.17")
    assert "needs GLIBC_2.34 of libc.so.6, and the base has glibc 2.17." in why


LONG = "namespace c10 { int size(long); }\nint use() { return c10::size(2L); }"
INT = "namespace c10 { int size(int); }\nint use() { return c10::size(2); }"


def test_a_wheel_for_another_torch_is_refused(environment: Path, tmp_path: Path) -> None:
    torch = site_packages(environment) / "torch/lib"
    wheel = made(tmp_path, {"causal_conv1d/k.so": shared(tmp_path / "k.so", LONG, torch / "libc10.so")})
    why = refused(wheel, environment, tmp_path)
    assert why == (
        "causal_conv1d/k.so was compiled against another torch: the locked one (2.11.0) has no _ZN3c104sizeEl."
    )


def test_another_torch_is_named_where_the_driver_is_missing_too(environment: Path, tmp_path: Path) -> None:
    torch = site_packages(environment) / "torch/lib"
    driver = shared(tmp_path / "driver/libcuda.so.1", 'extern "C" int cuInit() { return 0; }')
    flags = ("-Wl,--no-as-needed", torch / "libc10.so", driver)
    wheel = made(tmp_path, {"causal_conv1d/k.so": shared(tmp_path / "k.so", LONG, *flags)})
    assert "has no _ZN3c104sizeEl" in refused(wheel, environment, tmp_path)

    good = made(tmp_path, {"causal_conv1d/k.so": shared(tmp_path / "k.so", INT, *flags)})
    found = checked(good, environment, tmp_path)
    assert "libcuda.so.1: cannot open shared object file" in found.not_imported["causal_conv1d/k.so"]


def test_symbols_of_others_are_not_torchs(environment: Path, tmp_path: Path) -> None:
    """What the wheel has itself, what is weak, what a recipe declares, and what only sounds like torch."""
    torch = site_packages(environment) / "torch/lib"
    own = shared(tmp_path / "libown.so", "namespace at { int own() { return 1; } }")
    source = (
        "namespace at { int own(); int threads(); }\n"
        "namespace c10 { __attribute__((weak)) int maybe(); }\n"
        "#include <string>\nint third(std::string &text) { return text.at(3); }\n"
        'extern "C" int nvte_do(); namespace nvte { int at(int); }\n'
        "int use() { return at::own() + at::threads() + (c10::maybe ? 1 : 0); }\n"
        "int more() { return nvte_do() + nvte::at(1); }\n"
    )
    flags = (own, torch / "libtorch_cpu.so", "-Wl,-rpath,$ORIGIN")
    libraries = {"causal_conv1d/k.so": shared(tmp_path / "k.so", source, *flags), "causal_conv1d/libown.so": own}
    recipe = {"foreign_symbols": ["nvte_", "_ZN4nvte"]}
    found = checked(made(tmp_path, libraries), environment, tmp_path, recipe=recipe)
    assert "undefined symbol" in found.not_imported["causal_conv1d/k.so"]
    why = refused(made(tmp_path, libraries), environment, tmp_path)
    assert "another torch" not in why
    assert "does not load" in why


@pytest.mark.slow
def test_the_symbols_of_the_real_torch(stack_python: Path, tmp_path: Path) -> None:
    venv = stack_python.parent.parent
    libraries = site_packages(venv) / "torch/lib"
    source = "namespace at { int get_num_threads(); }\nint use() { return at::get_num_threads(); }"
    flags = (libraries / "libtorch_cpu.so", "-Wl,--allow-shlib-undefined")
    wheel = made(tmp_path, {"causal_conv1d/k.so": shared(tmp_path / "k.so", source, *flags)})
    found = checked(wheel, venv, tmp_path)
    assert (found.not_imported, found.imported) == ({}, ("causal_conv1d",))
    other = source.replace("get_num_threads", "get_num_weavers")
    wheel = made(tmp_path, {"causal_conv1d/k.so": shared(tmp_path / "k.so", other, *flags)})
    assert "has no _ZN2at15get_num_weaversEv." in refused(wheel, venv, tmp_path)


def good_library(environment: Path, folder: Path) -> Path:
    return shared(folder / "k.so", INT, site_packages(environment) / "torch/lib/libc10.so")


def packed(member: zipfile.ZipInfo) -> tuple[Any, ...]:
    return member.filename, member.date_time, member.external_attr, member.create_system, member.compress_type


def test_the_true_tag_is_given_and_the_wheel_stays_one(environment: Path, tmp_path: Path) -> None:
    plain = made(tmp_path, {"causal_conv1d/k.so": good_library(environment, tmp_path)})
    wheel = tmp_path / plain.name
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for name in archive.namelist():
            member = zipfile.ZipInfo(name, (1999, 12, 31, 23, 59, 58))
            member.external_attr, member.compress_type = 0o100755 << 16, zipfile.ZIP_DEFLATED
            new.writestr(member, archive.read(name))
    found = checked(wheel, environment, tmp_path)
    # libc10.so is the environment's; of the system there is nothing but what every x86-64 Linux has.
    assert (found.tag.policy, found.tag.against) == ("manylinux_2_5", ())
    assert found.wheel.name == f"causal_conv1d-1.7.0-{HERE}-{HERE}-manylinux_2_5_x86_64.whl"
    with zipfile.ZipFile(found.wheel) as archive, zipfile.ZipFile(wheel) as before:
        assert archive.testzip() is None
        assert [packed(item) for item in archive.infolist()] == [packed(item) for item in before.infolist()]
        about = archive.read("causal_conv1d-1.7.0.dist-info/WHEEL").decode()
        assert [line for line in about.splitlines() if line.startswith("Tag")] == [
            f"Tag: {HERE}-{HERE}-manylinux_2_5_x86_64"
        ]
        for name, digest, size in csv.reader(
            io.StringIO(archive.read("causal_conv1d-1.7.0.dist-info/RECORD").decode())
        ):
            content = archive.read(name)
            assert (digest, size) in {(f"sha256={record_digest(content)}", str(len(content))), ("", "")}

    os.utime(wheel)
    umask = os.umask(0o077)
    try:
        again = retagged(wheel, found.tag.platform, tmp_path / "again")
    finally:
        os.umask(umask)
    assert again.read_bytes() == found.wheel.read_bytes()
    assert retagged(again, found.tag.platform, tmp_path / "third") == again


@pytest.mark.slow
def test_uv_and_pip_install_what_was_tagged(environment: Path, tmp_path: Path) -> None:
    plain = made(tmp_path, {"causal_conv1d/k.so": good_library(environment, tmp_path)})
    wheel = checked(plain, environment, tmp_path).wheel
    no_index = ["--no-deps", "--no-index"]
    uv = [uv_program(), "pip", "install", "-q", *no_index, "--python", environment / "bin/python", wheel]
    subprocess.run(uv, check=True)
    subprocess.run([environment / "bin/python", "-c", "import causal_conv1d"], check=True)
    pips = tmp_path / "pips"
    subprocess.run([sys.executable, "-m", "venv", pips], check=True)
    subprocess.run([pips / "bin/python", "-m", "pip", "install", "-q", *no_index, wheel], check=True)
    assert (site_packages(pips) / "causal_conv1d/k.so").is_file()


def test_a_wheel_that_qualifies_for_nothing_keeps_its_tag(environment: Path, tmp_path: Path) -> None:
    library = shared(tmp_path / "k.so", "int use() { return 1; }", "-Wl,-z,x86-64-v3")
    wheel = made(tmp_path, {"causal_conv1d/k.so": library})
    found = checked(wheel, environment, tmp_path)
    assert found.wheel == wheel
    assert found.tag.platform == "linux_x86_64"
    assert found.tag.against == ("causal_conv1d/k.so asks for x86-64-v3 processors",)

    # A tag that is not true is taken back.
    wheel = made(tmp_path, {"causal_conv1d/k.so": library}, f"{HERE}-{HERE}-manylinux_2_17_x86_64")
    assert checked(wheel, environment, tmp_path).wheel.name.endswith("-linux_x86_64.whl")


def test_a_file_of_another_machine_is_refused(environment: Path, tmp_path: Path) -> None:
    library = shared(tmp_path / "k.so", "int use() { return 1; }")
    content = bytearray(library.read_bytes())
    content[18:20] = (183).to_bytes(2, "little")  # e_machine: EM_AARCH64
    library.write_bytes(content)
    assert read_binary("k.so", bytes(content)).machine == "aarch64"
    why = refused(made(tmp_path, {"causal_conv1d/k.so": library}), environment, tmp_path)
    assert why == "causal_conv1d/k.so is for aarch64, not x86_64."
