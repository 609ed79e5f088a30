"""The coder of checkpoints against ISA-L called bare from a C program; redset's way beside them.

One stripe of 8 data blocks and 2 parities is encoded over and over in memory that stays in place, as a pipeline uses
its buffers. `ISA-L, C` is a C program that does nothing else; `hpcstage` gives the blocks to its kernel each time.
`redset, C` passes once through a table of products for each coefficient. All arms of a cell use the same library and
must leave the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Arm, Bench, Figure, Options, at_least, holds, options_of, parser
from benchmarks.programs import run
from hpcstage.checkpoint.coding.erasurecode import ErasureCode
from hpcstage.checkpoint.coding.kernels import Kernel, kernels
from hpcstage.emulator.build import cached_binary, compile_c

Bytes = npt.NDArray[np.uint8]
SOURCE = Path(__file__).with_name("coder.c")
K, M = 8, 2
SIZES = {"256 KB": 256 << 10, "1 MB": 1 << 20}
"""The first is what exchanges give to a kernel at a time."""
SAMPLE_S, QUICK_SAMPLE_S = 0.2, 0.05
PASSES_PER_BATCH = 4
ROUNDS = 15
PLACES = 5
LEAST_OF_C = 0.8
HUGE_PAGE_BYTES = 2 << 20
C, OURS, REDSET = "ISA-L, C", "hpcstage", "redset, C"


@dataclass(frozen=True)
class Cell:
    """One size of blocks."""

    size: str

    @property
    def name(self) -> str:
        """In results and for --only."""
        return f"{self.size}, encode"

    @property
    def block_bytes(self) -> int:
        """The bytes of a block."""
        return SIZES[self.size]


def aligned(size: int) -> Bytes:
    """Memory as the C program has it: from the beginning of a huge page on, whatever numpy asks for."""
    mapped = mmap.mmap(-1, size + 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapped, np.uint8)
    return whole[-whole.ctypes.data % HUGE_PAGE_BYTES :][:size]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a stripe, in memory of their own."""

    data: list[Bytes]
    parities: list[Bytes]

    @classmethod
    def of(cls, size: int) -> Blocks:
        """The same bytes as in the C program."""
        memory = aligned(size * (K + M)).reshape(K + M, size)
        places = np.arange(size)
        for number in range(K):
            memory[number] = (places + places // 256 + 31 * number).astype(np.uint8)
        return cls(list(memory[:K]), list(memory[K:]))


class Stripe:
    """One cell: the blocks, and what encodes them.

    The same calls take a fifth longer where the pages of a process happen to share the processor's cache. So samples
    take turns at blocks in several places, as each sample in C has a process of its own.
    """

    def __init__(self, cell: Cell, options: Options, work_dir: Path) -> None:
        self.cell, self.work_dir = cell, work_dir
        self.sample_s = QUICK_SAMPLE_S if options.quick else SAMPLE_S
        self.code = ErasureCode.cauchy(K, M)
        self.places = [Blocks.of(cell.block_bytes) for _ in range(PLACES)]

    def arms(self, isal: Kernel | None) -> dict[str, Arm]:
        """What is compared; without ISA-L only the others."""
        made: dict[str, Arm] = {}
        if isal:
            made[C] = functools.partial(self._in_c, "encode", isal.path)
            made[OURS] = functools.partial(self._ours, isal, cycle(self.places))
        made[REDSET] = functools.partial(self._in_c, "table", "")
        return made

    def _ours(self, kernel: Kernel, places: Iterator[Blocks]) -> dict[str, Any]:
        blocks = next(places)
        for parity in blocks.parities:
            parity.fill(0)
        work = functools.partial(kernel.product, self.code.rows, blocks.data, blocks.parities)
        work()
        seconds = pass_s(work, self.sample_s)
        return self._rated(seconds, b"".join(parity.tobytes() for parity in blocks.parities))

    def _in_c(self, method: str, library: str) -> dict[str, Any]:
        out = self.work_dir / "parities"
        words = [str(binary()), method, library, str(self.cell.block_bytes), str(self.sample_s), str(out), str(M)]
        done = run([*words, *(str(c) for row in self.code.rows for c in row)], self.work_dir)
        return self._rated(json.loads(done.stdout)["seconds"], out.read_bytes())

    def _rated(self, seconds: float, parities: bytes) -> dict[str, Any]:
        rate = K * self.cell.block_bytes / seconds / 1e9
        return {"seconds": seconds, "gb_per_s": rate, "digest": hashlib.sha256(parities).hexdigest()[:16]}


def pass_s(work: Callable[[], None], limit_s: float) -> float:
    """The seconds of one pass: the median of batches of a few passes, as in the C program."""
    batches = []
    started_s = before_s = time.perf_counter()
    while before_s - started_s < limit_s:
        for _ in range(PASSES_PER_BATCH):
            work()
        now_s = time.perf_counter()
        batches.append(now_s - before_s)
        before_s = now_s
    return statistics.median(batches) / PASSES_PER_BATCH


@functools.cache
def binary() -> Path:
    """The C program, compiled once."""
    made = cached_binary(SOURCE)
    if not made.exists():
        compile_c(SOURCE, made, ["-ldl"])
    return made


def loaded_isal() -> Kernel | None:
    """What is measured: the system's ISA-L, else that of the wheel."""
    return next(kernels(), None)


def share_of_c(bench: Bench, cell: Cell) -> float | None:
    """Our rate over that of the C program: the median of the rounds, in which one follows the other."""
    pairs = zip(bench.select(cell.name, C), bench.select(cell.name, OURS), strict=False)
    ratios = [theirs["seconds"] / ours["seconds"] for theirs, ours in pairs]
    return statistics.median(ratios) if ratios else None


def figures(bench: Bench, cells: list[Cell]) -> list[Figure]:
    """See the module."""
    made = [
        at_least(f"{cell.size}: hpcstage on ISA-L, of ISA-L called from C", share_of_c(bench, cell), LEAST_OF_C)
        for cell in cells
    ]
    digests = [{s["digest"] for s in bench.samples if s["cell"] == cell.name} for cell in cells]
    return [*made, holds("the same bytes in all arms", all(len(d) == 1 for d in digests) if digests else None)]


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    isal = loaded_isal()
    bench = Bench("coder", options, {"library": isal.name if isal else None})
    cells = [cell for cell in map(Cell, SIZES) if options.wants(cell.name)]
    with tempfile.TemporaryDirectory(dir=options.work_dir, prefix="hpcstage-coder-") as scratch:
        for cell in cells:
            stripe = Stripe(cell, options, Path(scratch))
            bench.measure(cell.name, stripe.arms(isal), options.rounds(ROUNDS, ROUNDS))
    return bench.finish(figures(bench, cells))


if __name__ == "__main__":
    sys.exit(main())
