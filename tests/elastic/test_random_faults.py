"""Random kills, stops, departures and joins, some while others are dealt with: those that are left always agree."""

from __future__ import annotations

import itertools
import random
import signal
import threading
from pathlib import Path

import pytest
from conftest import wait_for

pytest.importorskip("torch")

from agentlab import LEASE_S, Agents

pytestmark = [pytest.mark.torch, pytest.mark.slow]
FAULTS, MOST = 6, 5


class Chaos:
    """A training whose hosts come and go."""

    def __init__(self, agents: Agents, seed: int) -> None:
        self.agents = agents
        self.random = random.Random(seed)
        self.alive: set[str] = set()
        self.stopped: set[str] = set()
        self.count = 0
        self.done: list[str] = []

    def join(self) -> None:
        self.count += 1
        name = f"h{self.count}"
        self.agents.start(name, most=MOST)
        self.alive.add(name)
        self.done.append(f"{name} joins")

    def strike(self) -> None:
        running = sorted(self.alive - self.stopped)
        kinds = ["join"] * (len(self.alive) < MOST) + ["go on"] * bool(self.stopped)
        kinds += ["kill", "kill", "stop", "leave"] * (len(running) > 1)
        kind = self.random.choice(kinds)
        if kind == "join":
            self.join()
            return
        name = self.random.choice(sorted(self.stopped) if kind == "go on" else running)
        self.done.append(f"{name}: {kind}")
        sent = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM, "go on": signal.SIGCONT}
        self.agents.signal(name, sent[kind])
        if kind in ("kill", "leave"):
            self.alive.discard(name)
        elif kind == "stop":
            self.stopped.add(name)
        else:
            self.stopped.discard(name)

    def settled(self) -> bool:
        """Whether all hosts that run train together, and nobody else is expected to."""
        running = self.alive - self.stopped
        hosts = self.agents.hosts()
        return bool(hosts) and set(hosts[-1]) == running and self.agents.training(*hosts[-1])


@pytest.mark.parametrize("seed", [1])
def test_those_that_are_left_agree(tmp_path: Path, seed: int) -> None:
    agents = Agents(tmp_path)
    chaos = Chaos(agents, seed)
    try:
        for _ in range(3):
            chaos.join()
        for _ in range(FAULTS):
            wait_for(chaos.settled, 300, f"agreement after {chaos.done}, {agents.hosts()[-3:]}")
            chaos.strike()
            while chaos.random.random() < 0.4:  # another one while this one is dealt with
                threading.Event().wait(chaos.random.random() * 1.5 * LEASE_S)
                chaos.strike()
        wait_for(chaos.settled, 300, f"agreement after {chaos.done}, {agents.hosts()[-3:]}")
        generations = agents.generations()
    finally:
        print(agents.end())
    assert [generation["number"] for generation in generations] == list(range(1, len(generations) + 1))
    for before, after in itertools.pairwise(generations):
        kept = [node["id"] for node in before["nodes"] if node in after["nodes"]]
        assert [node["id"] for node in after["nodes"]][: len(kept)] == kept, "who stays keeps its order"
    for name in chaos.alive:
        entries = [entry["what"] for entry in agents.log(name)]
        assert "ends" not in entries
