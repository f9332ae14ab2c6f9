"""A base is known by the digest of its image; a lock names the one it was verified on."""

from datetime import datetime, timezone

import pytest
from helpers.errors import error_of
from helpers.image_inputs import SELECTION, base_record, changed, inputs_of, put_base, small_lock
from helpers.sites import context_of, site_of

from envbuild.catalog.site import load_site
from envbuild.core.errors import CheckRefusedError, ConfigurationError
from envbuild.image.base import apt, locked, mmdebstrap
from envbuild.image.base.base import base_image, base_tag
from envbuild.image.build import BaseChoice, hold_base
from envbuild.oci.models import BaseConfig

PLATFORM = SELECTION.base.platform
OTHER = "sha256:" + "7" * 64
MIRROR = "http://mirror.example/{snapshot}/debian"


@pytest.fixture(autouse=True)
def _tools(monkeypatch):
    monkeypatch.setattr(mmdebstrap, "mmdebstrap_version", lambda: "mmdebstrap 1.3.5")


@pytest.fixture
def lock(tmp_path):
    return small_lock(tmp_path / "lock")


def test_the_digest_is_of_what_an_image_on_it_has_and_of_no_day():
    record = base_record()
    digest = base_image(record, PLATFORM).digest
    assert base_image(record.model_copy(update={"made_at": "2026-01-01T00:00:00Z"}), PLATFORM).digest == digest
    others = [record.model_copy(update={"made_by": "mmdebstrap 2"}), base_record(BaseConfig(workdir="/w"))]
    layer = record.layers[0].model_copy(update={"digest": OTHER})
    others.append(record.model_copy(update={"layers": (layer,)}))
    assert len({digest, *(base_image(other, PLATFORM).digest for other in others)}) == 4
    assert base_tag("debian12", OTHER) == "base-debian12-777777777777"


def test_the_base_in_the_store_is_taken_where_it_is_the_locks_own(tmp_path, lock):
    context = context_of(tmp_path)
    put_base(context, base_record())
    own = changed(lock, base_image=base_image(base_record(), PLATFORM).digest)
    with hold_base(inputs_of(own), context, BaseChoice.LOCKED) as base:
        assert locked.is_locked(base, own.lock, PLATFORM)
    with hold_base(inputs_of(lock), context) as base:
        assert not locked.is_locked(base, lock.lock, PLATFORM)


@pytest.mark.parametrize(
    ("digest", "what"),
    [
        ("", "the lock names no image of base debian12"),
        (OTHER, "base debian12 as it was when the lock was verified cannot be had"),
    ],
)
def test_another_base_is_refused_where_only_the_locks_own_will_do(tmp_path, lock, digest, what):
    context = context_of(tmp_path)
    put_base(context, base_record())
    other = inputs_of(changed(lock, base_image=digest))
    error = error_of(CheckRefusedError, hold_base(other, context, BaseChoice.LOCKED).__enter__)
    assert error.what == what
    # Else that of the definition is taken.
    with hold_base(other, context) as base:
        assert base.record == base_record()


def test_an_older_base_that_was_taken_stays_beside_the_newest(tmp_path, lock):
    context = context_of(tmp_path)
    older = base_record(BaseConfig(workdir="/older"))
    own = changed(lock, base_image=base_image(older, PLATFORM).digest)
    put_base(context, base_record())
    put_base(context, older, locked._key(SELECTION, own.lock))
    with hold_base(inputs_of(own), context) as base:
        assert base.record == older


def test_places_are_asked_only_where_there_are_some(lock):
    own = changed(lock, base_image=OTHER).lock
    made = changed(lock, base_image=OTHER, base_made_at="2026-01-31T12:00:00Z").lock
    assert not locked.can_be_taken(SELECTION, own, site_of())
    assert locked.can_be_taken(SELECTION, own, site_of(base_repositories=("h/r",)))
    assert not locked.can_be_taken(SELECTION, lock.lock, site_of(base_repositories=("h/r",)))
    assert not locked.can_be_taken(SELECTION, own, site_of(apt_mirror=MIRROR))
    assert locked.can_be_taken(SELECTION, made, site_of(apt_mirror=MIRROR))


def test_a_mirror_of_snapshots_is_asked_for_its_moment():
    moment = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
    assert apt.at_moment(SELECTION.base, None, moment) is None
    assert apt.at_moment(SELECTION.base, "http://m/debian", moment) == "http://m/debian"
    place = "http://mirror.example/20260131T120000Z/debian"
    assert apt.at_moment(SELECTION.base, MIRROR, moment) == (
        f"deb [check-valid-until=no] {place} bookworm main\ndeb [check-valid-until=no] {place} bookworm-updates main"
    )
    signed = apt.at_moment(SELECTION.base, f"deb [signed-by=/k] {MIRROR} bookworm main", moment)
    assert signed == f"deb [check-valid-until=no signed-by=/k] {place} bookworm main"


def test_repositories_of_bases_are_addresses(tmp_path):
    named = {"HOME": str(tmp_path), "ENVBUILD_BASE_REPOSITORIES": "registry.example/bases oci://127.0.0.1:5000/b"}
    assert load_site(named).base_repositories == ("registry.example/bases", "127.0.0.1:5000/b")
    wrong = {**named, "ENVBUILD_BASE_REPOSITORIES": "Registry"}
    error = error_of(ConfigurationError, load_site, wrong)
    assert "ENVBUILD_BASE_REPOSITORIES" in error.fix
