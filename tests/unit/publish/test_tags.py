"""Tags: what is in them, and that a registry takes them."""

import pytest
from helpers.locks import make_lock

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.stack import Phase
from envbuild.core.errors import ConfigurationError
from envbuild.lock.models import LockedComponent
from envbuild.publish.tags import tags_of


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
