"""`ElasticSampler(locality=True)`: ranks read what their node holds, and the division follows the membership."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from elastic_locality_ranks import STEPS, take
from locality_ranks import make_node, run_ranks

from hpcstage.torch import ElasticSampler

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PROGRAM = Path(__file__).with_name("elastic_locality_ranks.py")
SAMPLES, WORLD = 203, 4
NAMES = [f"f{number:03d}" for number in range(SAMPLES)]


def train(directory: Path) -> list[list[list[dict[str, Any]]]]:
    """What each rank was given in both memberships: ranks 0 and 1 are on a node that has the even samples, 2 and 3 on
    one that has the odd ones."""
    nodes = [make_node(directory / f"node{node}", NAMES, NAMES[node::2], []) for node in range(2)]
    dirs = [str(nodes[rank // 2]) for rank in range(WORLD)]
    facts = {"names": NAMES, "node_dirs": dirs}
    (directory / "facts.json").write_text(json.dumps(facts))
    run_ranks(PROGRAM, directory, WORLD)
    return [json.loads((directory / f"given.{rank}.json").read_text()) for rank in range(WORLD)]


def divided() -> list[list[list[dict[str, Any]]]]:
    """The same without locality, for which ranks need not meet."""
    found = []
    for rank in range(WORLD):
        sampler, given = ElasticSampler(NAMES, 4, seed=3), []
        sampler.begin(epoch=0, position=0, rank=rank, world=WORLD)
        given.append(take(sampler, STEPS))
        if rank:
            sampler.begin(epoch=0, position=STEPS * 4 * WORLD, rank=rank - 1, world=WORLD - 1)
            given.append(take(sampler, SAMPLES))
        found.append(given)
    return json.loads(json.dumps(found))  # lists, as the ranks write them


def local_share(given: list[list[list[dict[str, Any]]]], membership: int) -> float:
    ids = [(rank, id_) for rank, both in enumerate(given) for step in both[membership:][:1] for one in step
           for id_ in one["ids"]]  # fmt: skip
    return sum(id_ % 2 == rank // 2 for rank, id_ in ids) / len(ids)


def test_ranks_read_what_their_node_holds_before_and_after_a_change(tmp_path: Path) -> None:
    ours, evenly = train(tmp_path), divided()
    counted = Counter(id_ for both in ours for steps in both for one in steps for id_ in one["ids"])
    assert counted == Counter(range(SAMPLES)), "each sample counts once"
    for mine, theirs in zip(ours, evenly, strict=True):
        for steps, others in zip(mine, theirs, strict=True):
            assert [one["whole"] for one in steps] == [one["whole"] for one in others], (
                "the global batches are the same"
            )
            assert [len(one["ids"]) for one in steps] == [len(one["ids"]) for one in others]
    assert local_share(ours, 0) > 0.8
    # Of three ranks one is on the first node: a third of each step, though it has a half of the samples.
    assert local_share(ours, 1) > 0.7
    assert local_share(evenly, 0) < 0.65
    assert local_share(evenly, 1) < 0.65
