"""Indexes of store entries."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from envbuild.store import entry_index

DATA = b"x" * (entry_index.ALWAYS_READ_BYTES + 1)


def blob(entry, data=DATA):
    file = entry / "oci/blobs/sha256" / hashlib.sha256(data).hexdigest()
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    return file


def test_blob_that_another_entry_indexed_is_not_read_again(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    file = blob(first)
    entry_index.write_index(first)
    link = second / file.relative_to(first)
    link.parent.mkdir(parents=True)
    os.link(file, link)
    read = []
    monkeypatch.setattr(entry_index, "sha256_file", lambda path: read.append(path) or "sha256:other")
    entry_index.write_index(second)
    assert read == []
    assert entry_index.find_damage(second) == ""
    assert (second / entry_index.ENTRY_INDEX_FILE).read_bytes() == (first / entry_index.ENTRY_INDEX_FILE).read_bytes()


def test_a_new_blob_is_read_and_so_is_any_other_file(tmp_path, monkeypatch):
    file = blob(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(DATA)
    read = []
    monkeypatch.setattr(entry_index, "sha256_file", lambda path: read.append(path) or "sha256:found")
    os.utime(other, (entry_index.INDEXED_SECONDS, entry_index.INDEXED_SECONDS))
    entry_index.write_index(tmp_path)
    assert sorted(read) == sorted([file, other])


def test_write_into_a_blob_is_noticed(tmp_path):
    file = blob(tmp_path)
    entry_index.write_index(tmp_path)
    file.write_bytes(DATA[:-1] + b"y")
    assert "was changed" in entry_index.find_damage(tmp_path)


def test_a_file_that_was_given_away_is_read(tmp_path, monkeypatch):
    """Earlier versions made outputs as hard links: their new owner writes into the store, and puts the time back."""
    file = blob(tmp_path)
    entry_index.write_index(tmp_path)
    file.write_bytes(DATA[:-1] + b"y")
    os.utime(file, (entry_index.INDEXED_SECONDS, entry_index.INDEXED_SECONDS))
    real = Path.stat

    def given_away(path, **more):
        info = real(path, **more)
        return os.stat_result((*info[:4], info.st_uid + 1, *info[5:10])) if path == file else info

    monkeypatch.setattr(Path, "stat", given_away)
    assert "was changed" in entry_index.find_damage(tmp_path)
