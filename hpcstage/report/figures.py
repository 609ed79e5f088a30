"""Says the figures of a record in words: numbers with units, shares, and phrases that several forms of it share.

It draws nothing and does not import rich, as the short form at the end of a run needs no more than this.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from hpcstage.record.figures.counts import ratio
from hpcstage.record.schema import Contention, NodeRow, Note, Record, RunSection, TimeSplit
from hpcstage.units import format_duration, format_rate, format_share, format_size

UNKNOWN = "not measured"
NAME_CHARS = 18
"""The characters of a node's name that are shown."""
ENDINGS = {"running": "still running", "aside": "ran without hpcstage"}


# ---- text


def clean(text: str) -> str:
    """Returns one line without control characters: escapes what is not printable; bytes that are no text as \\xNN."""
    return text if text.isprintable() else "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    is_byte = 0xDC80 <= ord(char) <= 0xDCFF
    return f"\\x{ord(char) - 0xDC00:02x}" if is_byte else char.encode("unicode_escape").decode()


def clip(text: str, columns: int) -> str:
    """Returns text that is cleaned and takes at most so many columns; `...` says that something was cut off."""
    text = clean(text)
    if len(text) <= columns and text.isascii():
        return text
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= columns else set_cell_size(text, columns - 3) + "..."


def short_name(host: str) -> str:
    """Returns the end of a node's name where it is long, as names differ there."""
    return host if len(host) <= NAME_CHARS else "…" + host[1 - NAME_CHARS :]


# ---- numbers


def percent(share: float | None) -> str:
    """Formats a share; a small one is not shown as 0 %, and a nearly whole one not as 100 %."""
    return UNKNOWN if share is None else format_share(share).replace("under ", "<")


def seconds(value: float | None) -> str:
    """Formats a duration, or says that it is not known."""
    if value is None:
        return UNKNOWN
    if abs(value) < 1e-7:  # what a difference of two floats leaves
        return "0 s"
    return f"{'-' if value < 0 else ''}{format_duration(abs(value))}"


def _known(form: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: UNKNOWN if value is None else form(value)


size, rate, count = _known(format_size), _known(format_rate), _known("{:,.0f}".format)
"""They format bytes, bytes per second and a number of things, or say that these are not known."""


# ---- what follows from a record


def ending(run: RunSection) -> str:
    """Says how the command ended."""
    if run.state in ENDINGS:
        return ENDINGS[run.state]
    if run.signal is not None:
        return f"killed by {_signal_name(run.signal)}"
    return "end not seen" if run.exit_code is None else f"exit code {run.exit_code}"


def _signal_name(number: int) -> str:
    """Returns a name such as SIGINT; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def mode(run: RunSection) -> str:
    """Returns the mode that was followed; where none was, that which was asked for."""
    return run.mode or run.mode_asked


def reported(record: Record) -> str:
    """Says how many of several nodes the figures are of, where that is not all."""
    is_part = record.group is not None and record.reported < len(record.nodes)
    return f"on {record.reported} of {len(record.nodes)} nodes" if is_part else ""


def verdict(record: Record) -> list[str]:
    """Returns the sentences of the verdict."""
    found = record.verdict
    return [_capital(sentence) for sentence in (found.text, found.compared) if sentence] if found else []


def note(found: Note) -> str:
    """Returns a note on one line."""
    return f"{found.severity.value}: {found.text}" + (f" ({found.remedy})" if found.remedy else "")


def _capital(sentence: str) -> str:
    """Returns it with a capital letter and a full stop; the names of this program and of hosts have none."""
    first = sentence.partition(" ")[0]
    return f"{sentence[:1].upper() + sentence[1:] if first.isalpha() and first != 'hpcstage' else sentence}."


def wait_share(split: TimeSplit) -> float | None:
    """Returns the share of the wall time in which the program waited for files."""
    return ratio(split.waited_s, split.wall_s)


def contended_s(part: Contention) -> float | None:
    """Returns how long the source was slow; None where that cannot be said."""
    return None if part.verdict in (None, "unknown") else sum(one.length_s for one in part.shared)


def times(split: TimeSplit) -> list[tuple[str, float]]:
    """Returns in words where the wall time went, in seconds, without what is 0 or was not measured."""
    is_divided = split.compute_s is not None and split.waited_s is not None
    rows = (
        ("compute", split.compute_s),
        ("waited for the source", split.wait_source_s),
        ("waited for local disk", split.wait_local_s),
        ("waited for decoding", split.preprocess_s),
        ("start and end (imports)" if is_divided else "not divided", split.other_s),
    )
    return [(name, value) for name, value in rows if value]


HIDDEN = "copied while you computed"


ORIGINS = ("read from the local copy", "read from the source", "copied from the source", "copied from other nodes")


def origins(record: Record) -> list[tuple[str, int | None, int | None]]:
    """Returns in words from where files came, with opens and bytes, without what is 0 or was not measured."""
    totals = record.totals
    opens = (record.coverage.swapped, record.coverage.from_source, None, None)
    read = (totals.local_bytes, totals.direct_bytes, totals.copied_bytes, totals.peer_bytes)
    return [row for row in zip(ORIGINS, opens, read, strict=True) if any(row[1:])]


def source_times(record: Record) -> str:
    """Says how often the source was read by the nodes that reported; others may have read it, too."""
    if record.source_times is None:
        return ""
    value = f"{record.source_times:.3g}"
    often = "once" if value == "1" else f"{value} times"
    whole = record.reported >= len(record.nodes) and not record.lost_nodes
    return f"source read {often}" if whole else f"source read at least {often}"


def held(nodes: Sequence[NodeRow], files: float | None) -> str:
    """Says how many files each node holds. As several nodes may hold the same files, a sum would say less."""
    found = [row.staged_files for row in nodes if row.staged_files is not None]
    if not found:
        return UNKNOWN
    least, most = count(min(found)), count(max(found))
    number = least if least == most else f"{least} to {most}"
    return f"{len(found)} nodes with {number} of {count(files)} files{' each' if len(found) > 1 else ''}"
