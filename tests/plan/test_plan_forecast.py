"""The cost model against numbers worked out by hand, and what must hold for any numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.plan.forecast.modes import forecast
from hpcstage.plan.forecast.terms import Conditions, queued_s
from hpcstage.plan.types import Forecast, Rates, Workload
from hpcstage.preview.program import Earlier, KnownProgram, known, of_arguments
from hpcstage.record.workload import Measured

INSTANT = 1e15
# 1000 files, 1 MB each; one reader takes 20 s, all transfers together 10 s, local reading 2 s.
WORK = Workload(files=1000, size_bytes=10**9, epochs=1, epoch_compute_s=15.0, startup_s=3.0, readers=2)
RATES = Rates(
    source_bytes_per_s=1e8, source_files_per_s=1e6, reader_file_s=0.010, reader_bytes_per_s=1e8,
    local_bytes_per_s=1e9, local_file_s=0.001,
)  # fmt: skip


def totals(found: Forecast) -> dict[str, float]:
    return {name: round(mode.total_s, 6) for name, mode in found.modes.items()}


def test_readers_ahead_one_epoch():
    found = forecast(WORK, RATES)
    # direct: 3 + max(15, two readers 12.5); upfront: 10 + 3 + 15; runtime: max(3 + 15, 10)
    assert totals(found) == {"direct": 18, "upfront": 28, "runtime": 18, "auto": 18}
    assert found.choice == "direct"
    assert "each file is read once" in found.why
    assert found.assumptions == ()


def test_no_readers_ahead_one_epoch():
    found = forecast(replace(WORK, readers=0), RATES)
    # direct: 3 + 15 + 20; upfront: 10 + 3 + 15 + 2; runtime: max(3 + 15 + 2, 10)
    assert totals(found) == {"direct": 38, "upfront": 30, "runtime": 20, "auto": 20}
    assert found.choice == "runtime"
    assert "18 s less than direct and 10 s less than upfront" in found.why
    assert found.modes["direct"].formula == "startup 3 s + 1 x (compute 15 s + source 20 s)"


def test_epochs_with_a_slow_source():
    found = forecast(replace(WORK, epochs=10, epoch_compute_s=4.0), RATES)
    # One reader is at the shared part for 10 of 20 s, so another finds it busy half of the time, and a pass of both
    # takes (10 + 10 x 1.5) / 2 s.
    # direct: 3 + 10 x max(4, 12.5); upfront: 10 + 3 + 10 x 4; runtime: max(3 + 4, 10) + 9 x 4
    assert totals(found) == {"direct": 128, "upfront": 53, "runtime": 46, "auto": 46}
    mode = found.modes["runtime"]
    assert (mode.first_epoch_s, mode.later_epoch_s) == (10, 4)
    assert any(item.startswith("page cache") for item in found.assumptions)


SECONDS = st.just(0.0) | st.floats(1e-6, 1e6)


@given(SECONDS, SECONDS, SECONDS, st.integers(1, 64))
def test_readers_queue(own_s: float, first_s: float, second_s: float, readers: int):
    """One alone waits for nobody, many get what the narrowest lets through; each one more helps, or changes nothing."""
    shared_s = (first_s, second_s)
    alone_s = own_s + sum(shared_s)
    took_s = queued_s(alone_s, shared_s, readers)
    slack = 1e-9 * alone_s
    assert queued_s(alone_s, shared_s, 1) == pytest.approx(alone_s)
    assert max(alone_s / readers, *shared_s) - slack <= took_s <= alone_s + slack
    assert queued_s(alone_s, shared_s, readers + 1) <= took_s + slack


def test_two_readers_at_a_busy_source():
    """As measured: all transfers together 24.8 s, two readers 31.8 to 33.5 s, one reader about 53 s (what a program
    that does not read ahead takes, less its computing and its start)."""
    assert queued_s(53.0, (24.8,), 2) == pytest.approx(32.3, abs=0.1)


def test_many_readers_do_not_exceed_the_source():
    few = forecast(replace(WORK, epoch_compute_s=0.0, readers=1), RATES)
    many = forecast(replace(WORK, epoch_compute_s=0.0, readers=1000), RATES)
    assert few.modes["direct"].total_s == 23
    assert many.modes["direct"].total_s == 13


def test_what_does_not_fit_is_read_from_the_source_each_epoch():
    found = forecast(replace(WORK, readers=0, epochs=2), RATES, Conditions(fit=0.5))
    # An epoch: 15 + 1 local + 10 source.
    assert found.modes["upfront"].total_s == 5 + 3 + 2 * 26
    assert found.modes["runtime"].total_s == 3 + 26 + 26
    nothing = forecast(WORK, RATES, Conditions(fit=0.0))
    assert (nothing.choice, "budget" in nothing.why) == ("direct", True)


def test_rate_limit_and_scan_delay_the_copy():
    found = forecast(WORK, RATES, Conditions(begin_s=2.0, max_rate_bytes_per_s=2e7))
    assert found.modes["upfront"].total_s == 2 + 50 + 3 + 15
    assert found.modes["runtime"].total_s == 52


def test_copy_slower_than_the_source():
    found = forecast(WORK, replace(RATES, copy_bytes_per_s=2.5e7))
    assert found.modes["upfront"].total_s == 40 + 3 + 15
    assert found.modes["direct"].total_s == 18


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_unknown_order_lies_between_known_order_and_copying_first(ratio: float):
    work = Workload(1000, 10**6, epochs=1, epoch_compute_s=1.0, readers=0)
    rates = Rates(ratio * 1e6, None, 0.0, ratio * 1e6, INSTANT, 0.0)
    known = forecast(work, rates).modes
    blind = forecast(work, rates, Conditions(order_known=False)).modes
    assert known["runtime"].total_s == pytest.approx(max(1.0, 1 / ratio))
    assert known["runtime"].total_s < blind["runtime"].total_s < blind["upfront"].total_s
    assert blind["direct"] == known["direct"]


def test_first_batch():
    modes = forecast(WORK, RATES).modes
    assert modes["upfront"].first_batch_s == pytest.approx(13.002)
    assert modes["direct"].first_batch_s == pytest.approx(3.020)
    assert modes["runtime"].first_batch_s == pytest.approx(3.020)


def test_nodes_share_the_source():
    one = forecast(WORK, RATES).modes
    four = forecast(replace(WORK, epoch_compute_s=15.0 / 4), RATES, Conditions(nodes=4)).modes
    # Each reads a quarter at a quarter of the rate: the source's time stays, compute shrinks, upfront copies all.
    assert one["direct"].total_s == 18
    assert four["direct"].total_s == 3 + 10
    assert four["runtime"].total_s == 10
    assert four["upfront"].total_s == pytest.approx(40 + 3 + 3.75)


def test_unknown_numbers_are_assumed_and_listed():
    found = forecast(Workload(files=10, size_bytes=10), Rates(None, None, None, None, None, None))
    text = " ".join(found.assumptions)
    for word in ("epochs: 10", "compute:", "readers: 0", "source:", "local disk:", "one reader"):
        assert word in text
    assert all(mode.total_s > 0 for mode in found.modes.values())


def test_empty_files_need_no_bandwidth():
    rates = Rates(None, 1000.0, 0.01, None, None, 0.001)
    found = forecast(Workload(1000, 0, epochs=1, epoch_compute_s=0.0, readers=0), rates)
    assert found.modes["direct"].total_s == pytest.approx(10)
    assert found.modes["upfront"].total_s == pytest.approx(2)


SECONDS = st.floats(0, 1e5)
RATE = st.floats(1e3, 1e12)


@given(
    work=st.builds(
        Workload, st.integers(1, 10**7), st.integers(0, 10**15), st.integers(1, 1000), SECONDS, SECONDS,
        st.integers(0, 64),
    ),
    rates=st.builds(Rates, RATE, RATE, st.floats(0, 1), RATE, RATE, st.floats(0, 1)),
    share=st.floats(0, 1),
    known=st.booleans(),
    begin=st.floats(0, 100),
)  # fmt: skip
def test_for_any_numbers(work: Workload, rates: Rates, share: float, known: bool, begin: float):
    found = forecast(work, rates, Conditions(fit=share, order_known=known, begin_s=begin))
    modes = found.modes
    for mode in modes.values():
        assert mode.total_s >= mode.first_epoch_s >= 0
        assert mode.total_s >= work.startup_s + (work.epochs or 1) * (work.epoch_compute_s or 0) - 1e-6
        assert mode.formula
    assert modes["auto"].total_s == modes[found.choice].total_s
    best = min(mode.total_s for mode in modes.values())
    if share > 0:
        assert modes["auto"].total_s <= best * 1.03 + 1e-9
    if known:
        assert modes["runtime"].total_s <= modes["upfront"].total_s * (1 + 1e-9) + 1e-9
    assert found.why


# ---- what the command's own arguments tell


@pytest.mark.parametrize(
    ("command", "values"),
    [
        (["python", "train.py", "--epochs", "90", "--workers=8"], {"epochs": 90, "readers": 8}),
        (["python", "train.py", "trainer.max_epochs=3", "data.num_workers=0"], {"epochs": 3, "readers": 0}),
        (["python", "train.py", "--num-epochs", "2", "--num_train_epochs", "5"], {"epochs": 5}),
        (["python", "train.py", "--epochs", "-1", "--workers", "many", "--epochs-dir", "7", "epochs", "9"], {}),
        (["python", "train.py", "--epochs"], {}),
        ([], {}),
    ],
)
def test_the_commands_arguments_tell_epochs_and_readers(command: list[str], values: dict[str, int]):
    found = of_arguments(command)
    assert {name: getattr(found, name) for name in found.sources} == values
    assert (found.epochs, found.readers) == (values.get("epochs"), values.get("readers"))


def test_options_come_before_the_commands_arguments_and_these_before_an_earlier_run():
    earlier = Earlier(Measured(7, 60.0, 1.0, 4, "run 1"), None)
    said = KnownProgram(readers=2, sources={"readers": "option --readers"})
    sources = {"epochs": "the command's --epochs 3", "readers": "option --readers"}
    sources |= dict.fromkeys(("epoch_compute_s", "startup_s"), "run 1")
    found = known(said, earlier, ["t.py", "--epochs", "3", "--workers", "9"])
    assert found == KnownProgram(3, 60.0, 2, 1.0, sources)
