"""The difference between the clocks of two nodes, from messages that go there and back."""

from collections import deque

# Of so many round trips the shortest counts: what makes one longer than another is waiting, on one of its two ways.
WINDOW = 16


class ClockOffset:
    """What to add to another node's monotonic clock, in seconds, to have this one's.

    As in NTP (RFC 5905, section 8), with both ways taken for equally long: the error is at most half of `round_trip`.
    """

    def __init__(self) -> None:
        self._measured: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def measured(self, sent: float, theirs: float, received: float) -> None:
        """Note a round trip: when it was sent and received here, and the other clock in between."""
        self._measured.append((received - sent, (sent + received) / 2 - theirs))

    @property
    def known(self) -> bool:
        """True once something was measured."""
        return bool(self._measured)

    @property
    def seconds(self) -> float:
        """The offset, of the shortest round trip."""
        return min(self._measured)[1]

    @property
    def round_trip(self) -> float:
        """The shortest round trip in seconds."""
        return min(self._measured)[0]
