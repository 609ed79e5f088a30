"""The verdict: the kind that the figures give, and no number in it that was not measured."""

from __future__ import annotations

import re
from typing import Any

import manycases
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordcases import SECOND, blocked, node_part, run_part, trainer, worker

from hpcstage.problem import Problem
from hpcstage.record.compose import compose
from hpcstage.record.figures.counts import ratio
from hpcstage.record.index import Earlier
from hpcstage.record.parts.alive import Life
from hpcstage.record.parts.outputs import OutputsPart
from hpcstage.record.parts.part import DatasetPart
from hpcstage.record.parts.rows import ProcessPart, Sample
from hpcstage.record.schema import Record, Verdict
from hpcstage.record.verdict import untold, verdict_of
from hpcstage.units import format_duration, format_share, format_size

WALL_S = 60
QUIET = [Sample(float(second), 1.0) for second in range(WALL_S)]
ROOT = "/lustre/imagenet/train"


def reader(source_s: float = 0.0, local_s: float = 0.0, **counters: int) -> ProcessPart:
    """The command's own process, which reads by itself for all of its time."""
    own = {"attach_ns": 5 * SECOND, "exit_ns": (5 + WALL_S) * SECOND, "reads_measured": 1}
    return ProcessPart(100, 1, "native", own | blocked(source_s, local_s) | counters)


def record_of(run: dict[str, Any] | None = None, **node: Any) -> Record:
    return compose(run_part(**(run or {})), [node_part(**({"samples": QUIET} | node))])


def copying(seconds: int, inside_s: float) -> list[Sample]:
    """Copies of 20 MB a second, whose opens and reads at the source took `inside_s` each second."""
    busy = [Sample(float(n), 1.0, 20_000_000, 200, 0, int(inside_s * SECOND), 0, 1.0) for n in range(seconds)]
    return [*busy, *QUIET[seconds:]]


LOCAL = {"hit_opens": 20_000, "local_read_bytes": 2 * 10**9}
AT_SOURCE = {"source_opens": 20_000, "source_read_bytes": 2 * 10**9}
LATE = {"hit_opens": 4_000, "source_opens": 6_000, "direct_later": 6_000, "local_read_bytes": 1, "source_read_bytes": 1}
DIRECT = {"mode": "direct", "staged_s": None}


def direct(**counters: Any) -> Record:
    return record_of({"mode_asked": "direct"}, **DIRECT, processes=[reader(**counters)])


def kind(record: Record, *earlier: Earlier) -> str:
    return verdict_of(record, earlier).kind


CASES = {
    "error": lambda: record_of(complete=False),
    "running": lambda: compose(run_part(exit_code=None), [node_part(complete=False)], Life(True, "so")),
    "no-dataset": lambda: record_of({"direct_why": "no dataset is named"}, **DIRECT, datasets=[]),
    "already-local": lambda: record_of({"direct_why": "the dataset /d is already on the node-local disk"}, **DIRECT),
    "not-attached": lambda: record_of(processes=[]),
    "nothing-opened": lambda: record_of(processes=[reader()]),
    "not-measured": lambda: record_of(processes=[ProcessPart(5, 1, "python", {"hit_opens": 9})]),
    "source-keeps-up": lambda: direct(source_s=0.6, **AT_SOURCE),
    "copies-served": lambda: record_of(samples=copying(40, 8), processes=[reader(0.5, 0.5, **LOCAL)]),
    "copies-late": lambda: record_of(processes=[reader(30, wants=6_300, **LATE)]),
    "does-not-fit": lambda: record_of(budget_bytes=10**8, processes=[reader(30, direct_full=10_000, **AT_SOURCE)]),
    "source-contended": lambda: compose(run_part(), [node_part()]),
    "source-limits": lambda: direct(source_s=30, **AT_SOURCE),
    "local-disk-limits": lambda: record_of(processes=[reader(0.5, 30, **LOCAL)]),
    "other-nodes-limit": lambda: compose(
        manycases.run(2),
        [
            manycases.node(
                index, 2, placement="partition", samples=QUIET,
                processes=[trainer(loader_wait_ns=30 * SECOND), worker(101, **blocked(60), **dict.fromkeys(
                    ("source_opens", "direct_scanning", "direct_later", "source_read_bytes", "source_reads"), 0))],
            )
            for index in range(2)
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_kind(name: str) -> None:
    record = CASES[name]()
    assert record.verdict == verdict_of(record)
    assert record.verdict is not None
    assert record.verdict.kind == name


def test_the_sentence_of_the_source_that_keeps_up() -> None:
    text = verdict_of(direct(source_s=0.6, **AT_SOURCE)).text
    assert text == (
        "waited for data 1 % of 60 s (the source keeps up): hpcstage can save at most 0.6 s here; "
        "leave hpcstage out, or use it when the file system is busy"
    )


def test_copies_that_cost_the_source_next_to_nothing_are_not_called_a_gain() -> None:
    """Whether the source would have kept up is not measured, so the word is there."""
    slow, fast = (record_of(samples=copying(40, s), processes=[reader(0.5, **LOCAL)]) for s in (8, 0.01))
    assert kind(slow) == "copies-served"
    assert kind(fast) == "source-keeps-up"
    assert "assumed" in verdict_of(fast).text
    assert "assumed" not in verdict_of(slow).text


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("scanning", "20,000 opens came before the scan of the dataset had ended"),
        ("unknown", "were not among the files of the dataset"),
        ("failed", "could not be copied"),
        ("void", "had been written to"),
        ("large", "--mode upfront copies them before it starts"),
        ("full", "20,000 opens found no room on the local disk"),
    ],
)
def test_the_reason_that_most_opens_at_the_source_have(reason: str, says: str) -> None:
    record = record_of(processes=[reader(30, **{f"direct_{reason}": 20_000}, **AT_SOURCE)])
    assert says in verdict_of(record).text


def test_a_program_that_lists_and_opens_nothing_is_told_what_it_waited_for() -> None:
    found = verdict_of(record_of(processes=[reader(40, listings=600)]))
    assert found.kind == "nothing-opened"
    assert found.text.endswith("; the program waited for data 67 % of 60 s, for listings and the like from the source")


def test_only_opens_that_asked_count_as_late() -> None:
    asked, not_asked = (record_of(processes=[reader(30, wants=wants, **LATE)]) for wants in (6_300, 310))
    assert "6,000 opens of 10,000 came before the file was copied" in verdict_of(asked).text
    assert kind(not_asked) != "copies-late", "300 of 310 got their copy"


def test_no_advice_that_cannot_help() -> None:
    once = record_of(processes=[reader(59.5, source_opens=10_000, source_read_bytes=10**9)])
    assert "files were read once and nothing was computed meanwhile: leave hpcstage out" in verdict_of(once).text
    assert "--order" not in verdict_of(once).text
    known, unknown = (
        record_of(processes=[reader(30, wants=6_300, **LATE)], order={"provenance": provenance})
        for provenance in ("sampler", "manifest")
    )
    assert "--order" not in verdict_of(known).text
    assert "if it does not read in the order of the paths" in verdict_of(unknown).text
    outputs = OutputsPart(directory="/o", local_dir="/l")
    kept = record_of({"command": ["tar", "x"], "drains": {"out": outputs}}, processes=[])
    assert verdict_of(kept).text.endswith("it read the source; leave --data out"), "outputs are still served"


def test_earlier_runs_in_other_modes_stand_beside_it() -> None:
    record = record_of(samples=copying(40, 8), processes=[reader(0.5, 0.5, **LOCAL)])
    slower = verdict_of(record, [Earlier("direct", (90.0, 110.0)), Earlier("runtime", (50.0,))])
    assert slower.compared == "this run 60.2 s in mode runtime; earlier: mode direct 1m40s (median of 2)"
    assert "--mode direct" not in slower.text, "it was tried"
    once = verdict_of(record, [Earlier("direct", (40.0,))])
    assert once.compared == (
        "this run 60.2 s in mode runtime; earlier: mode direct 40 s (one run); leave hpcstage out if more runs say the "
        "same"
    )
    read_there = direct(source_s=30, **AT_SOURCE)
    assert "--mode" not in verdict_of(read_there, [Earlier("runtime", (100.0,))]).text, "it was tried"
    assert verdict_of(read_there, [Earlier("runtime", (9.0,))]).compared.endswith(
        "; take --mode runtime if more runs say the same"
    )
    failed = record_of({"exit_code": 1}, samples=copying(40, 8), processes=[reader(0.5, 0.5, **LOCAL)])
    assert verdict_of(failed, [Earlier("direct", (40.0,))]).compared == ""


def test_mode_direct_was_faster_if_each_of_its_runs_was() -> None:
    record = record_of(samples=copying(40, 8), processes=[reader(0.5, 0.5, **LOCAL)])
    faster = verdict_of(record, [Earlier("direct", (40.0, 42.0, 59.9)), Earlier("runtime", (61.0, 62.0))])
    assert faster.kind == "direct-was-faster"
    assert faster.text == (
        "each run of mode direct took less time than each of mode runtime: 42 s (median of 3) against 61 s (median of "
        "3); leave hpcstage out, or use it when the file system is busy"
    )
    for direct, runtime in [
        ((40.0, 42.0), (61.0, 62.0)),
        ((40.0, 42.0, 44.0), (61.0,)),
        ((40.0, 42.0, 60.5), (61.0, 62.0)),
        ((58.0, 58.5, 59.0), (60.3, 60.4)),
        ((40.0, 42.0, 44.0), ()),
    ]:
        earlier = [Earlier("direct", direct), *([Earlier("runtime", runtime)] if runtime else [])]
        found = verdict_of(record, earlier)
        assert found.kind == "copies-served"
        assert "; earlier: mode direct" in found.compared


def test_of_many_nodes_of_which_one_failed_the_others_are_judged() -> None:
    nodes = [manycases.node(index, 4) for index in range(3)]
    found = verdict_of(compose(manycases.run(4), [*nodes, manycases.missing(3, 4, why="ssh: refused")]))
    assert found.kind == "error"
    assert "on the others 100 % of the bytes that Python read came from the local copy" in found.text


def test_what_the_verdict_says_no_note_says_again() -> None:
    for make in CASES.values():
        record = make()
        assert record.verdict is not None
        assert not [note for note in untold(record) if note.text in record.verdict.text]


def shown(value: float) -> tuple[str, ...]:
    """All ways in which a figure may stand in a sentence."""
    share = format_share(value).replace("under ", "<")
    return format_duration(value), share, format_size(value), f"{value:,.0f}", f"{value:.3g}"


NOT_FIGURES = re.compile(r"node17|/lustre/imagenet/train|-[IES]\b")


def measured(record: Record, earlier: list[Earlier]) -> list[float | None]:
    """All that a sentence may say of this run and earlier ones in numbers."""
    split, totals, opens = record.time_split, record.totals, record.coverage.opens or 0
    sizes, files = ([getattr(one, name) or 0 for one in record.datasets] for name in ("size_bytes", "files"))
    reasons = record.coverage.reasons
    late = min(
        (totals.wanted or 0) - (totals.want_ready or 0),
        sum(reasons.get(name, 0) for name in ("later", "scanning", "timeout")),
    )
    found = [
        split.wall_s,
        record.headroom_s,
        split.total_s,
        split.before_s,
        record.local_share,
        opens,
        late,
        sum(sizes),
    ]
    found += [ratio(record.headroom_s, split.wall_s), ratio(opens, sum(files)), *reasons.values()]
    found += [node.budget_bytes for node in record.nodes]
    periods = record.contention.periods
    found += [source_s(record), *(one.end_s - one.start_s for one in periods), *(one.loss for one in periods)]
    for one in earlier:
        same = [] if one.mode != record.run.mode or split.total_s is None else [split.total_s]
        found += [Earlier(one.mode, (*one.took_s, *same)).median_s, one.median_s, len(one.took_s) + len(same)]
        found.append(len(one.took_s))
    return found


def source_s(record: Record) -> float | None:
    """How long the source would take for what was read."""
    per_byte = ratio(record.totals.copy_read_s, record.totals.copied_bytes)
    return None if per_byte is None else per_byte * (record.totals.local_bytes or 0)


def without(figures: list[float | None], found: Verdict) -> str:
    """The sentences without these figures."""
    text = NOT_FIGURES.sub("", f"{found.text} {found.compared}")
    forms = {form for value in figures if value is not None for form in shown(value)}
    for one in sorted(forms, key=len, reverse=True):
        text = re.sub(rf"(?<![\d.,<]){re.escape(one)}(?!\d|[.,]\d)", "", text)
    return text


counts = st.integers(0, 20_000)
byte_counts = st.integers(0, 3 * 10**9)
processes = st.builds(
    reader,
    st.floats(0, 70),
    st.floats(0, 30),
    hit_opens=counts, source_opens=counts, wants=counts, direct_later=counts, direct_full=st.sampled_from([0, 9_000]),
    direct_unknown=counts, direct_scanning=counts, direct_large=counts,
    local_read_bytes=byte_counts, source_read_bytes=byte_counts, reads_measured=st.sampled_from([0, 1]),
)  # fmt: skip
EARLIER = st.builds(
    Earlier, st.sampled_from(["direct", "runtime"]), st.lists(st.floats(0.1, 1e4), min_size=2, max_size=4).map(tuple)
)
runs = st.fixed_dictionaries(
    {
        "mode_asked": st.sampled_from(["runtime", "upfront", "direct"]),
        "child_started_s": st.sampled_from([0.2, 20.0]),
        "exit_code": st.sampled_from([0, 1]),
        "problems": st.sampled_from([[], [Problem("scan-failed", "the scan failed", "look")]]),
    }
)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=300)
@given(
    runs,
    st.lists(processes, max_size=1),
    st.sampled_from([10**8, 64 * 10**9]),
    st.sampled_from([0.01, 2.0, 8.0]),
    st.lists(EARLIER, max_size=2, unique_by=lambda one: one.mode),
)
def test_every_number_of_the_sentences_was_measured(
    run: dict[str, Any], read: list[ProcessPart], budget: int, inside_s: float, earlier: list[Earlier]
) -> None:
    mode = run["mode_asked"]
    record = record_of(run, mode=mode, processes=read, budget_bytes=budget, samples=copying(30, inside_s))
    found = verdict_of(record, earlier)
    assert found.text
    assert found.text.isprintable()
    assert not re.search(r"\d", without(measured(record, earlier), found)), (found.text, found.compared)
    if "assumed" not in found.text:
        assert "takes the source" not in found.text
    if "leave hpcstage out" in found.text:
        assert "--order" not in found.text
        assert "--mode" not in found.text
    if "--mode runtime" in found.text:
        assert mode != "runtime"
    if "--mode direct" in found.text:
        assert mode != "direct"


@pytest.mark.parametrize("room", [None, 10**9])
def test_a_dataset_is_named_but_none_is_known(room: int | None) -> None:
    record = record_of(datasets=[DatasetPart(ROOT)], processes=[reader(30, **AT_SOURCE)], budget_bytes=room)
    assert "where files are read again" in verdict_of(record).text
    assert "--budget" not in verdict_of(record).text
