"""Whether hpcstage ever costs a program time: ways of reading in which staging gains little or nothing.

Each cell is one program that reads emulated storage in one way: alone (`plain`) and behind `--mode runtime`,
alternated. The storage keeps the page cache when a file is opened again, as the clients of shared file
systems do. What the program prints is a checksum of all that it read, which must be the same in all arms.
Where it reads everything three times, it empties the page cache in between, as where there is more data than memory;
the same program on the local disk (`local`) stands beside it.

Computing is sleeping, as beside an accelerator, so that a cell leaves the processor idle most of the time. --lanes N
measures N cells at a time, each on storage, a disk and in directories of its own; the arms of a cell alternate in one
lane. Each sample says how many lanes there were. The first interrupt lets the running samples end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.files import Place, empty, make_files, place, write_back
from benchmarks.harness import Arm, Bench, Figure, Options, at_least, at_most, divide, holds, options_of, parser
from benchmarks.programs import hpcstage_command, record, run
from benchmarks.storage import Storage
from benchmarks.workload import ways
from hpcstage.emulator import Settings

PROGRAM = Path(ways.__file__)
NEVER_WORSE, MOST_IN_THE_MIDDLE = 1.05, 0.85
MOST_LATER = 1.05
"""From the second pass on, in times of the same program on the local disk."""
MOST_SOURCE = 1.02
"""Bytes that leave the source, in times of those of one pass of the program alone."""
PLAIN, RUNTIME, LOCAL = "plain", "runtime", "local"
PASSES = 3
PLAIN_S, QUICK_PLAIN_S = 24.0, 2.0
LEAST_PLAIN_S = 20.0
"""Less than what it is set to where the kernel reads ahead while the program computes."""
LATENCY_S = 0.001
LARGE_BYTES, QUICK_LARGE_BYTES = 240_000_000, 12_000_000
SEVERAL_FILES, SEVERAL_BYTES, QUICK_SEVERAL_BYTES = 10, 80_000_000, 4_000_000
SMALL_FILES, QUICK_SMALL_FILES, SMALL_BYTES = 800, 40, 250_000
DELAY_S = 3.0
AS_FAST = "as fast"
RATIOS = {"3 times slower": 3.0, AS_FAST: 1.0, "a third": 1 / 3}
"""How long the source takes for what is read, in times of computing."""
TENTHS = ("anew-tenth", "kept-tenth")
"""Ways that read a tenth of their file."""
LARGE = (
    *TENTHS,
    "anew-all",
    "pread-twice",
    "pread-random",
    "kept-all",
    "hdf5",
    "lmdb",
    "parquet",
    "sqlite",
)
FORMS = ("hdf5", "lmdb", "parquet", "sqlite")
"""Ways that read a file of a form of their own."""
TWO_READERS, SHARDS = "several", "tar"
SEVERAL = (TWO_READERS, "children", SHARDS)
"""Several large files."""
SEVERAL_TIMES = ("pread", *LARGE[2:3], *LARGE[4:], SHARDS, "loop", "loader-2")
"""Ways that also read everything several times."""
SMALL = ("loop", "loop-random", "link", "loader-0", "loader-2", "nothing")
OVERLAPPING = {"loader-2": 2.0, "nothing": 2.0, TWO_READERS: 2.0, "children": 1.25}
"""Ways that read while they compute, or do not read: reading and computing take so many times as long one after the
other as the program takes, about, where both take the same time."""
UNREAD = ("nothing", "sqlite")
"""Ways beside which there are files that nobody reads, and which are copied where that costs the program nothing."""
NEEDED = {"hdf5": "h5py", "lmdb": "lmdb", "parquet": "pyarrow", "loader-0": "torch", "loader-2": "torch"}
"""Libraries without which a way is left out."""


@dataclass(frozen=True)
class Cell:
    """One program on one storage."""

    way: str
    ratio: str
    delay_s: float = 0.0
    passes: int = 1

    @property
    def is_large(self) -> bool:
        """One large file, not many small ones."""
        return self.way in LARGE or self.way == "pread"

    @property
    def name(self) -> str:
        """In results and for --only."""
        opened = f", opened after {self.delay_s:g} s" if self.delay_s else ""
        read = f", {self.passes} passes" if self.passes > 1 else ""
        return f"{self.way}, source {self.ratio}{opened}{read}"

    @property
    def missing(self) -> str:
        """A library that the program needs and that is not installed."""
        name = NEEDED.get(self.way, "")
        return name if name and importlib.util.find_spec(name) is None else ""


def cells() -> list[Cell]:
    """Those in which most was lost first: a run that is cut off has them."""
    found = [Cell(way, ratio) for ratio in RATIOS for way in (*LARGE, *SEVERAL)]
    found += [Cell(way, ratio, passes=PASSES) for ratio in RATIOS for way in SEVERAL_TIMES]
    found += [Cell(way, ratio) for ratio in RATIOS for way in SMALL if way != "nothing" or ratio == AS_FAST]
    return found + [Cell(way, ratio, DELAY_S) for ratio in RATIOS for way in LARGE]


class Data:
    """The files that the cells read, which all lanes share. Each set is made when a cell first asks for it."""

    def __init__(self, root: Path, options: Options) -> None:
        self.root = root
        self.large_bytes = QUICK_LARGE_BYTES if options.quick else LARGE_BYTES
        self.several_bytes = QUICK_SEVERAL_BYTES if options.quick else SEVERAL_BYTES
        self.small_files = QUICK_SMALL_FILES if options.quick else SMALL_FILES
        self._making = threading.Lock()

    def of(self, cell: Cell) -> tuple[Path, int, int]:
        """Returns the directory, how many bytes of it the cell reads, and in how many pieces."""
        with self._making:
            if cell.way in SEVERAL:
                return self._several(cell.way)
            return self._large(cell.way) if cell.is_large else self._small(cell.way)

    def _several(self, way: str) -> tuple[Path, int, int]:
        root, size = self.root / (SHARDS if way == SHARDS else "several"), SEVERAL_FILES * self.several_bytes
        if not root.exists() and way == SHARDS:
            ways.make_shards(root, SEVERAL_FILES, self.several_bytes)
        elif not root.exists():
            make_files(root, SEVERAL_FILES, self.several_bytes, spread=0.0)
        return root, size, -(-size // ways.READ_BYTES)

    def _small(self, way: str) -> tuple[Path, int, int]:
        root = self.root / "small"
        if not root.exists():
            make_files(root, self.small_files, SMALL_BYTES)
        pieces = -(-self.small_files // 4) if way.startswith("loader") else self.small_files
        return root, self.small_files * SMALL_BYTES, pieces

    def _large(self, way: str) -> tuple[Path, int, int]:
        form = way if way in FORMS else "plain"
        root, size = self.root / f"large-{form}", self.large_bytes
        if not root.exists():
            root.mkdir()
            ways.make(form, root / "one.bin", size)
        calls = {"pread": size // ways.READ_BYTES, "pread-random": size // ways.BLOCK_BYTES}
        calls["pread-twice"] = 2 * calls["pread"]
        touched = size // ways.TENTH if way.endswith("tenth") else size
        return root, touched, calls.get(way, ways.BATCHES)


class Lane:
    """One lane's storage and directories, and the arms of a cell in it."""

    disks = threading.Lock()
    """Loop devices are taken one at a time."""

    def __init__(self, where: Place, data: Data, options: Options, lanes: int) -> None:
        self.where = where
        self.data = data
        self.lanes = lanes
        self.plain_s = QUICK_PLAIN_S if options.quick else PLAIN_S

    def arms(self, cell: Cell) -> dict[str, Arm]:
        """Without hpcstage and with it."""
        made: dict[str, Arm] = {PLAIN: lambda: self._run(cell, None), RUNTIME: lambda: self._run(cell, RUNTIME)}
        if cell.passes > 1:
            made[LOCAL] = lambda: self._run_on_local_disk(cell)
        return made

    def _compute_s(self, cell: Cell) -> tuple[float, float]:
        """Returns how long the program computes, and how long the source takes."""
        whole_s = self.plain_s * OVERLAPPING.get(cell.way, 1.0)
        compute_s = whole_s / (1 + RATIOS[cell.ratio])
        return compute_s, whole_s - compute_s

    def _words(self, cell: Cell, path: Path, pieces: int) -> list[str]:
        words = [sys.executable, str(PROGRAM), "loop" if cell.way == "link" else cell.way, str(path)]
        words += [
            "--compute",
            f"{self._compute_s(cell)[0]:.3f}",
            "--pieces",
            str(pieces),
            "--delay",
            f"{cell.delay_s:g}",
        ]
        return [*words, "--passes", str(cell.passes), "--timings", str(self.where.disk / "timings")]

    def _later(self, cell: Cell) -> dict[str, float]:
        """Returns the mean length of a pass after the first."""
        took = [float(line) for line in (self.where.disk / "timings").read_text().split()]
        return {"later_s": statistics.mean(took[1:])} if cell.passes > 1 else {}

    def _run_on_local_disk(self, cell: Cell) -> dict[str, Any]:
        data, _, pieces = self.data.of(cell)
        with self.disks:
            local = self.where.local.renew()
        path = Path(shutil.copytree(data, local / "data"))
        write_back(path)
        done = run(self._words(cell, path / "one.bin" if cell.is_large else path, pieces), self.where.disk)
        return {"seconds": done.seconds, "output": done.stdout, "lanes": self.lanes, **self._later(cell)}

    def _run(self, cell: Cell, mode: str | None) -> dict[str, Any]:
        where = self.where
        data, read_bytes, pieces = self.data.of(cell)
        settings = Settings(cell.passes * read_bytes / self._compute_s(cell)[1], LATENCY_S, LATENCY_S)
        run_dir = empty(where.disk / "run")
        with self.disks:
            local = where.local.renew()
        empty(where.disk / "state")
        with Storage(data, settings, where.memory, keep_cache=True) as storage:
            path = self._path(cell, storage.path)
            head = [] if mode is None else hpcstage_command(mode, run_dir, local, str(storage.path))
            done = run([*head, *self._words(cell, path, pieces)], where.disk)
            asked = storage.counters()
        sample = {"seconds": done.seconds, "output": done.stdout, "source_ratio": asked.read_bytes / read_bytes}
        sample |= {"lanes": self.lanes, **self._later(cell)}
        if mode is not None:
            found = record(run_dir)
            notes = [note["id"] for note in found["notes"]]
            sample |= {"mode_done": found["run"]["mode"], "notes": notes, "stderr": done.stderr[-2000:]}
        return sample

    def _path(self, cell: Cell, root: Path) -> Path:
        """What the program is told: the file, the directory, or a link to it."""
        if cell.way != "link":
            return root / "one.bin" if cell.is_large else root
        link = self.where.disk / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(root)
        return link


def chosen(options: Options) -> list[Cell]:
    """What --only lets through; of those, --quick takes one of each kind."""
    found = [cell for cell in cells() if options.wants(cell.name)]
    if not options.quick or options.only:
        return found
    return [next(cell for cell in found if cell.is_large is large) for large in (True, False)]


def figures(bench: Bench, measured: Sequence[Cell]) -> list[Figure]:
    """Each cell, and that the programs read the same."""
    made: list[Figure] = []
    for cell in measured:
        made.append(at_most(f"{cell.name}: runtime / plain", bench.ratio(cell.name, RUNTIME, PLAIN), NEVER_WORSE))
        made += _source_and_later(bench, cell)
        outputs = {sample["output"] for sample in bench.samples if sample["cell"] == cell.name}
        made.append(holds(f"{cell.name}: same output", len(outputs) == 1 if outputs else None))
        if not bench.options.quick:
            made.append(at_least(f"{cell.name}: plain takes", bench.median(cell.name, PLAIN), LEAST_PLAIN_S, "s"))
    known = [ratio for cell in measured if (ratio := bench.ratio(cell.name, RUNTIME, PLAIN)) is not None]
    middle = statistics.median(known) if known else None
    return [*made, at_most("the median over all cells: runtime / plain", middle, MOST_IN_THE_MIDDLE)]


def _source_and_later(bench: Bench, cell: Cell) -> list[Figure]:
    """What left the source, and how long the later passes took."""
    made: list[Figure] = []
    a_pass = divide(bench.median(cell.name, PLAIN, "source_ratio"), cell.passes)
    is_begun_before = cell.delay_s > 0 and cell.way in TENTHS  # what is copied before it opens a file it may not read
    if cell.way not in UNREAD and not is_begun_before:
        asked = divide(bench.median(cell.name, RUNTIME, "source_ratio"), a_pass)
        made.append(at_most(f"{cell.name}: runtime: bytes at the source / of a pass of plain", asked, MOST_SOURCE))
    if cell.passes > 1:
        later = divide(bench.median(cell.name, RUNTIME, "later_s"), bench.median(cell.name, LOCAL, "later_s"))
        made.append(at_most(f"{cell.name}: runtime: later passes / on the local disk", later, MOST_LATER))
    return made


class Interrupted(Exception):
    """The benchmark was interrupted: no further sample begins."""


def measure(bench: Bench, measured: Sequence[Cell], options: Options, lanes: int) -> None:
    """Measures the cells, so many at a time. Raises KeyboardInterrupt when the samples that were running have ended."""
    interrupted = threading.Event()
    waiting = iter(measured)
    taking = threading.Lock()

    def unless_interrupted(arm: Arm) -> Arm:
        def run_arm() -> dict[str, Any]:
            if interrupted.is_set():
                raise Interrupted
            return dict(arm())

        return run_arm

    def cells_of_a_lane() -> Iterator[Cell]:
        while True:
            with taking:
                cell = next(waiting, None)
            if cell is None:
                return
            yield cell

    def work(lane: Lane) -> None:
        with contextlib.suppress(Interrupted):
            for cell in cells_of_a_lane():
                arms = {name: unless_interrupted(arm) for name, arm in lane.arms(cell).items()}
                bench.measure(cell.name, arms, options.rounds(3))

    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(place(options)) for _ in range(lanes)]
        data = Data(places[0].memory, options)
        write_back(places[0].disk)
        pool = stack.enter_context(ThreadPoolExecutor(lanes))
        running = [pool.submit(work, Lane(where, data, options, lanes)) for where in places]
        try:
            for future in running:
                future.result()
        finally:
            interrupted.set()


def main() -> int:
    """Measures, prints, checks."""
    given = parser(__doc__)
    given.add_argument("--lanes", type=int, default=1, metavar="N", help="measure N cells at a time")
    arguments = given.parse_args()
    options = options_of(arguments)
    parameters = {
        "plain_s": PLAIN_S, "large_bytes": LARGE_BYTES, "small_files": SMALL_FILES, "small_bytes": SMALL_BYTES,
        "latency_s": LATENCY_S, "ratios": list(RATIOS), "delay_s": DELAY_S,
    }  # fmt: skip
    bench = Bench("ways", options, parameters, tries=2)
    wanted = chosen(options)
    measured = [cell for cell in wanted if not cell.missing]
    measure(bench, measured, options, arguments.lanes)
    return bench.finish(figures(bench, measured))


if __name__ == "__main__":
    sys.exit(main())
