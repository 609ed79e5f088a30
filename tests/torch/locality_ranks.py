"""Ranks of torch.distributed (gloo) for tests of locality-aware sampling, and nodes with real manifests and holdings.

python locality_ranks.py DIRECTORY RANK    # runs the cases in DIRECTORY/cases.json, writes what each rank was given
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
ROOT = "/staged/data"
NODE_DIR = "HPCSTAGE_NODE_DIR"


def make_node(node_dir: Path, names: Iterable[str], kept: Iterable[str], due: Iterable[str]) -> Path:
    """A node directory whose daemon knows these names below ROOT."""
    from hpcstage.plan.dataset.manifest import Manifest
    from hpcstage.plan.types import Dataset, DatasetKind, ManifestEntry
    from hpcstage.store.heldfiles import HeldFiles

    node_dir.mkdir(parents=True)
    dataset = Dataset("data", DatasetKind.DIRECTORY, ROOT.encode(), (), ())
    manifest = Manifest.build([dataset], [ManifestEntry(0, name.encode(), 1, 0, 0o644, 0, 0, False) for name in names])
    manifest.save(node_dir / "manifest.bin")
    holdings = HeldFiles(node_dir, len(manifest))
    holdings.expect(_ids(manifest, due))
    for id_ in _ids(manifest, kept):
        holdings.keep(id_)
    return node_dir


def _ids(manifest: Any, names: Iterable[str]) -> list[int]:
    return [manifest.find(0, name.encode()) for name in names]


def run_ranks(program: Path, directory: Path, world: int, timeout_s: float = 180.0) -> None:
    """Runs a program once per rank, all at a time: `program DIRECTORY RANK WORLD`. Fails if one of them does."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HPCSTAGE")}
    env |= {"PYTHONPATH": os.fspath(REPO), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, program, directory, str(rank), str(world)], env=env, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    try:
        errors = [process.communicate(timeout=timeout_s)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0] * world, "\n".join(errors)


def join(directory: Path, rank: int, world: int) -> None:
    """This process is a rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=world)


class Files:
    """As an ImageFolder: `samples` with a path and a class each."""

    def __init__(self, names: Sequence[str]) -> None:
        self.samples = [(f"{ROOT}/{name}", 0) for name in names]

    def __len__(self) -> int:
        return len(self.samples)


def main(directory: Path, rank: int, world: int) -> None:
    """The cases, one after the other."""
    import torch.distributed as dist

    from hpcstage.torch.samplers.locality import LocalityAwareSampler

    join(directory, rank, world)
    given = []
    for case in json.loads((directory / "cases.json").read_text()):
        given.append(None)
        os.environ.pop(NODE_DIR, None)
        if case["node_dirs"][rank]:
            os.environ[NODE_DIR] = case["node_dirs"][rank]
        options = {**case["options"], **(case["other"] if rank == case["world"] - 1 else {})}
        epochs = options.pop("epochs")
        sampler = LocalityAwareSampler(Files(case["names"]), **options)
        batches = []
        for epoch in epochs:
            sampler.set_epoch(epoch)
            batches.append(list(sampler))
            assert len(batches[-1]) == len(sampler)
            if rank == 0:
                assert list(sampler) == batches[-1], "asked again, it waits for nobody"
        given[-1] = batches
    (directory / f"given.{rank}.json").write_text(json.dumps(given))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
