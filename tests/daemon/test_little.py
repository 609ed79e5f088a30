"""When so little of the opened files is read that copying them is stopped."""

from __future__ import annotations

import pytest

from hpcstage.daemon.queue.useful import LEAST_MEAN_BYTES, LEAST_OPENS, LOOKS_IN_A_ROW, Little
from hpcstage.protocol.shim import COUNTERS, Counter

SIZE = 4 * LEAST_MEAN_BYTES


def sums(opens: int = LEAST_OPENS, read_bytes: int = 1000, measured: int = 3) -> list[int]:
    found = [0] * COUNTERS
    found[Counter.HIT_OPENS], found[Counter.LOCAL_READ_BYTES] = opens, read_bytes
    found[Counter.READS_MEASURED] = measured
    return found


def look(little: Little, found: list[int], *, opened: int = LEAST_OPENS, size: int = SIZE, mapped: bool = False):
    return little.share(opened, opened * size, found, 3, lambda: mapped)


def test_it_is_said_after_a_few_looks():
    little = Little()
    assert [look(little, sums()) for _ in range(LOOKS_IN_A_ROW - 1)] == [None] * (LOOKS_IN_A_ROW - 1)
    assert look(little, sums()) == pytest.approx(1000 / (LEAST_OPENS * SIZE))


@pytest.mark.parametrize(
    ("found", "options"),
    [
        (sums(opens=10), {"opened": 10}),
        (sums(opens=200), {}),
        (sums(measured=2), {}),
        (sums(read_bytes=0), {}),
        (sums(read_bytes=LEAST_OPENS * SIZE // 9), {}),
        (sums(), {"size": LEAST_MEAN_BYTES // 2}),
        (sums(), {"mapped": True}),
    ],
    ids=["few opens", "opens not seen", "reads not measured", "nothing seen", "much", "small files", "mapped"],
)
def test_otherwise_nothing_is_said(found, options):
    little = Little()
    assert [look(little, found, **options) for _ in range(2 * LOOKS_IN_A_ROW)] == [None] * 2 * LOOKS_IN_A_ROW


def test_files_that_were_mapped_once_are_no_evidence_later():
    little = Little()
    assert look(little, sums(), mapped=True) is None
    assert [look(little, sums()) for _ in range(2 * LOOKS_IN_A_ROW)] == [None] * 2 * LOOKS_IN_A_ROW
