"""Writes the figures of a run for the textfile collector of Prometheus's node exporter. From record to text.

All are gauges of one run, which every line names; what is not known has no line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hpcstage.record.schema import Record
from hpcstage.report import figures

Labels = dict[str, str]
Sample = tuple[float | None, Labels]
QUANTILES = {"0.5": "p50", "0.95": "p95", "0.99": "p99"}


def text(record: Record) -> str:
    """Returns the text in Prometheus's exposition format."""
    lines = []
    for name, about, samples in _families(record):
        known = [(value, labels) for value, labels in samples if value is not None]
        if known:
            lines += [f"# HELP hpcstage_run_{name} {about}", f"# TYPE hpcstage_run_{name} gauge"]
        for value, labels in known:
            told = ",".join(f'{key}="{_escaped(text)}"' for key, text in {"run": record.run.id, **labels}.items())
            lines.append(f"hpcstage_run_{name}{{{told}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return figures.clean(value).replace("\\", "\\\\").replace('"', '\\"')


def _families(record: Record) -> Iterator[tuple[str, str, list[Sample]]]:
    """Yields the name of each metric with its unit, what it is, and its values."""
    run, split, totals, source = record.run, record.time_split, record.totals, record.contention
    about = {"job": run.job_id or "", "mode": figures.mode(run), "state": run.state, "host": run.host}
    yield "info", "The run, with its job, mode, state and first host as labels; always 1.", [(1, about)]
    yield "start_time_seconds", "Start of the run since the epoch.", [(run.started_unix_s, {})]
    yield "exit_code", "Exit code of the command.", [(run.exit_code, {})]
    yield "wall_seconds", "Time of the command.", [(split.wall_s, {})]
    yield "before_seconds", "Time from the start of hpcstage to that of the command.", [(split.before_s, {})]
    waits = (("source", split.wait_source_s), ("local", split.wait_local_s))
    yield "waited_seconds", "Time for which the program waited for files.", [(value, {"on": on}) for on, value in waits]
    origins = {
        "source_copied": totals.copied_bytes,
        "source_read": totals.direct_bytes,
        "peers": totals.peer_bytes,
        "local": totals.local_bytes,
    }
    said = "Bytes copied and read at the source, received from other nodes, and read from local copies."
    yield "bytes", said, [(value, {"origin": origin}) for origin, value in origins.items()]
    yield "local_ratio", "Share of what was read that came from local copies.", [(record.local_share, {})]
    opens = {"local": record.coverage.swapped, "source": record.coverage.from_source}
    said = "Opens below the datasets, by where they led."
    yield "opens", said, [(value, {"to": to}) for to, value in opens.items()]
    rates = (("best", source.best_bytes_per_s), ("typical", source.typical_bytes_per_s))
    said = "Bandwidth of the source, to all nodes together."
    yield "source_bytes_per_second", said, [(value, {"level": level}) for level, value in rates]
    yield "contention_seconds", "Time in which the source was slow.", [(figures.contended_s(source), {})]
    said = "Latency of opens and reads at the source."
    found = [
        (kind, quantile, getattr(of, name))
        for kind, of in source.latency_ms.items()
        for quantile, name in QUANTILES.items()
    ]
    yield "source_latency_seconds", said, [
        (None if value is None else value / 1000, {"operation": kind, "quantile": quantile})
        for kind, quantile, value in found
    ]  # fmt: skip
    states = Counter(node.state.value for node in record.nodes)
    yield (
        "nodes",
        "Nodes of the job, by the state of their staging.",
        [(n, {"state": state}) for state, n in states.items()],
    )
    yield "staged_bytes", "Bytes of a dataset in the stores of all nodes.", [
        (dataset.staged_bytes, {"dataset": dataset.root}) for dataset in record.datasets
    ]  # fmt: skip
    yield "output_bytes", "Bytes copied to the directories of --out and --checkpoint.", [
        (drain.size_bytes, {"option": option}) for option, drain in record.drains.items()
    ]  # fmt: skip
    yield "output_names_left", "Names that were not copied there.", [
        (drain.undrained_count, {"option": option}) for option, drain in record.drains.items()
    ]  # fmt: skip
