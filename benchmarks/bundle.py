"""Paper 002: what reading in bundles saves of a cache's misses, and what it costs in accuracy.

`figure 4`: a simulated cache in order of last use, with file sizes like those of Food-101 and ImageNet-100, and its
closed form. `page cache`: the machine's own, limited by cgroup, over emulated storage; `plain` are files read as
programs do, `read_file` those read with hpcstage.torch. `figure 5`: a small network trained with each bundle_ratio, on
a dataset in order of class.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import RandomSampler

from benchmarks.bundled import accuracy, limit, lru, pagecache
from benchmarks.files import Place, make_files, place, total_bytes
from benchmarks.harness import Arm, Bench, Figure, Row, at_least, at_most, less_by, options_of, parser
from hpcstage.emulator import unavailable
from hpcstage.torch import BundleRandomSampler

SHARES = tuple(percent / 100 for percent in range(10, 100, 10))
QUICK_SHARES = (0.5,)
RATIO = 0.1
RATIOS = (0.5, 0.1, 0.05, 0.01)
LEAST_MEAN, LEAST_BEST, LEAST_TIME = 16.0, 33.0, 24.0
MOST_CLOSED_FORM = 1.0
WITHIN_NOISE = 0.05
"""The smallest ratio of which the paper says that it costs no accuracy."""
MOST_NOISE = 1.0
"""In points: with more, nothing would be seen."""
RANDOM, BUNDLES = "random", "bundles"
PLAIN, READ_FILE = "plain", "read_file"


def orders(arm: str, samples: int, epochs: int, seed: int = 0) -> list[list[int]]:
    """Epochs of one of the samplers."""
    if arm == RANDOM:
        sampler: Iterable[int] = RandomSampler(range(samples), generator=torch.Generator().manual_seed(seed))
    else:
        sampler = BundleRandomSampler(range(samples), RATIO, seed=seed)
    return [list(sampler) for _ in range(epochs)]


# ---- figure 4, simulated


def datasets(quick: bool) -> list[lru.Images]:
    """Their numbers of files and mean sizes are those of the paper's."""
    parts = 10 if quick else 1
    return [
        lru.Images("Food-101", 101_000 // parts, 50e3, 0.35),
        lru.Images("ImageNet-100", 126_689 // parts, 110e3, 0.6),
    ]


def shares(quick: bool) -> tuple[float, ...]:
    """Sizes of the cache."""
    return QUICK_SHARES if quick else SHARES


def simulate(images: lru.Images, arm: str, sizes_of_cache: Sequence[float]) -> dict[str, Any]:
    """Miss rates in steady state, by the size of the cache."""
    sizes, epochs = images.sizes(), orders(arm, images.files, 6)
    rates = {share: lru.miss_rates(epochs, sizes, share * sum(sizes)) for share in sizes_of_cache}
    return {"misses": {f"{share:g}": statistics.fmean(found[2:]) for share, found in rates.items()}}


def simulated(bench: Bench, images: lru.Images, arm: str, share: float) -> float | None:
    """One point of figure 4."""
    found = bench.select(f"figure 4, {images.name}", arm)
    return found[0]["misses"].get(f"{share:g}") if found else None


def saved_figures(name: str, saved: Sequence[float | None]) -> list[Figure]:
    """The two that the paper names; unknown if one of the points is."""
    known = [value for value in saved if value is not None]
    whole = known if known and len(known) == len(saved) else None
    return [
        at_least(
            f"{name}: fewer misses than random, mean", statistics.fmean(whole) if whole else None, LEAST_MEAN, "%"
        ),
        at_least(f"{name}: fewer misses than random, best", max(whole) if whole else None, LEAST_BEST, "%"),
    ]


def figure_4(bench: Bench, images: lru.Images) -> list[Figure]:
    """Table and figures of one dataset."""
    rows: list[Row] = []
    saved, errors = [], []
    for share in shares(bench.options.quick):
        random, bundles = (simulated(bench, images, arm, share) for arm in (RANDOM, BUNDLES))
        forms = lru.random_misses(share), lru.bundle_misses(share, RATIO)
        saved.append(less_by(bundles, random))
        errors += [100 * abs(v - f) for v, f in zip((random, bundles), forms, strict=True) if v is not None]
        rows.append([f"{share:.0%}", random, forms[0], bundles, forms[1], saved[-1]])
    columns = ["cache", RANDOM, "closed form", BUNDLES, "closed form", "fewer %"]
    bench.sheet(f"Figure 4, {images.name}: miss rate of a cache in order of last use", columns, rows)
    complete = len(errors) == 2 * len(saved)
    off = at_most(
        f"{images.name}: off the closed form by", max(errors) if complete else None, MOST_CLOSED_FORM, "points"
    )
    return [*saved_figures(images.name, saved), off]


# ---- the real page cache


def measure_pages(bench: Bench, where: Place) -> str | None:
    """Both orders, both ways of reading, alternated. Gives the reason where nothing can be measured."""
    reason = limit.unavailable() or unavailable()
    if reason:
        return f"Not measured: {reason}."
    cells = {f"page cache {share:.0%}": share for share in shares(bench.options.quick)}
    wanted = {name: share for name, share in cells.items() if bench.options.wants(name)}
    source, count = where.memory / "images", 200 if bench.options.quick else 1000
    names = sorted(make_files(source, count, 110_000, spread=0.9))
    shelf = pagecache.Shelf(source, names, total_bytes(source))
    epochs = pagecache.WARM_EPOCHS + (2 if bench.options.quick else 4)

    def arm(order: str, how: str, share: float) -> dict[str, Any]:
        seed = len(bench.samples)
        return pagecache.measure(shelf, orders(order, count, epochs, seed), share, where.disk, how)

    for name, share in wanted.items():
        arms: Mapping[str, Arm] = {
            f"{order}, {how}": partial(arm, order, how, share)
            for order in (RANDOM, BUNDLES)
            for how in (PLAIN, READ_FILE)
        }
        bench.measure(name, arms, bench.options.rounds(5))
    return None


def page_figures(bench: Bench, reason: str | None) -> list[Figure]:
    """Table and figures; the base is what a program has that changes nothing."""
    rows: list[Row] = []
    fewer: list[float | None] = []
    faster: list[float | None] = []
    base, ours = f"{RANDOM}, {PLAIN}", f"{BUNDLES}, {READ_FILE}"
    arms = (base, f"{RANDOM}, {READ_FILE}", f"{BUNDLES}, {PLAIN}", ours)
    for share in shares(bench.options.quick):
        cell = f"page cache {share:.0%}"
        misses = [bench.median(cell, arm, "misses") for arm in arms]
        times = [bench.median(cell, arm) for arm in (base, ours)]
        fewer.append(less_by(misses[3], misses[0]))
        faster.append(less_by(times[1], times[0]))
        alone = less_by(misses[2], misses[0])
        held = bench.median(cell, ours, "held")
        rows.append([f"{share:.0%}", held, *misses, alone, fewer[-1], *times, faster[-1]])
    columns = ["cache", "held", *arms, "fewer %, plain", "fewer %", f"s, {base}", f"s, {ours}", "less %"]
    note = (
        "Misses: bytes that left the storage / bytes of the dataset, per epoch; held: page cache in use / dataset. All "
        f"percents are against '{base}'; 'fewer %, plain' is the sampler without read_file. {reason or ''}"
    )
    bench.sheet("The machine's page cache under a memory limit", columns, rows, note)
    known = [value for value in faster if value is not None]
    best = max(known) if len(known) == len(faster) else None
    return [*saved_figures("page cache", fewer), at_least("page cache: less time, best", best, LEAST_TIME, "%")]


# ---- figure 5


def measure_accuracy(bench: Bench) -> None:
    """Each seed with all samplers, one after the other."""
    quick = bench.options.quick
    count, tested, epochs = (320, 320, 1) if quick else (4000, accuracy.TEST_IMAGES, 6)
    data, test = accuracy.images(count, 1), accuracy.images(tested, 2)

    def arm(sampler: Callable[[int], Iterable[int]], seed: int) -> dict[str, Any]:
        return {"accuracy": accuracy.train(data, test, sampler(seed), epochs, seed)}

    def bundled(ratio: float, seed: int) -> Iterable[int]:
        return BundleRandomSampler(range(count), ratio, seed=seed)

    samplers: dict[str, Callable[[int], Iterable[int]]] = {
        RANDOM: lambda seed: RandomSampler(range(count), generator=torch.Generator().manual_seed(seed)),
        **{f"{ratio:g}": partial(bundled, ratio) for ratio in RATIOS},
    }
    for seed in range(bench.options.rounds(5, quick=2)):
        cell = f"figure 5, seed {seed}"
        if bench.options.wants(cell):
            bench.measure(cell, {name: partial(arm, sampler, seed) for name, sampler in samplers.items()}, 1)


def accuracies(bench: Bench, arm: str) -> list[float]:
    """By seed."""
    seeds = range(bench.options.rounds(5, quick=2))
    return [sample["accuracy"] for seed in seeds for sample in bench.select(f"figure 5, seed {seed}", arm)]


def figure_5(bench: Bench) -> list[Figure]:
    """Table and figures. A loss that is less than its noise is none."""
    base = accuracies(bench, RANDOM)
    rows: list[Row] = [[RANDOM, 100 * statistics.fmean(base) if base else None, None, None]]
    made = []
    for ratio in RATIOS:
        ours = accuracies(bench, f"{ratio:g}")
        loss, noise = accuracy.loss_and_noise(base, ours) or (None, None)
        rows.append([f"{ratio:g}", 100 * statistics.fmean(ours) if ours else None, loss, noise])
        if ratio >= WITHIN_NOISE:
            name = f"figure 5, {ratio:g}: accuracy lost"
            is_within = loss is not None and noise is not None and loss <= noise
            made.append(Figure(name, "within noise", loss, is_within, "points"))
            made.append(at_most(f"figure 5, {ratio:g}: noise", noise, MOST_NOISE, "points"))
    note = "Per seed against the random order; noise: half the 95 % interval of the mean loss. A loss below it is none."
    columns = ["bundle_ratio", "accuracy %", "lost, points", "noise, points"]
    bench.sheet("Figure 5: accuracy by bundle_ratio", columns, rows, note)
    return made


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    bench = Bench("bundle", options, {"cpus": os.cpu_count(), "ratio": RATIO})
    chosen = datasets(options.quick)
    for images in chosen:
        cell = f"figure 4, {images.name}"
        if options.wants(cell):
            sizes = shares(options.quick)
            bench.measure(cell, {arm: partial(simulate, images, arm, sizes) for arm in (RANDOM, BUNDLES)}, 1)
    with place(options) as where:
        reason = measure_pages(bench, where)
    measure_accuracy(bench)
    figures = [figure for images in chosen for figure in figure_4(bench, images)]
    return bench.finish([*figures, *page_figures(bench, reason), *figure_5(bench)])


if __name__ == "__main__":
    sys.exit(main())
