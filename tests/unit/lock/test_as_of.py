"""As-of: the moments that dates, releases and margins mean."""

from datetime import date, datetime, timedelta, timezone

import pytest

from envbuild.core.errors import UsageError
from envbuild.lock.inputs import as_of

RELEASED = datetime(2025, 1, 2, 3, 4, 5, 678900, tzinfo=timezone(timedelta(hours=-8)))


def test_a_day_ends_when_the_next_begins_in_utc():
    day = as_of.on_day(date(2025, 12, 31))
    assert (day.asked, day.text()) == ("2025-12-31", "2026-01-01T00:00:00Z")
    assert day.reason == "the end of 2025-12-31, UTC"


@pytest.mark.parametrize("text", ["2025-2-1", "main", "now", "2025-02-01T00:00:00Z", "20250201", "x2025-02-01"])
def test_other_forms_are_no_date(text):
    assert as_of.parse_date(text) is None


@pytest.mark.parametrize("text", ["2025-02-30", "2025-13-01", "0000-01-01"])
def test_a_day_that_does_not_exist_is_refused(text):
    with pytest.raises(UsageError, match=text):
        as_of.parse_date(text)


def test_a_date_is_read():
    assert as_of.parse_date("2024-02-29") == date(2024, 2, 29)


def test_timestamp_is_in_utc():
    assert as_of.timestamp(RELEASED) == "2025-01-02T11:04:05Z"


def test_now_has_whole_seconds():
    before = datetime.now(timezone.utc) - timedelta(seconds=1)
    now = as_of.now()
    assert before <= now.moment <= datetime.now(timezone.utc)
    assert (now.asked, now.moment.microsecond) == ("now", 0)


def test_release_is_the_anchors_moment_and_the_margin():
    found = as_of.after_release("nemo v1", RELEASED, 14)
    assert (found.asked, found.text()) == ("release", "2025-01-16T11:04:05Z")
    assert found.reason == "nemo v1 is of 2025-01-02T11:04:05Z, and 14 days of margin"
    assert as_of.after_release("nemo v1", RELEASED, 0).text() == "2025-01-02T11:04:05Z"


def test_a_margin_that_is_not_over_ends_now():
    now = datetime.now(timezone.utc)
    found = as_of.after_release("nemo v1", now - timedelta(days=3), 14)
    assert found.moment <= datetime.now(timezone.utc)
    assert now - found.moment < timedelta(seconds=2)
    assert "14 days of margin are not over yet" in found.reason
