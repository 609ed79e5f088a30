"""Names of runs: they sort by time, and runs that start together have different ones."""

from __future__ import annotations

import re

from hpcstage.wrapper.runpart import unique_id


def test_an_id_holds_enough_chance_for_a_hundred_runs_that_start_in_one_second_on_one_node() -> None:
    """With the same id, the second would join the first one's daemon."""
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{8}", unique_id(0.0, None))
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{8}-123\[4\]\.pbs1", unique_id(0.0, "123[4].pbs1"))
