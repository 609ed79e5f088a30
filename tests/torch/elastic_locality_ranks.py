"""Ranks of an elastic training that read what their nodes hold, through a change of the membership.

python elastic_locality_ranks.py DIRECTORY RANK WORLD    # writes what this rank was given in both memberships
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import locality_ranks
import torch.distributed as dist

from hpcstage.torch import ElasticSampler

STEPS = 3


def take(sampler: ElasticSampler, steps: int) -> list[dict[str, Any]]:
    """The shares of the next steps; what iterating gives is the same."""
    position, given, batches = sampler.position, [], iter(sampler)
    while len(given) < steps and (size := sampler.step_size(position)):
        share = sampler.share(position)
        assert [*share.ids] == next(batches)
        given.append({"ids": share.ids[: share.counted], "whole": share.whole})
        position += size
    return given


def main(directory: Path, rank: int, world: int) -> None:
    facts = json.loads((directory / "facts.json").read_text())
    os.environ[locality_ranks.NODE_DIR] = facts["node_dirs"][rank]
    paths = [f"{locality_ranks.ROOT}/{name}" for name in facts["names"]]
    sampler = ElasticSampler(paths, 4, seed=3, locality=True, paths=paths)
    locality_ranks.join(directory, rank, world)
    sampler.begin(epoch=0, position=0, rank=rank, world=world)
    given = [take(sampler, STEPS)]
    dist.barrier()
    dist.destroy_process_group()
    if rank:  # the first rank is lost
        (directory / "second").mkdir(exist_ok=True)
        locality_ranks.join(directory / "second", rank - 1, world - 1)
        sampler.begin(epoch=0, position=STEPS * 4 * world, rank=rank - 1, world=world - 1)
        given.append(take(sampler, len(facts["names"])))
        dist.barrier()
        dist.destroy_process_group()
    (directory / f"given.{rank}.json").write_text(json.dumps(given))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
