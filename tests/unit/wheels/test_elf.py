"""What compiled files contain: real ELF files of this interpreter, and fat binaries byte by byte."""

import struct
import zipfile

import pytest

from envbuild.core.errors import CheckRefusedError
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.audit.binary import version_key
from envbuild.wheels.audit.elf import read_binary, read_wheel
from envbuild.wheels.audit.fatbin import PTX_KIND, SASS_KIND, fatbin

# The first 64 bytes of entries that nvcc 13.0.88 wrote for sm_90, sm_90a and sm_100f, with the code's length set to 0.
SM_90 = "0200010140000000000000000000000000000000000000000800010" + "05a0000000000000000000000110000" + "00" * 21
SM_90A = SM_90.replace("110000", "110010", 1)


def entry(kind: int, sm: int, flags: int = 0x11, code: bytes = b"\x7fELF\0\0\0\0") -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + bytes(12) + struct.pack("<I", sm) + bytes(8)
    return (head + struct.pack("<Q", flags)).ljust(64, b"\0") + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_entries_of_nvcc_are_read():
    for text, sm in ((SM_90, "90"), (SM_90A, "90a")):
        assert fatbin(container(bytes.fromhex(text)[:64]), "x") == Architectures.named([sm])


def test_every_container_and_entry_counts():
    data = container(entry(SASS_KIND, 80), entry(SASS_KIND, 90, 0x100011)) + bytes(8)
    data += container(entry(SASS_KIND, 100, 0x1200011), entry(PTX_KIND, 100), entry(SASS_KIND, 80))
    assert fatbin(data, "x") == Architectures.named(["80", "90a", "100f"], ["100"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\1" * 32, "unknown form at byte 0"),
        (container(entry(SASS_KIND, 90))[:-4], "unknown form at byte 0"),
        (container(entry(64, 90)), "unknown kind 64 for sm_90"),
        (container(entry(SASS_KIND, 90)[:-8]), "an entry of an unknown form at byte 16"),
    ],
)
def test_unknown_form_of_gpu_code_is_refused(data, message):
    with pytest.raises(CheckRefusedError) as refused:
        fatbin(data, "x.so")
    assert message in refused.value.why
    assert "x.so" in refused.value.what


def test_a_library_of_this_machine_is_read():
    import _ctypes

    with open(_ctypes.__file__, "rb") as stream:
        found = read_binary("_ctypes.so", stream.read())
    assert found.architectures == Architectures()
    assert any(name.startswith("libffi") for name in found.libraries)
    assert version_key(found.newest("GLIBC")) >= (2, 2)


def test_file_that_is_not_elf_is_refused():
    with pytest.raises(CheckRefusedError, match=r"broken\.so"):
        read_binary("broken.so", b"\x7fELF" + b"\xff" * 40)


def test_a_wheel_without_compiled_files_has_none(tmp_path):
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/__init__.py", "")
    assert read_wheel(wheel) == ()
    wheel.write_bytes(b"PK nothing")
    with pytest.raises(CheckRefusedError, match="not understood"):
        read_wheel(wheel)
