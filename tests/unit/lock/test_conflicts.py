"""Which version is near to one that does not resolve."""

import pytest

from envbuild.lock.resolve.conflicts import closest


@pytest.mark.parametrize(
    ("wanted", "versions", "expected"),
    [
        ("0.19.1", ["0.13.1", "0.19.2"], "0.19.2"),
        ("2.3.2.post1", ["2.3.1", "2.2.4"], "2.3.1"),
        ("2.0", ["1.9", "3.0"], "1.9"),
        ("2.0", [], None),
    ],
)
def test_closest_shares_the_most_leading_numbers(wanted, versions, expected):
    assert closest(wanted, versions) == expected
