"""The figures that README.md, docs/measured.md and results/README.md state, taken from the files in `results/`.

`python -m benchmarks.stated` writes the tables of these pages anew; a test compares them with what is there, so no page
states a figure that its result file does not hold. results/README.md has all of them, each with the command that
measures it, the result file, and the commit that was measured (for older files: the commit that added the file).
"""

# ruff: noqa: E501  a row of a page is one line

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stretching.cuts import CUTS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
README, MEASURED, ALL = ROOT / "README.md", ROOT / "docs" / "measured.md", RESULTS / "README.md"
BEGIN, END = "<!-- figures: python -m benchmarks.stated -->\n", "<!-- end of figures -->"
ADDED_IN = {
    "faults": "785d391",
    "identity": "8bda12d",
    "scale": "6e2a504",
    "staging": "cd750b2",
}
"""The commits that added the files which were written before results named the commit that they measured."""


MANY = "20000 x 100 kB"


class Result:
    """One result file."""

    def __init__(self, name: str, folder: Path = RESULTS) -> None:
        self.name = name
        self._found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))

    @property
    def commit(self) -> str:
        """The measured commit, or the one that added an older file."""
        measured = self._found["environment"].get("commit")
        return measured or f"added in {ADDED_IN[self.name]}"

    def figure(self, name: str) -> float:
        """One figure by its name."""
        return self.figures(re.escape(name))[0]

    def asked(self, name: str) -> str:
        """What is asked of one figure, without its comparison."""
        found = [f["asked"] for f in self._found["figures"] if f["name"] == name]
        if not found:
            raise LookupError(f"{self.name}.json has no figure {name!r}")
        return str(found[0]).partition(" ")[2]

    def figures(self, pattern: str) -> list[float]:
        """All figures whose name matches; a row without any must not be stated."""
        found = [f["measured"] for f in self._found["figures"] if re.fullmatch(pattern, f["name"])]
        if not found or None in found:
            raise LookupError(f"{self.name}.json has no figure {pattern!r}, or one that was not measured")
        return found

    def median(self, cell: str, arm: str, key: str = "seconds") -> float:
        """The median of one value of an arm of a cell."""
        values = [s[key] for s in self._found["samples"] if s["cell"] == cell and s["arm"] == arm]
        if not values:
            raise LookupError(f"{self.name}.json has no samples of {arm!r} in {cell!r}")
        return float(statistics.median(values))

    def values(self, cell: str, key: str) -> list[Any]:
        """One value of all samples of a cell."""
        return [s[key] for s in self._found["samples"] if s["cell"] == cell]

    def count(self, cell: str, arm: str) -> int:
        """The number of samples of an arm of a cell."""
        return sum(s["cell"] == cell and s["arm"] == arm for s in self._found["samples"])

    def median_or(self, cell: str, arm: str, otherwise: str) -> str:
        """The median of the seconds of an arm of a cell as text, or another one if a sample has none."""
        values = [s["seconds"] for s in self._found["samples"] if s["cell"] == cell and s["arm"] == arm]
        if not values:
            raise LookupError(f"{self.name}.json has no samples of {arm!r} in {cell!r}")
        return otherwise if None in values else f"{statistics.median(values):.1f} s"

    def column(self, title: str, column: str, rows: str = ".*") -> list[Any]:
        """One column of a table, of the rows whose first cells together match."""
        for table in self._found["tables"]:
            if table["title"].startswith(title):
                at = table["columns"].index(column)
                return [row[at] for row in table["rows"] if re.match(rows, f"{row[0]} {row[1]}")]
        raise LookupError(f"{self.name}.json has no table {title!r}")


@dataclass(frozen=True)
class Row:
    """One line of the tables. `said` makes the text of its figures from the result file."""

    result: str
    what: str
    said: Callable[[Result], str]
    in_readme: bool = False
    in_measured: bool = False
    command: str = ""
    """Where it is not the benchmark's name alone."""

    def text(self, folder: Path) -> str:
        """Its figures. Raises LookupError where the result file lacks one."""
        return self.said(Result(self.result, folder))


def _less(result: Result, cell: str, base: str, arm: str = "runtime") -> str:
    return f"{100 * (1 - result.median(cell, arm) / result.median(cell, base)):.0f} %"


def _over(result: Result, pattern: str, form: str = ".2f", joined: str = ", ") -> str:
    return joined.join(format(value, form) for value in result.figures(pattern))


def _range(values: Sequence[float], form: str = ".2f", factor: float = 1.0) -> str:
    least, most = (format(pick(values) * factor, form) for pick in (min, max))
    return least if least == most else f"{least} to {most}"


def _times_direct(result: Result, epochs: int) -> str:
    return _range(result.column("what leaves", "x direct", rf"N[248] E{epochs} (replicate|partition)"))


def _peer(result: Result, column: str) -> str:
    links = ("10 Gbit/s", "tcp", "shared memory")
    pairs = (
        [result.column("From store", column, f"{size}, memory, {link} ")[0] for size in ("128 kB", "64 MB")]
        for link in links
    )
    return "; ".join(f"{small:.2f}, {large:.2f}" for small, large in pairs)


def _saves(result: Result, programs: str) -> str:
    said = (
        _range(result.figures(f"{programs}: {what} less than a full generation"), ".1f") for what in ("bytes", "time")
    )
    return "; ".join(f"{text} %" for text in said) + " less"


def _way(result: Result, way: str) -> str:
    return ", ".join(f"{result.median('ways', way, key):.2f}" for key in ("still_s", "safe_s", "load_s")) + " s"


def _after_faults(result: Result, arm: str, what: str = "steps again") -> str:
    found = result.figures(f"(?!process holds|the link between).*, {arm}: {what}")  # these have a row of their own
    return f"{_range(found, '.1f')} s"


def _peers(result: Result, faults: Sequence[str], arm: str) -> str:
    return ", ".join(result.median_or(fault, arm, "not within 60 s") for fault in faults)


def _slopes(result: Result) -> str:
    return ", ".join(
        f"{one:.2f}" for one in result.figures(".*(4 hosts / 2 hosts|with 4 / with 2): epochs in a second")
    )


def _chaos(result: Result) -> str:
    """The trainings with random faults, their faults, and the cuts among those."""
    kinds = result.values("random faults and cuts", "kinds")
    went_on = result.figure("random faults after which training went on")
    return f"{len(kinds)}; {went_on:.0f}; {sum(count for one in kinds for kind, count in one.items() if kind in CUTS)}"


X1, NETS = "cnn x1 E1 high", ("alexnet", "resnet")
PLAIN = "sequences that left the tree of a plain directory"
ROWS: tuple[Row, ...] = (
    Row(
        "staging",
        "One epoch of 28 s, contended source, 2 loader workers: `runtime` against copying first (`upfront`); against reading directly",
        lambda r: f"{_less(r, X1, 'upfront')}; {_less(r, X1, 'direct')} less time",
        in_readme=True,
    ),
    Row(
        "staging",
        "The same, one epoch; ten epochs (one round): `runtime` / ideal time (aim: at most 1.05)",
        lambda r: f"{r.figure(X1 + ': runtime / bound'):.2f}; {r.figure('cnn x1 E10 high: runtime / bound'):.2f}",
        in_measured=True,
    ),
    Row(
        "staging",
        "A program that does not read ahead: `runtime` against reading directly",
        lambda r: f"{_less(r, X1 + ' no-prefetch', 'direct')} less time",
        in_measured=True,
    ),
    Row(
        "staging",
        "No competing load, one epoch of 52 s: `runtime` / reading directly (aim: at most 1.02)",
        lambda r: _over(r, r"cnn x2 E1 low: never worse, runtime / direct", ".3f"),
        in_readme=True,
    ),
    Row(
        "nodes",
        "2, 4, 8 virtual nodes, 1 and 3 epochs, `replicate` and `partition`: bytes read from the source, in datasets (one round)",
        lambda r: _range(r.figures("N[248] E[13] (replicate|partition): read from the source, in datasets"), ".3f"),
        in_readme=True,
    ),
    Row(
        "warm",
        "Later epochs / the same files without hpcstage, 0 and 2 workers (28 pairs each, aim: at most 1.02)",
        lambda r: (
            f"{r.figure('epochs, workers 0: later epochs / local files'):.2f}; "
            f"{r.figure('epochs, workers 2: later epochs / local files'):.2f}"
        ),
        in_measured=True,
    ),
    Row(
        "peer",
        "Files of 128 kB, 64 MB from node to node / a bare MPI ping-pong: link of 10 Gbit/s; tcp; shared memory (aim: 0.8)",
        lambda r: _peer(r, "ratio"),
        in_measured=True,
    ),
    Row(
        "staging",
        "One epoch of 28 s, contended source: `runtime` against `cp -r`, then training (three rounds)",
        lambda r: f"{_less(r, X1, 'cp -r')} less time",
        in_measured=True,
    ),
    Row(
        "staging",
        "Step times of AlexNet, ResNet: against copying first; reading directly; `runtime` / ideal time",
        lambda r: (
            f"{', '.join(_less(r, f'{n} x1 E1 high', 'upfront') for n in NETS)}; "
            f"{', '.join(_less(r, f'{n} x1 E1 high', 'direct') for n in NETS)} less time; "
            + _over(r, r"(alexnet|resnet) x1 E1 high: runtime / bound")
        ),
    ),
    Row(
        "staging",
        "Half and double data: against copying first; reading directly; `runtime` / ideal time",
        lambda r: (
            f"{', '.join(_less(r, f'cnn {x} E1 high', 'upfront') for x in ('x0.5', 'x2'))}; "
            f"{', '.join(_less(r, f'cnn {x} E1 high', 'direct') for x in ('x0.5', 'x2'))} less time; "
            + _over(r, r"cnn x(0\.5|2) E1 high: runtime / bound")
        ),
    ),
    Row(
        "staging",
        "Ten epochs, step times of CNN, AlexNet, ResNet (one round): against copying first; `runtime` / ideal time",
        lambda r: (
            f"{', '.join(_less(r, f'{n} x1 E10 high', 'upfront') for n in ('cnn', *NETS))} less time; "
            + _over(r, r"\w+ x1 E10 high: runtime / bound")
        ),
        in_measured=True,
    ),
    Row(
        "nodes",
        "The same virtual nodes, reading directly, 1 and 3 epochs: bytes read from the source, in datasets",
        lambda r: (
            f"{min(r.column('what leaves', 'source', 'N[248] E1 direct')):.0f}; "
            f"{min(r.column('what leaves', 'source', 'N[248] E3 direct')):.0f}"
        ),
    ),
    Row(
        "nodes",
        "The same, each node copying all files for itself (`private`); virtual nodes share one page cache, so a cluster's would read more",
        lambda r: _range(r.column("what leaves", "source", "N[248] E[13] private"), ".1f"),
    ),
    Row(
        "nodes",
        "The same, `replicate` and `partition`: time of the whole program / reading directly, 1 epoch (most of it the start of PyTorch in N processes); 3 epochs",
        lambda r: f"{_times_direct(r, 1)}; {_times_direct(r, 3)}",
    ),
    Row(
        "peer",
        "The same files in memory, passed by the plainest MPI program with no exchange / the ping-pong",
        lambda r: _peer(r, "of ping-pong"),
    ),
    Row(
        "peer",
        "Files of 128 kB, 64 MB from node to node with stores on a disk / the plainest MPI program on the same disk (three rounds, aim: 0.8): link of 10 Gbit/s; tcp; shared memory",
        lambda r: "; ".join(
            ", ".join(
                f"{r.figure(f'{size}, disk, {way}: of the plainest program'):.2f}" for size in ("128 kB", "64 MB")
            )
            for way in ("10 Gbit/s", "tcp", "shared memory")
        ),
    ),
    Row(
        "peer",
        "An exchange at rest: share of a core",
        lambda r: f"{r.figure('an exchange at rest, of a core'):.1f} %",
    ),
    Row(
        "truth",
        "Periods of contention in the report against those that were made; loss of bandwidth (three rounds)",
        lambda r: (
            f"off by {max(r.figures('.*: periods off by')):.1f} s; "
            f"{_range(r.figures('.*: loss of bandwidth off by'), '.1f', 100)} %"
        ),
        in_measured=True,
    ),
    Row(
        "truth",
        "How long ten programs computed, in the report, against how long they did (aim: 15 % of the wall time)",
        lambda r: (
            f"off by at most {100 * r.figure('time split: compute off by, of the wall time'):.1f} % of the wall time"
        ),
        in_measured=True,
    ),
    Row(
        "ways",
        "Ways of reading that could be harmed: `runtime` / the program alone, the worst cell (aim: at most 1.05)",
        lambda r: f"{max(r.figures('(?!the median).*: runtime / plain')):.3f}",
        command="ways --lanes 14",
        in_measured=True,
    ),
    Row(
        "ways",
        "The same, the median over all cells (aim: at most 0.85)",
        lambda r: _over(r, "the median over all cells: .* / plain"),
        command="ways --lanes 14",
        in_measured=True,
    ),
    Row(
        "served",
        "A file of 4 GB read in order from storage with 2 ms per request: `runtime`, times as fast as without hpcstage (aim: 3)",
        lambda r: _over(r, "in order, 2 ms per request: .*, times as fast as plain", ".2f"),
        in_measured=True,
    ),
    Row(
        "served",
        "A read of 4 KiB of what has arrived of a file, beyond that of a local file: `pread`, `preadv`, `read`, `readv` (aim: at most 1 us)",
        lambda r: f"{_over(r, '.* of 4 KiB that have arrived costs more')} us",
    ),
    Row(
        "warm",
        "An open of a staged file, beyond the same open of a local path",
        lambda r: f"{r.figure('native layer: an open on a hit costs'):.2f} us",
        in_measured=True,
    ),
    Row(
        "warm",
        "Start of a Python interpreter",
        lambda r: f"{r.figure('native layer: interpreter start costs'):.0f} ms more",
        in_measured=True,
    ),
    Row(
        "identity",
        "Losses and weights of direct, upfront, runtime with 0, 2 forked, 2 spawned workers against the program alone",
        lambda r: "identical" if min(r.figures(".*: losses and weights identical")) == 1 else "DIFFERENT",
        in_measured=True,
    ),
    Row(
        "faults",
        "Processes of hpcstage killed at random moments: trainings that ended as without hpcstage",
        lambda r: (
            f"{r.figure('kills after which all ended as without hpcstage'):.0f}, "
            + ("all of them" if r.figure("all tries ended as without hpcstage") == 1 else "NOT all")
        ),
        in_measured=True,
    ),
    Row(
        "outputs",
        "Output files, three processes that write at random: sequences that left the tree of a plain directory; daemon, wrapper, both or all killed at random moments, then `clean --drain`: tries in which nothing that the command left was lost and every difference was named",
        lambda r: f"{r.figure(PLAIN):.0f} of 100; {r.figure('kills after which no closed file was lost'):.0f} of 100",
        in_measured=True,
    ),
    Row(
        "coder",
        "Erasure code of checkpoints, k = 8, m = 2, one core, blocks of 256 KB; 1 MB: our calls of ISA-L / ISA-L called from C (aim: at least 0.8); data coded per second on ISA-L; by redset's byte tables in C",
        lambda r: "; ".join(
            f"{r.figure(f'{size}: hpcstage on ISA-L, of ISA-L called from C'):.2f}, "
            + ", ".join(f"{r.median(f'{size}, encode', arm, 'gb_per_s'):.1f}" for arm in ("hpcstage", "redset, C"))
            + " GB/s"
            for size in ("256 KB", "1 MB")
        ),
    ),
    Row(
        "checkpoint",
        "A checkpoint of a PyTorch program that changes little (frozen body; adapters), incremental against full, 4 nodes and 2 parities, no network: bytes; time of writing, comparing and encoding (aim: 83.8 % less, as in paper 001)",
        lambda r: _saves(r, "(frozen body|adapters).*"),
    ),
    Row(
        "checkpoint",
        "The same, half of the state changes (top layer trained by Adam; aim: 28.4 % less, as in paper 001)",
        lambda r: _saves(r, "top layer.*"),
    ),
    Row(
        "checkpoint",
        "The same, all blocks change (dense Adam; embeddings with SGD): what it takes over a full checkpoint (aim: at most 0.1 % of the bytes, 15 % of the time)",
        lambda r: "; ".join(
            f"{max(-v for v in r.figures(f'(dense|embedding).*: {what} less than a full generation')):.1f} % of {said}"
            for what, said in (("bytes", "the bytes at most"), ("time", "the time at most"))
        ),
    ),
    Row(
        "checkpoint",
        "Encoding with 8, 16, 32 data nodes and 2 parities, most / least for each byte of a node (aim: at most 1.2): counted bytes; measured processor time; time by simulation, whose terms are measured",
        lambda r: "; ".join(
            _range(r.figures(f"pipeline, .*: most / least, {what}.*"), ".2f")
            for what in ("counted", "measured", "simulated")
        ),
    ),
    Row(
        "checkpoint",
        "Encoding of 64 MiB on each of 3, 4, 5 virtual nodes (2+1, 2+2, 3+2) by exchanges over MPI, all on two processors",
        lambda r: (
            ", ".join(
                f"{r.median(cell, 'pipeline'):.2f}"
                for cell in ("exchanged, 3 nodes, 2+1", "exchanged, 4 nodes, 2+2", "exchanged, 5 nodes, 3+2")
            )
            + " s"
        ),
    ),
    Row(
        "checkpointer",
        "`hpcstage.torch.Checkpointer.save()` of 1 GB, from the second on, until training may go on / `copy_` of each tensor into memory that is there: 70; 4,000 tensors (15 rounds, aim: at most 1.15)",
        lambda r: "; ".join(
            f"{r.figure(f'save, {count} tensors: save() against copy_ of each'):.2f}" for count in (70, 4000)
        ),
    ),
    Row(
        "checkpointer",
        "A training on both processors that saves 1 GB each minute / one that saves nothing (five rounds, aim: at most 1.05); until a save is safe on the local disk",
        lambda r: (
            f"{r.figure('training that saves each minute against none'):.2f}; "
            f"{r.median('training', 'Checkpointer', 'safe_s'):.1f} s"
        ),
        in_measured=True,
    ),
    Row(
        "checkpointer",
        "1 GB on the local disk by Checkpointer; torch.save; torch.distributed.checkpoint: training stands still, until it is safe, loading",
        lambda r: "; ".join(_way(r, f"{tool}, local disk") for tool in ("Checkpointer", "torch.save", "DCP")),
    ),
    Row(
        "checkpointer",
        "The same to emulated shared storage of 500 MB/s; torch.distributed.checkpoint plain and async",
        lambda r: "; ".join(_way(r, f"{tool}, shared") for tool in ("Checkpointer", "torch.save", "DCP", "DCP async")),
    ),
    Row(
        "scale",
        "Simulated jobs of 8 to 4096 nodes, `replicate` and `partition`: bytes read from the source, in datasets",
        lambda r: _range(r.figures("(replicate|partition), .* nodes: source bytes / dataset"), ".3f"),
    ),
    Row(
        "scale",
        "Planning 10 million files for 1024 nodes on one node: `replicate`; `partition`; room for half",
        lambda r: "; ".join(
            f"{r.column('Planning', 'seconds', f'plan, {kind}, 10 M files, 1024 nodes')[0]:.1f} s"
            for kind in ("replicate", "partition", "half")
        ),
    ),
)


def _ratio(ratio: float) -> Row:
    def said(r: Result) -> str:
        over = r.median(X1, "runtime", "seconds") / r.median(X1, "upfront", "seconds")
        return f"{over:.2f}; {r.figure(X1 + ': runtime / direct'):.2f}; {r.figure(X1 + ': runtime / bound'):.2f}"

    what = f"One epoch, a source that takes {ratio:g} of the compute (one round): `runtime` / copying first; reading directly; the ideal time"
    return Row(f"staging-{ratio:g}", what, said, command=f"staging --ratio {ratio:g}")


ROWS += (
    _ratio(0.3),
    _ratio(2.5),
    Row(
        "staging-processor",
        "One epoch, computing on the two processors, of which the emulated storage, its competing load and copying take their part too (one round): against copying first; reading directly; `runtime` / ideal time",
        lambda r: (
            f"{_less(r, X1, 'upfront')}; {_less(r, X1, 'direct')} less time; {r.figure(X1 + ': runtime / bound'):.2f}"
        ),
        command="staging --compute processor",
        in_measured=True,
    ),
    Row(
        "copy",
        "Copying 20,000 files of 100 kB from storage with 2 ms per operation: against `cp -r` (one round); against the best other, `rclone`; rate against a C program that only reads, with as many threads and the names given (aim: 0.8)",
        lambda r: (
            f"{r.figure(f'{MANY}, 2 ms: times as fast as cp -r'):.0f} times as fast; "
            f"{r.figure(f'{MANY}, 2 ms: time / that of the best other'):.2f} of its time; "
            f"{r.figure(f'{MANY}, 2 ms: share of what a C program reads flat out, names given'):.2f}"
        ),
        in_measured=True,
    ),
    Row(
        "copy",
        "Copying, against the best of cp, rsync, tar, rclone: these files from local disk; 8 files of 256 MB from local disk (aim: at most 1.05); at 2 ms",
        lambda r: (
            f"{r.figure(f'{MANY}, local disk: time / that of the best other'):.2f}; "
            f"{r.figure('8 x 256 MB, local disk: time / that of the best other'):.2f}; "
            f"{r.figure('8 x 256 MB, 2 ms: time / that of the best other'):.2f} of its time"
        ),
        in_measured=True,
    ),
    Row(
        "locality",
        "Later epochs of loading on 2, 4, 8 virtual nodes: locality-aware / regular sampler, both behind hpcstage",
        lambda r: ", ".join(
            f"{r.median(f'{n} nodes, loading', 'locality', 'later_s') / r.median(f'{n} nodes, loading', 'cached', 'later_s'):.2f}"
            for n in (2, 4, 8)
        ),
        command='locality --only "nodes, loading"',
    ),
)

FAULTS = "elastic --only host --only process --arms hpcstage --arms kept"

ROWS += (
    Row(
        "elastic-faults",
        "Elastic training on three hosts, one killed or frozen, one process killed or frozen, the endpoint's host, one direction of a host's network cut (medians of five): until it is noticed (aim: at most 3 s); until the others make steps again, with `Elastic` (5 s); with restarted processes (10 s)",
        lambda r: (
            f"{_after_faults(r, '(hpcstage|kept)', 'noticed')}; {_after_faults(r, 'kept')}; {_after_faults(r, 'hpcstage')}"
        ),
        command=FAULTS,
        in_measured=True,
    ),
    Row(
        "elastic",
        "The same with torchrun's own rendezvous: a host killed, the endpoint's host killed (one round); with torchft, which restarts nothing: a host killed, frozen (three rounds)",
        lambda r: (
            _peers(r, ("host killed", "endpoint's host killed"), "c10d")
            + f"; {_peers(r, ('host killed', 'host frozen'), 'torchft')}"
        ),
    ),
    Row(
        "elastic",
        "Epochs in a second with 4 hosts / with 2 (steps of 0.04 s): always 4 / always 2; from 2 to 4; from 4 to 2; accuracy in the end with changes, off the mean of fixed hosts / spread of those, in points",
        lambda r: (
            f"{_slopes(r)}; "
            + ", ".join(f"{off:.1f}" for off in r.figures("(2 to 4|4 to 2): accuracy off that of fixed hosts"))
            + f" / {r.asked('2 to 4: accuracy off that of fixed hosts')} ({r.count('epochs over time', '4 to 2')} seeds)"
        ),
    ),
    Row(
        "elastic-chaos",
        "Random events in `hpcstage run --elastic` with jobs that join: trainings; events (faults, jobs that join) after which they went on; cuts of a network among them; epochs in which a sample did not count once; weights off those of a training without faults; processes and directories left behind",
        lambda r: (
            f"{_chaos(r)}; "
            f"{r.figure('random faults: epochs in which a sample did not count once'):.0f}; "
            f"{r.figure('random faults: weights off those of a training without faults'):.0e}; "
            f"{r.figure('random faults: processes and directories left behind'):.0f}"
        ),
        command='elastic --only "random faults"',
    ),
    Row(
        "elastic-faults",
        "The same with `Elastic` where a link between two hosts is cut that both reach the endpoint; where a process holds Python's lock for ever, with limits of 5 s for a step and 2 s for leaving: until it is noticed; until the others make steps again",
        lambda r: "; ".join(
            f"{r.figure(f'{fault}, kept: noticed'):.1f}, {r.figure(f'{fault}, kept: steps again'):.1f} s"
            for fault in ("the link between two other hosts is cut", "process holds Python's lock")
        ),
        command=FAULTS,
    ),
    Row(
        "elastic-busy",
        "Hosts on a machine whose processors are busy, stopped again and again for less than the lease (aim: 30 minutes): minutes; false alarms",
        lambda r: f"{r.figure('busy machine: minutes'):.0f}; {r.figure('busy machine: false alarms'):.0f}",
        command='elastic --only "busy machine"',
    ),
    Row(
        "elastic-staged",
        "A node lost with its store when all data is staged: bytes read from the source beyond one dataset and what only that node had, in datasets: `replicate`; `partition` (aim: 0)",
        lambda r: "; ".join(
            f"{r.figure(f'staged data, a node lost, {way}: read beyond one dataset and what only that node had, in datasets'):.3f}"
            for way in ("replicate", "partition")
        ),
        command='elastic --only "staged data"',
    ),
)

ONE_FILE = ("in order", "one node later", "at random", "mapped", "tokens")

ROWS += (
    Row(
        "onefile",
        "One large file that programs on 4 virtual nodes read once, with `replicate`, in times of the programs alone (aim: at most 1.05): in order; in order, one node later; at random; mapped; as the tokens of a training with DistributedDataParallel. Bytes that leave the source, in files, alone and with hpcstage, in the same order",
        lambda r: (
            "; ".join(f"{r.figure(f'{way}: runtime / plain'):.2f}" for way in ONE_FILE)
            + ". "
            + "; ".join(
                f"{r.median(way, 'plain', 'source_files'):.2f}, {r.median(way, 'runtime', 'source_files'):.2f}"
                for way in ONE_FILE
            )
        ),
        in_measured=True,
    ),
)


LIBRARIES = {"h5py": "h5py", "lmdb": "LMDB", "pyarrow": "PyArrow", "pillow": "Pillow"}

ROWS += (
    Row(
        "libraries",
        "Tests of libraries on emulated storage, while their data arrives: tests that pass with and without hpcstage; that fail with and without it; that end differently (aim: 0)",
        lambda r: "; ".join(
            f"{said} {r.values(name, 'version')[0]}: {r.figure(f'{name}: tests that pass with and without hpcstage'):.0f}, "
            f"{len(r.values(name, 'failed')[0])}, {r.figure(f'{name}: tests that end differently'):.0f}"
            for name, said in LIBRARIES.items()
        ),
        command="libraries --suite pillow=DIR --suite lmdb=DIR",
    ),
)


def readme_table(folder: Path = RESULTS) -> str:
    """The rows of README.md."""
    return _short([row for row in ROWS if row.in_readme], folder)


def measured_table(folder: Path = RESULTS) -> str:
    """The rows of docs/measured.md."""
    return _short([row for row in ROWS if row.in_readme or row.in_measured], folder)


def full_table(folder: Path = RESULTS) -> str:
    """The rows of results/README.md: all, with the command and the result file."""
    lines = ["| what | figure | command | result file | commit |", "|---|---|---|---|---|"]
    for row in ROWS:
        file = f"[{row.result}.json]({row.result}.json)"
        command = f"`python -m benchmarks.{row.command or row.result}`"
        lines.append(f"| {row.what} | {row.text(folder)} | {command} | {file} | {Result(row.result, folder).commit} |")
    return "\n".join([*lines, ""])


def _short(rows: Sequence[Row], folder: Path) -> str:
    lines = [f"| {row.what} | {row.text(folder)} |" for row in rows]
    return "\n".join(["| what | figure |", "|---|---|", *lines, ""])


def between(page: str) -> str:
    """The table that a page holds now."""
    return page.partition(BEGIN)[2].partition(END)[0]


def main() -> int:
    """Writes the tables."""
    for path, table in ((README, readme_table()), (MEASURED, measured_table()), (ALL, full_table())):
        page = path.read_text(encoding="utf-8")
        path.write_text(page.replace(BEGIN + between(page) + END, BEGIN + table + END), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
