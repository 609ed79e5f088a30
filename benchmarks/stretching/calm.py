"""Whether anybody is taken for lost who is not: hosts on a machine whose processors are busy, and which are stopped for
less than the lease again and again.

Owns the disturbance. Every new membership is a false alarm, since no host is lost, and so is a process that was
replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import time
from typing import Any

from benchmarks.harness import Bench, Figure, Options, at_least, at_most
from benchmarks.stretching.hosts import KEPT, hosts

CELL, ARM = "busy machine", KEPT
MINUTES, QUICK_MINUTES, ROUNDS = 5.0, 0.1, 6
ASKED_MINUTES = 30.0
LEASE_S = 2.0
STOPS_S = (0.1, 1.5)
"""How long a host is stopped: less than the lease by two beats."""
PAUSES_S = (1.0, 4.0)
START_LIMIT_S, LIMIT_S = 120.0, 30.0


def sample(options: Options) -> dict[str, Any]:
    """Trains on three hosts for some minutes while other processes compute and hosts are stopped."""
    span_s = 60 * (QUICK_MINUTES if options.quick else MINUTES)
    busy = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(os.cpu_count() or 1)]
    rng, stops = random.Random(1), []
    with hosts(KEPT, "abc", options) as made:
        if made.wait_for_steps("abc", time.time(), START_LIMIT_S) is None:
            raise RuntimeError(f"the hosts did not start:\n{made.said()}")
        began, first = made.generations(), {host: made.worker(host).pid for host in "abc"}
        for process in busy:
            process.start()
        try:
            ends_s = time.monotonic() + span_s
            while time.monotonic() < ends_s:
                time.sleep(rng.uniform(*PAUSES_S))
                host = rng.choice("abc")
                at_s = time.monotonic()
                made.strike(host, signal.SIGSTOP)
                time.sleep(rng.uniform(*STOPS_S))
                made.strike(host, signal.SIGCONT)
                stops.append(time.monotonic() - at_s)
        finally:
            for process in busy:
                process.kill()
                process.join()
        went_on = made.wait_for_steps("abc", time.time(), LIMIT_S) is not None
        replaced = sum(made.worker(host).pid != pid for host, pid in first.items())
        return {
            "seconds": span_s,
            "minutes": span_s / 60,
            "false_alarms": made.generations() - began + replaced,
            "went_on": went_on,
            "stops": len(stops),
            "too_long": sum(stop_s >= LEASE_S for stop_s in stops),
            "median_stop_s": statistics.median(stops),
            "longest_stop_s": max(stops),
        }


def show(bench: Bench) -> list[Figure]:
    """The figures."""
    found = bench.select(CELL, ARM)
    if not found:
        return []
    minutes = sum(one["minutes"] for one in found)
    asked = QUICK_MINUTES if bench.options.quick else ASKED_MINUTES
    alarms = sum(one["false_alarms"] for one in found) + sum(not one["went_on"] for one in found)
    return [
        at_least("busy machine: minutes", minutes, asked),
        at_most("busy machine: false alarms", float(alarms), 0),
    ]


def _compute() -> None:
    while True:
        sum(range(100_000))
