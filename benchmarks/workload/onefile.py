"""Ranks that all read one large file, one rank on each node, in one of several ways.

    python started.py 4 onefile.py --way "in order" --compute 4 FILE

Each rank prints its number and what it found: a checksum of all that it read, for `tokens` a digest of all losses and
weights, bit by bit. Computing is sleeping. Except where it maps the file, a rank drops what it has read from the page
cache, and ranks begin one after the other: on one machine they would share the cache, which ranks on several nodes do
not.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import random
import sys
import time
import zlib
from collections.abc import Iterator

IN_ORDER, AT_RANDOM, MAPPED, LATER, TOKENS = "in order", "at random", "mapped", "one node later", "tokens"
WAYS = (IN_ORDER, AT_RANDOM, MAPPED, LATER, TOKENS)
PIECE_BYTES = 1 << 20
APART_S = 0.3
"""A rank begins so long after the one before it."""
STEPS, BATCH, BLOCK = 120, 12, 1024
"""Of `tokens`: steps, samples of a step and tokens of a sample."""
VOCABULARY, WIDTH = 512, 16


def read(given: argparse.Namespace, rank: int) -> int:
    """Reads all of the file once, and computes between the pieces."""
    is_last = rank == int(os.environ["WORLD_SIZE"]) - 1
    time.sleep(given.later if given.way == LATER and is_last else rank * APART_S)
    size, found = os.path.getsize(given.file), 0
    places = list(range(0, size, PIECE_BYTES))
    if given.way in (AT_RANDOM, MAPPED):
        random.Random(rank).shuffle(places)
    for at, piece in mapped(given.file, places) if given.way == MAPPED else pieces(given.file, places):
        found ^= zlib.crc32(piece, at)
        time.sleep(given.compute / len(places))
    return found


def pieces(path: str, places: list[int]) -> Iterator[tuple[int, bytes]]:
    """What calls read of a file that is kept open."""
    fd = os.open(path, os.O_RDONLY)
    for at in places:
        yield at, os.pread(fd, PIECE_BYTES, at)
        os.posix_fadvise(fd, at, PIECE_BYTES, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def mapped(path: str, places: list[int]) -> Iterator[tuple[int, bytes]]:
    """What page faults bring of a file that is mapped."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as found:
        for at in places:
            yield at, found[at : at + PIECE_BYTES]


def train(given: argparse.Namespace, rank: int) -> str:
    """Trains as nanoGPT does: each batch maps the file anew, and takes blocks at random places of it."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw, digest = torch.Generator().manual_seed(rank), hashlib.sha256()
    for _ in range(STEPS):
        data = np.memmap(given.file, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - BLOCK, (BATCH,), generator=draw).tolist()
        rows = np.stack([data[start : start + BLOCK + 1].astype(np.int64) % VOCABULARY for start in starts])
        tokens = torch.from_numpy(rows)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        digest.update(loss.detach().numpy().tobytes())
        time.sleep(given.compute / STEPS)
    for value in model.module.state_dict().values():
        digest.update(value.numpy().tobytes())
    dist.barrier()
    dist.destroy_process_group()
    return digest.hexdigest()


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--compute", type=float, default=0.0, metavar="SECONDS", help="of each rank")
    parser.add_argument("--later", type=float, default=0.0, metavar="SECONDS", help="until the last rank begins")
    given = parser.parse_args()
    rank = int(os.environ["RANK"])
    found = train(given, rank) if given.way == TOKENS else read(given, rank)
    os.write(sys.stdout.fileno(), f"rank {rank}: {found}\n".encode())  # in one step: the ranks share it


if __name__ == "__main__":
    main()
