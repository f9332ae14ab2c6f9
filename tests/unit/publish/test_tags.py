"""Tags: what is in them, and that a registry takes them."""

import pytest
from helpers.locks import make_lock
from helpers.publications import make_publication

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.stack import Phase
from envbuild.core.digests import short
from envbuild.core.errors import ConfigurationError, PublicationRefusedError
from envbuild.lock.models import LockedComponent
from envbuild.publish.tags import refuse_reserved, tags_of, wrong_tag


def _stack(name, tmp_path):
    return Catalog.open(tmp_path).stack(name)


def _nemo(lock, **changes):
    """The lock as one of stack nemo, whose anchor is at a commit."""
    fields = {"asked": "main", "version": "3.1.0", "phase": Phase.MAIN, "commit": "1" * 40, "follows": True}
    base = lock.base.model_copy(update={"name": "ubuntu2404-cu130"})
    component = LockedComponent(**(fields | changes))
    return lock.model_copy(update={"stack": "nemo", "base": base, "components": {"nemo-toolkit": component}})


def test_a_branch_that_the_lock_follows_is_named(tmp_path):
    lock = _nemo(make_lock(tmp_path / "lock"))
    tags = tags_of(lock, "nemo", _stack("nemo", tmp_path), "h200")
    assert tags.moving == "nemo-main-h200"
    assert tags.immutable == f"nemo-main-{lock.digest[7:19]}-h200"


def test_a_commit_is_followed_by_nothing(tmp_path):
    lock = _nemo(make_lock(tmp_path / "lock"), asked="1" * 40, follows=False)
    assert tags_of(lock, "nemo", _stack("nemo", tmp_path), "h200").moving == "nemo-h200"


def test_characters_that_no_tag_has_are_replaced(tmp_path):
    lock = _nemo(make_lock(tmp_path / "lock"), asked="feature/moe+a")
    assert tags_of(lock, "nemo", _stack("nemo", tmp_path), "h200").moving == "nemo-feature-moe-a-h200"


def test_another_base_than_the_targets_default_is_named(tmp_path):
    lock = make_lock(tmp_path / "lock")
    stack = _stack("mcore", tmp_path)
    assert tags_of(lock, "mcore", stack, "cpu").moving == "mcore-debian12-cpu"  # its default is the machine's own
    on_cuda = lock.model_copy(update={"base": lock.base.model_copy(update={"name": "debian12-cu130"})})
    assert tags_of(on_cuda, "mcore", stack, "h200").moving == "mcore-h200"
    on_ubuntu = lock.model_copy(update={"base": lock.base.model_copy(update={"name": "ubuntu2404-cu130"})})
    assert tags_of(on_ubuntu, "mcore", stack, "h200").moving == "mcore-ubuntu2404-cu130-h200"


def test_a_lock_with_its_own_name_and_without_certificate(tmp_path):
    lock = make_lock(tmp_path / "lock")
    tags = tags_of(lock, "tuned", _stack("mcore", tmp_path), "cpu", certified=False)
    assert tags.moving == "uncertified-tuned-debian12-cpu"
    assert tags.immutable.startswith("uncertified-tuned-debian12-")


def test_a_tag_that_no_registry_takes_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no registry takes the tag") as caught:
        tags_of(make_lock(tmp_path / "lock"), "a" * 110, _stack("mcore", tmp_path), "cpu")
    assert "128" in caught.value.why


@pytest.mark.parametrize(
    "tag",
    [
        "mcore-0123456789ab-h200", "mcore-0123456789ab-h200-r2", "uncertified-mcore-0123456789ab-cpu", "x-docker",
        "x-publication", "x-revoked", "envbuild-index", "sha256-" + "a" * 64, "base-debian12-0123456789ab",
        # No registry takes these, or docker's next to it.
        "", "bad tag", "stable\n", "x;touch", ".x", "-x", "a" * 122,
    ],
)  # fmt: skip
def test_a_moving_tag_names_nothing_else(tag):
    with pytest.raises(PublicationRefusedError, match="cannot be a moving tag") as caught:
        refuse_reserved(tag)
    assert caught.value.fix


@pytest.mark.parametrize(
    "tag", ["stable", "mcore-main-h200", "base-h200", "docker-h200", "mcore-r2", "envbuild-index2", "a" * 121]
)
def test_a_moving_tag_of_an_own_name(tag):
    refuse_reserved(tag)


@pytest.mark.parametrize(
    ("changes", "derived", "wrong"),
    [
        ({}, True, ""),
        ({"tag": "mcore-{lock}-cpu", "moving_tag": "mcore-cpu"}, True, ""),
        ({"tag": "mcore-debian12-{lock}-cpu-r12"}, True, ""),
        ({"moving_tag": "stable"}, False, ""),
        ({"moving_tag": "stable"}, True, "moving_tag"),
        ({"tag": "mcore-main-debian12-{lock}-cpu", "moving_tag": "mcore-main-debian12-cpu"}, False, ""),
        ({"tag": "mcore-main-debian12-{lock}-cpu", "moving_tag": "mcore-main-debian12-cpu"}, True, "tag"),
        ({"tag": "mcore-debian12-{lock}-cpu-r0"}, False, "tag"),
        ({"tag": "mcorex-debian12-{lock}-cpu"}, False, "tag"),
        ({"tag": "mcore-debian12-{lock}-cpux"}, False, "tag"),
        ({"lock_name": "own", "tag": "own-{lock}-cpu", "moving_tag": "own-cpu"}, False, ""),
        ({"lock_name": "own", "tag": "own-{lock}-cpu", "moving_tag": "own-cpu"}, True, "tag"),
    ],
)
def test_tags_that_follow_from_the_certificate(changes, derived, wrong):
    first = make_publication()
    named = {"tag": "mcore-debian12-{lock}-cpu", **changes}
    publication = make_publication(**{name: text.format(lock=short(first.lock_digest)) for name, text in named.items()})
    assert wrong_tag(publication, derived=derived) == (getattr(publication, wrong) if wrong else "")
