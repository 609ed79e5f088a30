"""Elastic training: how long after a fault the hosts that are left train again, and what the paper's figures show.

Hosts are agents of `torchrun` on this machine, each with one process and a name of its own; processes are restarted
after a change, with the import of PyTorch, or kept (`hpcstage.torch.Elastic`). `seconds` is from the fault to the first
step of those that train afterwards, `agreed_s` to the file of their membership, `noticed_s` until the fault is
noticed: until that file at the latest, and where a process is stopped until it is killed. A host is killed with all its
processes, or stopped by SIGSTOP; a process that is killed or stopped is restarted, and all three hosts train afterwards
(torchft's process is all there is of a host); the endpoint's host is the one through which the others meet; a cut has
all that a host sends be lost, or all that it is sent, while the other direction works (root). A process that holds
Python's lock for ever is found by limits that are set here to seconds, and killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from benchmarks.harness import Arm, Bench, Figure, Options, at_most, options_of, parser
from benchmarks.stretching import calm, chaos, growing, staged
from benchmarks.stretching.hosts import KEPT, OURS, THEIRS, TORCHFT, Hosts, has_torchft, hosts
from benchmarks.stretching.networks import has_networks

START_LIMIT_S, LIMIT_S = 90.0, 60.0
AGAIN_S, KEPT_AGAIN_S = 10.0, 5.0
"""What is asked of restarted processes, and of those that are kept."""
NOTICED_S = 3.0
"""What is asked of the time until a fault is noticed."""
HANG_S, LEAVE_S = 5.0, 2.0
"""The limits for a step, and for leaving a group, where a process hangs; their default is 10 min."""

ON_ITS_WAY_S = 0.5
"""A step of three ranks that was made so long after a fault of a process is one of the next membership: each step takes
all processes."""


@dataclass(frozen=True)
class Fault:
    """What happens to one of three hosts."""

    host: str
    what: str
    """`host`, `process`, `sends`, `receives`, `link` (that between `b` and `c`), or `lock`."""
    signum: int = 0

    def left(self, ranks: str) -> str:
        """The hosts that train afterwards: of two halves of a cut network that of the endpoint, of two hosts without a
        link the one with the lower rank."""
        if self.what == "link":
            return "a" + min("bc", key=ranks.index)
        if self.is_cut and self.host == "a":
            return "a"
        return "abc" if self.what in ("process", "lock") else "abc".replace(self.host, "")

    @property
    def more_s(self) -> float:
        """The time that may pass in addition to what is asked, since it is a limit."""
        return HANG_S + LEAVE_S if self.what == "lock" else 0.0

    @property
    def _others(self) -> str:
        return "abc".replace(self.host, "")

    @property
    def is_cut(self) -> bool:
        """Whether it is one of a network."""
        return self.what in ("sends", "receives", "link")

    def strike(self, made: Hosts) -> float:
        """Has it happen, and returns when."""
        if self.what == "link":
            return max(made.cut("b", "c"), made.cut("c", "b"))
        if self.what == "lock":
            return made.hold_lock(self.host)
        if self.what == "sends":
            return made.cut(self.host, self._others)
        if self.what == "receives":
            return max(made.cut(other, self.host) for other in self._others)
        return (made.strike_worker if self.what == "process" else made.strike)(self.host, self.signum)


FAULTS = {
    "host killed": Fault("b", "host", signal.SIGKILL),
    "host frozen": Fault("b", "host", signal.SIGSTOP),
    "process holds Python's lock": Fault("b", "lock"),
    "process killed": Fault("b", "process", signal.SIGKILL),
    "process frozen": Fault("b", "process", signal.SIGSTOP),
    "endpoint's host killed": Fault("a", "host", signal.SIGKILL),
    "endpoint's host frozen": Fault("a", "host", signal.SIGSTOP),
    "what a host sends is lost": Fault("b", "sends"),
    "what a host is sent is lost": Fault("b", "receives"),
    "what the endpoint's host sends is lost": Fault("a", "sends"),
    "the link between two other hosts is cut": Fault("b", "link"),
}
ROUNDS, OTHERS_ROUNDS = 5, 3
PEERS = (THEIRS, TORCHFT)


def arms_of(fault: Fault) -> list[str]:
    """The arms that a fault is asked of. torchft's endpoint is no host; a process is a host there. Only processes that
    outlive changes say which hosts they do not reach."""
    if fault.what in ("link", "lock"):
        return [KEPT]
    found = [OURS, KEPT, THEIRS]
    return [*found, TORCHFT] if has_torchft() and fault.host != "a" and not fault.is_cut else found


def sample(backend: str, fault: Fault, options: Options) -> dict[str, Any]:
    """Trains on three hosts, has a fault happen to one, and waits for those that train afterwards."""
    conf = f"hang_s={HANG_S:g},leave_s={LEAVE_S:g}" if fault.what == "lock" else ""
    with hosts(backend, "abc", options, apart=fault.is_cut, conf=conf) as made:
        if made.wait_for_steps("abc", time.time(), START_LIMIT_S) is None:
            raise RuntimeError(f"{backend} did not start:\n{made.said()}")
        worker = made.worker(fault.host)
        left = "ac" if backend == TORCHFT else fault.left(made.ranks() if fault.what == "link" else "")
        struck = fault.strike(made)
        # What is agreed and stepped is on the disk: it may be looked for later.
        is_stopped = fault.what == "process" and fault.signum == signal.SIGSTOP
        is_killed_when_noticed = fault.what == "lock" or (is_stopped and backend in (OURS, KEPT))
        gone = _gone(worker) if is_killed_when_noticed else None
        since = struck + (ON_ITS_WAY_S if left == "abc" else 0.0)
        again = made.wait_for_steps(left, since, LIMIT_S)
        agreed = made.agreed(struck)
        noticed = min((at for at in (gone, agreed) if at is not None), default=None)
        return {
            "seconds": None if again is None else again - struck,
            "noticed_s": None if noticed is None else noticed - struck,
            "agreed_s": None if agreed is None else agreed - struck,
            "limit_s": LIMIT_S,
        }


def _gone(worker: psutil.Process) -> float | None:
    """Returns when a process had ended."""
    deadline_s = time.monotonic() + LIMIT_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline_s:
                return None
            time.sleep(0.01)
    return time.time()


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    bench = Bench("elastic", options, {"cpus": os.cpu_count(), "lease_s": 2.0})
    chosen = [fault for fault in FAULTS if options.wants(fault) and (has_networks() or not FAULTS[fault].is_cut)]
    chosen = chosen[: 1 if options.quick and not options.only else None]
    for name in chosen:
        fault = FAULTS[name]
        for arms, rounds in ((arms_of(fault)[:2], ROUNDS), (arms_of(fault)[2:], OTHERS_ROUNDS)):
            made: dict[str, Arm] = {arm: partial(sample, arm, fault, options) for arm in arms}
            bench.measure(name, made, options.rounds(rounds))
    if options.wants(growing.CELL) and (options.only or not options.quick):
        bench.measure(growing.CELL, growing.arms(options, bench), options.rounds(growing.SEEDS))
    if options.wants(calm.CELL) and (options.only or not options.quick):
        bench.measure(calm.CELL, {calm.ARM: partial(calm.sample, options)}, options.rounds(calm.ROUNDS))
    if options.wants(chaos.CELL) and (options.only or not options.quick):
        bench.measure(chaos.CELL, {chaos.ARM: partial(chaos.sample, options, bench)}, options.rounds(1))
    if options.wants(staged.CELL) and (options.only or not options.quick):
        placements: dict[str, Arm] = {arm: partial(staged.sample, arm, options) for arm in staged.ARMS}
        bench.measure(staged.CELL, placements, options.rounds(staged.ROUNDS))
    found = [name for name in FAULTS if any(bench.select(name, arm) for arm in (OURS, KEPT))]
    return bench.finish(
        [*figures(bench, found), *growing.show(bench), *calm.show(bench), *chaos.show(bench), *staged.show(bench)]
    )


def always(bench: Bench, fault: str, arm: str, key: str = "seconds") -> float | None:
    """Returns the median, or None if a sample has no value."""
    values = [sample.get(key) for sample in bench.select(fault, arm)]
    return None if None in values else bench.median(fault, arm, key)


def figures(bench: Bench, found: list[str]) -> list[Figure]:
    """Asked of every fault."""
    made = []
    for name in found:
        more_s = FAULTS[name].more_s
        # A process that is killed is started again.
        asked = {OURS: AGAIN_S, KEPT: more_s + AGAIN_S if more_s else KEPT_AGAIN_S}
        for arm, limit_s in asked.items():
            if bench.select(name, arm):
                noticed = always(bench, name, arm, "noticed_s")
                made.append(at_most(f"{name}, {arm}: noticed", noticed, more_s + NOTICED_S, "s"))
                made.append(at_most(f"{name}, {arm}: steps again", always(bench, name, arm), limit_s, "s"))
    return made


if __name__ == "__main__":
    sys.exit(main())
