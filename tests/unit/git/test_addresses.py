"""What of git needs no repository: addresses, moments, listings."""

from __future__ import annotations

from datetime import date, datetime, timezone

import pytest

from envbuild.core.errors import ConfigurationError, InternalError
from envbuild.core.progress import SilentReporter
from envbuild.git.refs import GitRef, RemoteRefs
from envbuild.git.repository import GitRepository, last_second
from envbuild.git.tree import _absolute
from envbuild.store.local import LocalStore

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "url",
    ["", "--upload-pack=touch x", "https://h/a\nb", "https://me:pw@h/o/r", "https://token@h/o/r", "ssh://me:pw@h/r"],
)
def test_address_that_is_refused(tmp_path, url):
    with pytest.raises(ConfigurationError) as caught:
        GitRepository(url, LocalStore(tmp_path, SilentReporter()), SilentReporter())
    assert "pw" not in f"{caught.value} {caught.value.as_json()}"
    assert "token" not in f"{caught.value} {caught.value.as_json()}"


@pytest.mark.parametrize("url", ["ssh://git@h/o/r", "git@h:o/r"])
def test_address_with_the_user_of_ssh_is_taken(tmp_path, url):
    assert GitRepository(url, LocalStore(tmp_path, SilentReporter()), SilentReporter()).url == url


@pytest.mark.parametrize(
    ("base", "url", "absolute"),
    [
        ("https://h/o/r", "../s.git", "https://h/o/s.git"),
        ("https://h/o/r/", "../../p/s", "https://h/p/s"),
        ("https://h/o/r", "./s", "https://h/o/r/s"),
        ("git@h:o/r.git", "../s.git", "git@h:o/s.git"),
        ("git@h:r.git", "../s.git", "git@h:s.git"),
        ("https://h/o/r", "ssh://x/y", "ssh://x/y"),
    ],
)
def test_address_of_a_submodule(base, url, absolute):
    assert _absolute(base, url) == absolute


@pytest.mark.parametrize(
    ("name", "full", "may"),
    [(SHA, True, True), (SHA.upper(), True, True), (SHA[:39], False, True), ("g" * 40, False, False)],
)
def test_git_ref(name, full, may):
    assert (GitRef(name).is_full_commit, GitRef(name).may_be_commit) == (full, may)


def test_last_second():
    assert last_second(date(2024, 12, 31)) == datetime(2024, 12, 31, 23, 59, 59, tzinfo=timezone.utc)
    with pytest.raises(InternalError):
        last_second(datetime(2025, 7, 28))  # noqa: DTZ001


def test_listed_tags_are_peeled():
    lines = [("1", "heads/main"), ("2", "tags/v1"), ("3", "tags/v1^{}"), ("4", "tags/light"), ("5", "pull/1/head")]
    refs = RemoteRefs.listed("".join(f"{digit * 40}\trefs/{name}\n" for digit, name in lines))
    assert refs.branches == {"main": "1" * 40}
    assert refs.tags == {"v1": "3" * 40, "light": "4" * 40}
    assert refs.tips() == {digit * 40 for digit in "134"}
