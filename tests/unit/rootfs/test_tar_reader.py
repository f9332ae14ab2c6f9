"""Tars as GNU tar and tarfile write them, and damaged ones."""

import io
import os
import subprocess
import tarfile

import pytest
from helpers.layer_tars import entry, file, tar_of
from hypothesis import given, settings
from hypothesis import strategies as st

from envbuild.rootfs import tar_header
from envbuild.rootfs.layer_writer import walk
from envbuild.rootfs.members import Kind, Member, Refusal
from envbuild.rootfs.tar_reader import read_tar
from envbuild.rootfs.tar_writer import write_member


def members(data, portion=1 << 20):
    pieces = (data[at : at + portion] for at in range(0, len(data), portion))
    return {member.name: (member, content.read() if content else None) for member, content in read_tar(pieces)}


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "d").mkdir(parents=True)
    (root / "d" / ("n" * 200)).write_bytes(b"long")
    (root / ("p" * 90)).mkdir()
    (root / ("p" * 90) / ("q" * 90)).write_bytes(b"prefix")
    (root / "l").symlink_to("t" * 180)
    os.link(root / "d" / ("n" * 200), root / "zz")
    with open(os.path.join(os.fsencode(root), b"no-utf8-\xff"), "wb") as stream:
        stream.write(b"bytes")
    os.mkfifo(root / "fifo")
    return root


@pytest.mark.parametrize("form", ["gnu", "posix", "ustar"])
@pytest.mark.parametrize("portion", [1 << 20, 999])
def test_what_gnu_tar_writes(tree, form, portion):
    if form == "ustar":
        (tree / "zz").unlink()
        (tree / "d" / ("n" * 200)).unlink()
        (tree / "l").unlink()
    words = ["tar", f"--format={form}", "--numeric-owner", "--sort=name", "--directory", str(tree), "--create", "."]
    data = subprocess.run(words, check=True, capture_output=True).stdout
    found = members(data, portion)
    assert set(found) - {""} == {name for _, name, _ in walk(tree)}
    for name, (member, content) in found.items():
        path = os.path.join(os.fsencode(tree), os.fsencode(name))
        info = os.lstat(path)
        assert (member.mode, member.mtime) == (info.st_mode & 0o7777, int(info.st_mtime)), name
        if content is not None:
            with open(path, "rb") as stream:
                assert content == stream.read(), name
    if form != "ustar":
        assert found["l"][0].link == "t" * 180
        assert found["zz"][0].kind is Kind.HARD_LINK
    assert found["fifo"][0].kind is Kind.FIFO


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=60).filter(
    lambda text: text not in (".", "..")
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.lists(names, min_size=1, max_size=4), st.binary(max_size=2000)), max_size=8),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.integers(min_value=1, max_value=1500),
)
def test_what_tarfile_writes(entries, form, portion):
    wanted = {"/".join(parts): data for parts, data in entries}
    data = tar_of([file(name, content, uid=1 << 21, mtime=1.5) for name, content in wanted.items()], form)
    found = members(data, portion)
    assert {name: content for name, (_, content) in found.items()} == wanted
    assert {(member.uid, member.mtime) for member, _ in found.values()} <= {(1 << 21, 1)}


def test_sizes_of_more_than_eight_gigabytes():
    written = io.BytesIO()
    write_member(written, Member("big", Kind.FILE, size=1 << 40))
    assert tarfile.TarInfo.frombuf(written.getvalue(), "utf-8", "strict").size == 1 << 40
    with pytest.raises(Refusal, match="middle of a member"):
        members(written.getvalue() + bytes(512))


def test_times_in_a_header_of_gnu_are_no_part_of_its_name():
    data = bytearray(tar_of([file("a")]))
    data[345:369] = b"%011o\0%011o\0" % (5, 10)
    resealed(data)
    assert set(members(bytes(data))) == {"a"}


def damaged(change):
    data = bytearray(tar_of([file("a", b"1" * 600), file("b", b"2")]))
    change(data)
    return bytes(data)


def resealed(data, at=0):
    """With a checksum that fits."""
    block = data[at : at + 512]
    block[148:156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(block)


def with_field(start, value):
    def change(data):
        data[start : start + len(value)] = value
        resealed(data)

    return damaged(change)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (damaged(lambda data: data.__setitem__(0, 7)), "checksum"),
        (with_field(124, b"0000000zzz0\0"), "header is damaged"),
        (with_field(124, b"\xff" * 12), "size is negative"),
        (with_field(156, b"Q"), "type is b'Q'"),
        (damaged(lambda data: data.__delitem__(slice(700, None))), "middle of a member"),
        (damaged(lambda data: data.__delitem__(slice(300, None))), "middle of a member"),
    ],
)
def test_damaged_tars_are_refused(data, why):
    with pytest.raises(Refusal, match=why):
        members(data)


def pax(records, data=b"x", **attributes):
    """A member with these PAX records, written as they are."""
    body = b""
    for key, value in records:
        text = b" " + key + b"=" + value + b"\n"
        length = len(text) + len(str(len(text)))
        body += str(length if len(str(length)) == len(str(len(text))) else length + 1).encode() + text
    return raw_pax(body) + tar_of([file("plain", data, **attributes)])


def raw_pax(body):
    member = tarfile.TarInfo("headers")
    member.type, member.size = b"x", len(body)
    return member.tobuf(tarfile.USTAR_FORMAT) + body + bytes(-len(body) % 512)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (raw_pax(b"99 path=a\n"), "PAX header is damaged"),
        (raw_pax(b"path=a\n"), "PAX header is damaged"),
        (raw_pax(b"0 path=a\n"), "PAX header is damaged"),
        (raw_pax(b"8 path\n\n"), "PAX header is damaged"),
        (pax([(b"path", b"a\0b")]), "NUL"),
        (pax([(b"path", b"/etc/passwd")]), "absolute"),
        (pax([(b"path", b"../x")]), "'..'"),
        (pax([(b"size", b"-5")]), "number was expected"),
        (pax([(b"uid", b"x")]), "number was expected"),
        (pax([(b"mtime", b"soon")]), "number was expected"),
        (pax([(b"GNU.sparse.map", b"0,1"), (b"GNU.sparse.size", b"9")]), "sparse"),
        (pax([(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0")]), "sparse"),
        (with_field(156, b"S"), "sparse"),
    ],
)
def test_hostile_pax_headers_are_refused(data, why):
    with pytest.raises(Refusal, match=why):
        members(data)


def test_a_damaged_header_is_not_the_end():
    whole = bytearray(tar_of([file("a"), file("b")]))
    whole[512] ^= 1
    with pytest.raises(Refusal, match="checksum"):
        members(bytes(whole))


def test_pax_headers_hold_for_the_next_member_alone():
    first = pax([(b"path", b"renamed"), (b"mtime", b"-3.5"), (b"uid", b"4294967295")])[: 4 * 512]
    found = members(first + tar_of([file("next")]))
    assert set(found) == {"renamed", "next"}
    assert (found["renamed"][0].mtime, found["renamed"][0].uid) == (0, 4294967295)


def test_a_header_that_fills_the_memory_is_refused():
    member = tarfile.TarInfo("headers")
    member.type, member.size = b"L", 1 << 30
    with pytest.raises(Refusal, match="more than 4194304 bytes"):
        members(member.tobuf(tarfile.GNU_FORMAT) + bytes(4096))


def repeated(kind, data, times):
    """The same header over and over, and a member."""
    member = tarfile.TarInfo("headers")
    member.type, member.size = kind, len(data)
    header = member.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)
    return header * times + tar_of([file("after")])


@pytest.mark.parametrize("kind", [b"x", b"L", b"K", b"g"])
@pytest.mark.parametrize("size", [0, 1 << 20])
def test_headers_of_a_member_count_together(kind, size):
    data = b"9 a=bcde\n" * (size // 9)
    times = (tar_header.MAX_HEADER_BYTES // max(len(data), 512)) + 1
    with pytest.raises(Refusal, match="long names and PAX headers"):
        members(repeated(kind, data, times))


def test_pax_records_are_counted(monkeypatch):
    monkeypatch.setattr(tar_header, "MAX_RECORDS", 5)
    assert set(members(repeated(b"x", b"9 a=bcde\n" * 5, 1))) == {"after"}
    with pytest.raises(Refusal, match="more than 5 PAX records"):
        members(repeated(b"x", b"9 a=bcde\n" * 6, 1))


def test_members_are_counted(monkeypatch):
    monkeypatch.setattr(tar_header, "MAX_MEMBERS", 2)
    assert len(members(tar_of([file("a"), file("b")]))) == 2
    with pytest.raises(Refusal, match="more than 2 members"):
        members(tar_of([file("a"), file("b"), file("c")]))


@pytest.mark.parametrize("owner", [-1, 1 << 32, 1 << 60])
@pytest.mark.parametrize("at", [108, 116], ids=["user", "group"])
def test_owners_that_no_file_can_have_are_refused(owner, at):
    data = bytearray(tar_of([file("a")]))
    data[at : at + 8] = (owner & ((1 << 63) - 1) | 1 << 63).to_bytes(8, "big")
    resealed(data)
    with pytest.raises(Refusal, match=r"out of range|header is damaged"):
        members(bytes(data))


def test_a_global_header_describes_no_member():
    data = repeated(b"g", b"13 path=other\n" + b"10 uid=77\n", 1)
    assert members(data)["after"][0].uid == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(min_value=0, max_value=2047), st.binary(min_size=1, max_size=30))
def test_damaged_tar_is_read_or_refused_without_another_error(at, noise):
    data = bytearray(tar_of([file("a", b"1" * 600), entry("s", tarfile.SYMTYPE, "a"), file("n" * 120, b"2")]))
    data[at : at + len(noise)] = noise
    for block in range(0, len(data) - 1024, 512):
        if data[block + 257 : block + 262] == b"ustar":
            resealed(data, block)
    try:
        found = members(bytes(data))
    except Refusal as refusal:
        assert refusal.why
    else:
        assert len(found) <= 3
