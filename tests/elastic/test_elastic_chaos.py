"""Random faults of a whole `hpcstage run --elastic`, with jobs that join it and cuts of its network: it goes on after
each, and ends as without faults."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from conftest import MARK, SESSION

from benchmarks.stretching.chaos import MOST_OFF, Chaos
from benchmarks.stretching.networks import has_networks

pytestmark = [pytest.mark.torch, pytest.mark.slow]
FAULTS = 6


@pytest.mark.parametrize("seed", [11])
def test_a_training_outlives_random_faults(tmp_path: Path, local_dir: Path, seed: int) -> None:
    made = Chaos(tmp_path, local_dir, seed, {MARK: SESSION}, apart=has_networks())
    try:
        made.begin()
        if made.networks:
            made.cut_once()
        made.run(FAULTS)
        assert not any(made.end().values()), made.said()
        proven = made.proven()
        assert not made.left()
    finally:
        made.close()
    print(made.done, made.waits_s, proven)
    assert proven["wrong_epochs"] == 0, "each sample counts once"
    assert proven["ranks_differ"] == 0
    assert proven["weights_off"] < MOST_OFF, "the weights are those of a training without faults"
