"""The cost model against numbers worked out by hand, and what must hold for any numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.scan import scan
from hpcstage.plan.forecast import OF_RATES, OF_WORKLOAD, Conditions, forecast, missing_figures, queued_s
from hpcstage.plan.types import Forecast, Rates, Workload
from hpcstage.preview.plan import EarlierRun, known

INSTANT = 1e15
# 1000 files, 1 MB each; one reader takes 20 s, all transfers together 10 s, local reading 2 s.
WORK = Workload(files=1000, size_bytes=10**9, epochs=1, epoch_compute_s=15.0, startup_s=3.0, readers=2)
RATES = Rates(source_bytes_per_s=1e8, reader_bytes_per_s=5e7, local_bytes_per_s=5e8)


def totals(found: Forecast) -> dict[str, float]:
    return {name: round(mode.total_s, 6) for name, mode in found.modes.items()}


def test_readers_ahead_one_epoch():
    found = forecast(WORK, RATES)
    # direct: 3 + max(15, two readers 12.5); upfront: 10 + 3 + 15; runtime: max(3 + 15, 10)
    assert totals(found) == {"direct": 18, "upfront": 28, "runtime": 18}
    assert found.assumptions == ()


def test_no_readers_ahead_one_epoch():
    found = forecast(replace(WORK, readers=0), RATES)
    # direct: 3 + 15 + 20; upfront: 10 + 3 + 15 + 2; runtime: max(3 + 15 + 2, 10)
    assert totals(found) == {"direct": 38, "upfront": 30, "runtime": 20}
    assert found.modes["direct"].formula == "startup 3 s + 1 x (compute 15 s + source 20 s)"


def test_epochs_with_a_slow_source():
    found = forecast(replace(WORK, epochs=10, epoch_compute_s=4.0), RATES)
    # One reader is at the shared part for 10 of 20 s, so another finds it busy half of the time, and a pass of both
    # takes (10 + 10 x 1.5) / 2 s.
    # direct: 3 + 10 x max(4, 12.5); upfront: 10 + 3 + 10 x 4; runtime: max(3 + 4, 10) + 9 x 4
    assert totals(found) == {"direct": 128, "upfront": 53, "runtime": 46}
    mode = found.modes["runtime"]
    assert (mode.first_epoch_s, mode.later_epoch_s) == (10, 4)
    assert any(item.startswith("page cache") for item in found.assumptions)


SECONDS = st.just(0.0) | st.floats(1e-6, 1e6)


@given(SECONDS, SECONDS, st.integers(1, 64))
def test_readers_queue(own_s: float, shared_s: float, readers: int):
    """One alone waits for nobody, many get what the narrowest lets through; each one more helps, or changes nothing."""
    alone_s = own_s + shared_s
    took_s = queued_s(alone_s, shared_s, readers)
    slack = 1e-9 * alone_s
    assert queued_s(alone_s, shared_s, 1) == pytest.approx(alone_s)
    assert max(alone_s / readers, shared_s) - slack <= took_s <= alone_s + slack
    assert queued_s(alone_s, shared_s, readers + 1) <= took_s + slack


def test_what_does_not_fit_is_read_from_the_source_each_epoch():
    found = forecast(replace(WORK, readers=0, epochs=2), RATES, Conditions(fit=0.5))
    # An epoch: 15 + 1 local + 10 source.
    assert found.modes["upfront"].total_s == 5 + 3 + 2 * 26
    assert found.modes["runtime"].total_s == 3 + 26 + 26


def test_rate_limit_and_scan_delay_the_copy():
    found = forecast(WORK, RATES, Conditions(begin_s=2.0, max_rate_bytes_per_s=2e7))
    assert found.modes["upfront"].total_s == 2 + 50 + 3 + 15
    assert found.modes["runtime"].total_s == 52


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_unknown_order_lies_between_known_order_and_copying_first(ratio: float):
    work = Workload(1000, 10**6, epochs=1, epoch_compute_s=1.0, readers=0)
    rates = Rates(ratio * 1e6, ratio * 1e6, INSTANT)
    known = forecast(work, rates).modes
    blind = forecast(work, rates, Conditions(order_known=False)).modes
    assert known["runtime"].total_s == pytest.approx(max(1.0, 1 / ratio))
    assert known["runtime"].total_s < blind["runtime"].total_s <= blind["upfront"].total_s
    assert blind["runtime"].total_s <= blind["direct"].total_s
    assert blind["direct"] == known["direct"]


SECONDS = st.floats(0, 1e5)
RATE = st.floats(1e3, 1e12)


@given(
    work=st.builds(
        Workload, st.integers(1, 10**7), st.integers(0, 10**15), st.integers(1, 1000), SECONDS, SECONDS,
        st.integers(0, 64),
    ),
    rates=st.builds(Rates, RATE, RATE, RATE),
    share=st.floats(0, 1),
    known=st.booleans(),
    begin=st.floats(0, 100),
)  # fmt: skip
def test_for_any_numbers(work: Workload, rates: Rates, share: float, known: bool, begin: float):
    found = forecast(work, rates, Conditions(fit=share, order_known=known, begin_s=begin))
    modes = found.modes
    for mode in modes.values():
        assert mode.total_s >= mode.first_epoch_s >= 0
        assert mode.total_s >= (work.startup_s or 0) + (work.epochs or 1) * (work.epoch_compute_s or 0) - 1e-6
        assert mode.formula
    if known:
        assert modes["runtime"].total_s <= modes["upfront"].total_s * (1 + 1e-9) + 1e-9


# ---- what is known


def test_what_is_not_known_is_named():
    assert missing_figures(Workload(files=10, size_bytes=10), Rates()) == (*OF_WORKLOAD, *OF_RATES)
    assert missing_figures(WORK, RATES) == ()


def test_options_come_before_an_earlier_run(make_tree: Callable[..., Path]):
    root = make_tree(files=3)
    manifest = scan(resolve([os.fspath(root)], root)).manifest
    earlier = EarlierRun(
        "run 1",
        {"epochs": 7, "epoch_compute_s": 60.0, "startup_s": 1.0, "readers": 4, "local_bytes_per_s": 2e9},
    )
    work, rates = known({"readers": 0, "source_bytes_per_s": 1e9}, earlier, manifest)
    assert (work.epochs, work.epoch_compute_s, work.startup_s, work.readers) == (7, 60.0, 1.0, 0)
    assert rates == Rates(
        1e9, None, 2e9, sources={"source_bytes_per_s": "option --source-rate", "local_bytes_per_s": "run 1"}
    )
    assert work.sources["readers"] == "option --readers"
    assert known({}, None, manifest) == (Workload(3, manifest.total_bytes), Rates())
