"""As-of: the moments that dates, releases and margins mean."""

from datetime import date, datetime, timedelta, timezone

import pytest

from envbuild.core.errors import UsageError
from envbuild.lock.inputs import as_of

RELEASED = datetime(2025, 1, 2, 3, 4, 5, 678900, tzinfo=timezone(timedelta(hours=-8)))


def test_a_day_ends_when_the_next_begins_in_utc():
    day = as_of.on_day(date(2025, 12, 31), at(datetime(2026, 1, 1, tzinfo=timezone.utc)))
    assert (day.asked, day.text()) == ("2025-12-31", "2026-01-01T00:00:00Z")
    assert day.reason == "the end of 2025-12-31, UTC"


@pytest.mark.parametrize("text", ["2025-2-1", "main", "now", "2025-02-01T00:00:00Z", "20250201", "x2025-02-01"])
def test_parse_date(text):
    assert as_of.parse_date(text) is None
    assert as_of.parse_date("2024-02-29") == date(2024, 2, 29)


@pytest.mark.parametrize("text", ["2025-02-30", "2025-13-01", "0000-01-01"])
def test_a_day_that_does_not_exist_is_refused(text):
    with pytest.raises(UsageError, match=text):
        as_of.parse_date(text)


def at(moment: datetime):
    """A clock that stands at a moment."""
    return lambda: moment


def test_now_has_whole_seconds():
    now = as_of.now(at(RELEASED))
    assert (now.asked, now.moment) == ("now", RELEASED.replace(microsecond=0))


@pytest.mark.parametrize(
    ("days", "now", "text", "reason"),
    [
        (14, 15, "2025-01-16T11:04:05Z", "nemo v1 is of 2025-01-02T11:04:05Z, and 14 days of margin"),
        (0, 15, "2025-01-02T11:04:05Z", "nemo v1 is of 2025-01-02T11:04:05Z, and 0 days of margin"),
        (14, 3, "2025-01-05T11:04:05Z", "nemo v1 is of 2025-01-02T11:04:05Z; its 14 days of margin are not over yet"),
    ],
)
def test_release_is_the_anchors_moment_and_as_much_of_the_margin_as_is_over(days, now, text, reason):
    clock = at(RELEASED + timedelta(days=now))
    moment = as_of.after_release("nemo v1", RELEASED, timedelta(days=days), clock)
    assert (moment.asked, moment.text(), moment.reason) == ("release", text, reason)


def test_a_day_that_is_not_over_is_refused():
    with pytest.raises(UsageError, match="2025-01-02 is not over yet"):
        as_of.on_day(date(2025, 1, 2), at(RELEASED))
