"""Contention: known schedules of load come back as periods, and nothing else does."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordcases import START, composed, node_part, run_part
from sourcesim import MB, Source, fluid, samples_of

from hpcstage.record.parts.rows import Sample
from hpcstage.record.schema import Contention, Record

Schedule = list[tuple[float, float, float]]
SIZES: dict[str, Callable[[int], float]] = {
    "small files": lambda _: 1e5,
    "large files": lambda _: 64e6,
    "mixed sizes": lambda k: (2e4, 1e5, 5e5, 3e6)[k * 7919 % 4],
    "first small, then large": lambda k: 5e4 if k < 12_000 else 3e6,
    "long tail": lambda k: min(3e8, random.Random(k).lognormvariate(12, 1.5)),
}


def found(samples: list[Sample]) -> Contention:
    """What is said of one node, whose clock is that of the run."""
    node = node_part(samples=samples, processes=[], started_unix_s=START)
    return Record.from_json(composed(run_part(child_ended_s=1e9, ended_s=1e9), [node])).contention


def matches(result: Contention, loads: Schedule) -> bool:
    pairs = list(zip(result.periods, loads, strict=False))
    return len(result.periods) == len(loads) and all(
        abs(p.start_s - a) <= 2 and abs(p.end_s - b) <= 2 and abs(p.loss - loss) <= 0.15 * loss
        for p, (a, b, loss) in pairs
    )


def test_no_false_alarm_in_hundreds_of_quiet_runs() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        seconds = rng.choice([8, 20, 60, 200, 600])
        quiet = fluid(seconds, [], level=10 ** rng.uniform(5, 9), noise=0.1, rng=rng)
        assert found(quiet).periods == (), (seed, seconds)


def schedule(rng: random.Random, seconds: int) -> Schedule:
    loads: Schedule = []
    at_s = rng.uniform(4, 9)
    loss = rng.uniform(0.45, 0.9)
    while at_s < seconds - 16:
        length_s = rng.uniform(6, 15)
        loads.append((at_s, at_s + length_s, loss))
        at_s += length_s + rng.uniform(8, 20)
    return loads


def test_nearly_all_random_schedules_come_back() -> None:
    failures = []
    for seed in range(300):
        rng = random.Random(seed)
        seconds = rng.choice([40, 60, 120, 240])
        loads = schedule(rng, seconds)
        result = found(fluid(seconds, loads, level=10 ** rng.uniform(5, 9), noise=0.08, rng=rng))
        if not matches(result, loads):
            failures.append((seed, loads, result.periods))
    assert len(failures) <= 3, failures[0]


@pytest.mark.parametrize("latency_s", [0.002, 0.02])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_quiet_queueing_source(sizes: Callable[[int], float], latency_s: float) -> None:
    source = Source(open_s=latency_s, read_s=latency_s / 4)
    result = found(samples_of(source, sizes, 50, lambda _: 0, noise=0.1))
    assert result.periods == ()


@pytest.mark.parametrize("latency_s", [0.002, 0.02])
@pytest.mark.parametrize("name", ["small files", "large files", "mixed sizes", "long tail"])
def test_a_queueing_source_under_load(name: str, latency_s: float) -> None:
    source = Source(open_s=latency_s, read_s=latency_s / 4)

    def competitors(now_s: float) -> int:
        return 24 if 12.3 <= now_s < 24.8 or 36 <= now_s < 44.5 else 0

    quiet = samples_of(source, SIZES[name], 55, lambda _: 0, noise=0.1)
    loaded = samples_of(source, SIZES[name], 55, competitors, noise=0.1)
    lost = 1 - sum(s.copied_bytes for s in loaded[14:24]) / sum(s.copied_bytes for s in quiet[14:24])
    result = found(loaded)
    assert matches(result, [(12.3, 24.8, lost), (36, 44.5, lost)]), result
    assert result.best_bytes_per_s == pytest.approx(sum(s.copied_bytes for s in quiet[5:]) / 50, rel=0.1)


def test_first_small_then_large_under_load_is_not_taken_for_more() -> None:
    source = Source(open_s=0.02, read_s=0.005)
    loaded = samples_of(source, SIZES["first small, then large"], 60, lambda t: 24 if 45 <= t < 53 else 0, noise=0.1)
    result = found(loaded)
    assert [(round(p.start_s), round(p.end_s)) for p in result.periods] == [(45, 53)]


def steady(seconds: int, **changes: float) -> list[Sample]:
    rng = random.Random(3)
    values = {"copied_bytes": 100 * MB, "copied_files": 1000, "busy": 16.0} | changes
    return [
        Sample(float(s), 1.0, **(values | {"copied_bytes": int(values["copied_bytes"] * rng.gauss(1, 0.05))}))
        for s in range(seconds)
    ]


def test_intervals_that_we_held_back_ourselves_do_not_count() -> None:
    samples = steady(40)
    for sample in samples[15:25]:
        sample.limited, sample.copied_bytes = True, sample.copied_bytes // 5
    assert found(samples).periods == ()


def test_few_in_flight_are_judged_by_what_each_gets() -> None:
    samples = steady(40)
    for sample in samples[30:]:
        sample.busy, sample.copied_bytes = 2.0, sample.copied_bytes // 8
    assert found(samples).periods == ()


def test_loss_while_fewer_transfers_went_on_than_later() -> None:
    """The copiers begin with the transfers that the source rewards, and try more when it passes more."""
    loads = [(6.0, 13.0, 0.6), (22.0, 32.0, 0.6)]

    def level(at_s: float) -> float:
        return 0.4 if any(begin <= at_s < end for begin, end, _ in loads) else 1.0

    samples = fine(level, 40, random.Random(5), noise=0.1, files_s=192)
    for sample in samples:
        sample.busy = 15.998 if sample.start_s < 13 else 32.0
    assert matches(found(samples), loads)


def test_a_source_that_hangs() -> None:
    samples = steady(40)
    for sample in samples[15:25]:
        sample.copied_bytes = sample.copied_files = 0
    periods = found(samples).periods
    assert [(p.start_s, p.end_s) for p in periods] == [(15, 25)]
    assert periods[0].loss == pytest.approx(1)


def test_a_short_burst_at_the_start_is_not_the_best_level() -> None:
    samples = steady(60)
    for sample in samples[:3]:
        sample.copied_bytes *= 8
    assert found(samples).periods == ()


def test_a_long_run_is_fast_and_finds_its_load() -> None:
    rng = random.Random(1)
    samples = fluid(20_000, [(9_000, 9_060, 0.6)], level=1e8, noise=0.1, rng=rng)
    assert matches(found(samples), [(9_000, 9_060, 0.6)])


def test_too_little_to_say_anything() -> None:
    section = composed(run_part(), [node_part(samples=steady(3))])["contention"]
    assert section["best_bytes_per_s"] is None
    assert section["typical_bytes_per_s"] is None
    assert section["periods"] == []
    assert composed(run_part(), [])["contention"]["latency_ms"]["open"]["p50"] is None


def direct(seconds: int, factor: Callable[[int], float], rate: float = 50 * MB) -> list[Sample]:
    """One reader that is inside reads for 60 % of its time."""
    rng = random.Random(2)
    samples = []
    for second in range(seconds):
        got = int(rate * 0.6 * factor(second) * rng.gauss(1, 0.08))
        samples.append(
            Sample(
                float(second), 1.0, shim_opens=got // 10**5, shim_open_ns=60_000_000, shim_bytes=got,
                shim_read_ns=540_000_000,
            )
        )  # fmt: skip
    return samples


def test_mode_direct_is_judged_by_the_programs_own_reads() -> None:
    samples = direct(60, lambda s: 0.4 if 20 <= s < 35 else 1.0)
    section = composed(run_part(), [node_part(mode="direct", samples=samples)])["contention"]
    (period,) = section["periods"]
    assert period["start_s"] == pytest.approx(20.1, abs=0.6)
    assert period["end_s"] == pytest.approx(35.1, abs=0.6)
    assert period["loss"] == pytest.approx(0.6, abs=0.09)


def test_reads_from_the_page_cache_say_nothing_about_the_source() -> None:
    samples = direct(60, lambda s: 1.0 if s < 30 else 100.0)
    section = composed(run_part(), [node_part(mode="direct", samples=samples)])["contention"]
    assert section["periods"] == []
    assert section["best_bytes_per_s"] == pytest.approx(50 * MB, rel=0.1)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.builds(
            Sample,
            start_s=st.floats(0, 1e5),
            length_s=st.floats(0.001, 10),
            copied_bytes=st.integers(0, 10**12),
            copied_files=st.integers(0, 10**6),
            busy=st.floats(0, 100),
        ),
        max_size=40,
    )
)
def test_any_samples_give_sound_periods(samples: list[Sample]) -> None:
    samples.sort(key=lambda s: s.start_s)
    for period in found(samples).periods:
        assert period.end_s > period.start_s
        assert 0.2 < period.loss <= 1


def fine(
    level: Callable[[float], float], seconds: float, rng: random.Random, *, noise: float, files_s: float
) -> list[Sample]:
    """Quarters of a second of whole files; `level` is a share of the best."""
    made, rest = [], 0.0
    for quarter in range(int(4 * seconds)):
        share = sum(level((quarter + step / 8) / 4) for step in range(8)) / 8
        rest += files_s / 4 * share * max(0.05, rng.gauss(1, noise))
        files = int(rest)
        rest -= files
        made.append(Sample(quarter / 4, 0.25, copied_bytes=files * 125_000, copied_files=files, busy=32.0))
    return made


def verdict(samples: list[Sample]) -> str:
    return str(found(samples).verdict)


@settings(deadline=None, max_examples=300)
@given(
    low_s=st.floats(1.0, 9.0),
    high_s=st.floats(1.0, 9.0),
    depth=st.floats(0.5, 0.95),
    phase=st.floats(0, 1),
    cycles=st.integers(1, 6),
    noise=st.sampled_from([0.0, 0.05, 0.1, 0.15]),
    files_s=st.sampled_from([20, 160, 2000]),
    seed=st.integers(0, 9),
)
def test_what_goes_up_and_down_is_never_called_free_of_contention(
    low_s: float, high_s: float, depth: float, phase: float, cycles: int, noise: float, files_s: int, seed: int
) -> None:
    period_s = low_s + high_s

    def level(at_s: float) -> float:
        return 1 - depth if (at_s + phase * period_s) % period_s < low_s else 1.0

    samples = fine(level, 2 + cycles * period_s, random.Random(seed), noise=noise, files_s=files_s)
    assert verdict(samples) != "none"


PATTERNS: dict[str, Callable[[float], float]] = {
    "4 s each, a tenth": lambda t: 1.0 if t % 8 < 4 else 0.1,
    "a second each, half": lambda t: 1.0 if t % 2 < 1 else 0.5,
    "a second of five": lambda t: 0.3 if t % 5 < 1 else 1.0,
    "mostly slow": lambda t: 1.0 if t % 6 < 2 else 0.25,
    "once, for a second": lambda t: 0.2 if 9 <= t < 10.2 else 1.0,
    "a ramp down": lambda t: 1 - 0.7 * t / 20,
    "a ramp up": lambda t: 0.3 + 0.7 * t / 20,
}


@pytest.mark.parametrize("level", PATTERNS.values(), ids=PATTERNS)
def test_patterns_are_found(level: Callable[[float], float]) -> None:
    said = [verdict(fine(level, 20, random.Random(seed), noise=0.05, files_s=160)) for seed in range(10)]
    assert said.count("periods") >= 9
    assert "none" not in said


def test_a_steady_source_is_said_to_be_steady() -> None:
    quiet = [verdict(fine(lambda _: 1.0, 20, random.Random(seed), noise=0.05, files_s=160)) for seed in range(50)]
    assert quiet.count("none") >= 48
    assert "periods" not in quiet


def test_of_a_short_or_noisy_look_nothing_is_said() -> None:
    for seed in range(20):
        rough = fine(lambda _: 1.0, 20, random.Random(seed), noise=0.6, files_s=30)
        assert verdict(rough) != "none"
    assert verdict(fine(lambda _: 1.0, 2, random.Random(1), noise=0.05, files_s=160)) == "unknown"


def test_of_a_rough_source_there_is_hardly_ever_a_false_period() -> None:
    rough = [
        fine(lambda _: 1.0, 50, random.Random(seed), noise=0.3, files_s=20 + 140 * (seed % 2)) for seed in range(40)
    ]
    assert sum(bool(found(samples).periods) for samples in rough) <= 1


def test_a_period_does_not_reach_over_a_time_in_which_nothing_was_seen() -> None:
    samples = fine(lambda t: 0.3 if 15 <= t < 65 else 1.0, 80, random.Random(1), noise=0.05, files_s=160)
    for sample in samples[80:240]:  # 20 s to 60 s
        sample.busy, sample.copied_bytes = 0.0, 0
    said = [(round(p.start_s), round(p.end_s)) for p in found(samples).periods]
    assert said == [(15, 20), (60, 65)]
