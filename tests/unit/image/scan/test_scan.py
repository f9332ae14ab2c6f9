"""One pass over a layer finds what is in it, and is made once."""

import hashlib

import pytest
from helpers.layer_tars import device, fifo, file, folder, hard_link, layer, symlink
from helpers.scans import AWS_KEY, PLACES, SITE, package, scan_of, scanned
from helpers.wheels import record_digest

from envbuild.core.errors import CheckRefusedError
from envbuild.core.progress import SilentReporter
from envbuild.image.scan.models import read_listing
from envbuild.image.scan.scan import scan_layer
from envbuild.rootfs.single_layer import members_of
from envbuild.store.local import LocalStore

ODD = b"no-utf8-\xff\n".decode("utf-8", "surrogateescape")


def test_listing_has_every_entry_with_what_it_is(tmp_path):
    kept = scanned(
        tmp_path,
        folder("etc", 0o700, uid=5, gid=6),
        file("etc/a", b"text", mode=0o640),
        symlink("etc/l", "a"),
        hard_link("etc/h", "etc/a"),
        fifo("etc/p"),
        device("etc/c"),
        file(ODD, b""),
    )
    found = {entry.path: entry for entry in read_listing(kept.listing)}
    assert {path: entry.kind for path, entry in found.items()} == {
        "etc": "d", "etc/a": "f", "etc/l": "l", "etc/h": "h", "etc/p": "p", "etc/c": "c", ODD: "f"
    }  # fmt: skip
    assert found["etc/a"].digest == hashlib.sha256(b"text").hexdigest()
    assert (found["etc/a"].mode, found["etc/a"].size) == (0o640, 4)
    assert (found["etc"].mode, found["etc"].uid, found["etc"].gid) == (0o700, 5, 6)
    assert (found["etc/l"].link, found["etc/h"].link) == ("a", "etc/a")
    assert (kept.scan.entries, kept.scan.files, kept.scan.file_bytes) == (7, 2, 4)


def test_scan_is_made_once_and_again_for_other_places(tmp_path):
    blob = layer(tmp_path, file("a", b"/data/build/store/x"))
    store, reads = LocalStore(tmp_path / "store", SilentReporter()), []

    def members():
        reads.append(1)
        return members_of(blob)

    first = scan_layer("a", "sha256:" + "0" * 64, members, PLACES, store)
    again = scan_layer("b", "sha256:" + "0" * 64, members, tuple(reversed(PLACES)), store)
    assert (len(reads), again.scan, again.name) == (1, first.scan, "b")
    assert [hit.what for hit in first.scan.places] == ["/data/build/store"]
    other = scan_layer("a", "sha256:" + "0" * 64, members, ("/elsewhere",), store)
    assert (len(reads), other.scan.places) == (2, ())


def test_damaged_layer_leaves_no_scan(tmp_path):
    blob = layer(tmp_path, file("a", b"x" * 100_000))
    blob.file.write_bytes(blob.file.read_bytes()[:-20])
    with pytest.raises(CheckRefusedError):
        scan_of(blob, tmp_path)
    assert list((tmp_path / "store").glob("layer-surveys/*")) == []


def record_row(name: str, content: bytes) -> str:
    return f"{name},sha256={record_digest(content)},{len(content)}\n"


def test_a_wheel_vouches_for_its_files_and_what_was_built_here_does_not(tmp_path):
    row = record_row("lib/test_keys.py", AWS_KEY)
    file_item = file(f"{SITE}/lib/test_keys.py", AWS_KEY)
    for files, vouched in (({}, True), ({"direct_url.json": b'{"vcs_info": {}}'}, False)):
        kept = scanned(tmp_path / str(vouched), *package("lib", "1.0", record=row, **files), file_item)
        assert [hit.vouched for hit in kept.scan.secrets] == [vouched]
    changed = scanned(
        tmp_path / "changed", *package("lib", "1.0", record=record_row("lib/test_keys.py", b"")), file_item
    )
    assert [hit.vouched for hit in changed.scan.secrets] == [False]


def test_a_debian_package_vouches_for_its_files(tmp_path):
    sums = hashlib.md5(AWS_KEY).hexdigest().encode() + b"  bin/x\n"
    kept = scanned(tmp_path, file("var/lib/dpkg/info/x.md5sums", sums), file("usr/bin/x", AWS_KEY))
    assert [hit.vouched for hit in kept.scan.secrets] == [True]


def test_large_files_are_read_for_places_only(tmp_path):
    kept = scanned(tmp_path, file("big", AWS_KEY + bytes(3 << 20) + b"/data/build/store\n"))
    assert kept.scan.secrets == ()
    assert [hit.path for hit in kept.scan.places] == ["big"]
