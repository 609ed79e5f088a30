"""Chooses which stripes of a large file are brought next, and by whom: `plan.rule` for one file.

Owns no thread and no lock: `largecopy` calls it under its own.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcstage.protocol.arriving import Priority
from hpcstage.store.arrivals import Arrival
from hpcstage.store.peerstripes import PeerStripes

RANGE_BYTES = 16 << 20


class StripeChoice:
    """Takes out stripes that nobody brings yet. Stripes of other nodes are asked for, not read at the source."""

    def __init__(self, arrival: Arrival, others: PeerStripes | None) -> None:
        self.aside: int | None = None
        """The stripe that stands aside: to others it is ABSENT, as nobody waits for it."""
        self.beside_bytes = 0
        """What was copied while programs of this node read."""
        self._arrival = arrival
        self._others = others

    @property
    def is_beside(self) -> bool:
        """Whether programs of this node read large files at the source."""
        return self._arrival.priority is not Priority.FULL

    @property
    def is_done(self) -> bool:
        """Whether somebody brings, or has brought, all that is to come."""
        return self._arrival.first_absent() is None

    # ---- what is read at the source

    def take(self) -> range | None:
        """Takes out what a thread reads next."""
        stripes = self.next()
        if stripes is not None:
            self._arrival.coming(stripes)
        return stripes

    def next(self) -> range | None:
        """Returns what a thread reads next: a stripe that another node or a reader in order needs, else many in a row
        while no programs read."""
        first = self._wished()
        if first is None and not self.is_beside:
            return self._row()
        if first is None:
            first = self._next_followed(self._is_meant)
        return None if first is None else range(first, first + 1)

    def _wished(self) -> int | None:
        wished = self._arrival.wished()
        if wished is None:
            return None
        found = self._arrival.next_absent(wished, self._is_meant)
        return found if found == wished or not self.is_beside else None

    def _row(self) -> range | None:
        arrival = self._arrival
        first = arrival.next_absent(0, self._is_meant)
        if first is None:
            return None
        stop, most = first + 1, max(1, RANGE_BYTES // arrival.stripe_bytes)
        while stop < first + most and arrival.is_absent(stop) and self._is_meant(stop):
            stop += 1
        return range(first, stop)

    def _is_meant(self, stripe: int) -> bool:
        return stripe != self.aside and self._is_own(stripe)

    def _is_own(self, stripe: int) -> bool:
        return self._others is None or self._others.is_own(stripe)

    def goes_on(self) -> bool:
        """Returns whether a thread goes on with many stripes in a row: neither programs nor other nodes need others."""
        return not self.is_beside and self._arrival.wished() is None

    # ---- what follows readers

    def follows(self, stripe: int) -> bool:
        """Returns whether a reader in order needs a stripe next."""
        return any(stripe in window for window in self._windows())

    def _windows(self) -> list[range]:
        """Returns the stripes that follow readers in order; one in which a reader is already is not among them."""
        length = self._arrival.stripe_bytes
        windows = self._arrival.reads().windows()
        return [range(-(-window.start // length), -(-window.stop // length)) for window in windows]

    def _next_followed(self, is_meant: Callable[[int], bool]) -> int | None:
        """Returns what is nearest to one of the readers."""
        found = ((window, self._arrival.next_absent(window.start, is_meant)) for window in self._windows())
        ahead = [(stripe - window.start, stripe) for window, stripe in found if stripe is not None and stripe in window]
        return min(ahead)[1] if ahead else None

    # ---- what stands aside

    @property
    def may_stand_aside(self) -> bool:
        """Whether more may be brought than follows readers."""
        is_meant = self._arrival.priority is Priority.ASIDE
        return is_meant and self.beside_bytes < self._arrival.reads().credit_bytes

    def take_aside(self) -> int | None:
        """Takes out the stripe that stands aside."""
        if self.may_stand_aside:
            self.aside = self._arrival.next_absent(0, self._is_own)
        return self.aside

    # ---- what is asked of other nodes

    def take_elsewhere(self) -> int | None:
        """Takes out a stripe of another node: while programs read one that follows them, or any that may stand
        aside."""
        stripe = self._next_followed(self._is_theirs) if self.is_beside else None
        if stripe is None and (not self.is_beside or self.may_stand_aside):
            stripe = self._arrival.next_absent(0, self._is_theirs)
        if stripe is not None:
            self._arrival.coming(range(stripe, stripe + 1))
        return stripe

    def needs_others(self) -> bool:
        """Returns whether there are stripes of other nodes."""
        return self._arrival.next_absent(0, self._is_theirs) is not None

    def _is_theirs(self, stripe: int) -> bool:
        return not self._is_own(stripe)
