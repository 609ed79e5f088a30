"""Owns agents that stand where `torchrun` does, in the processes of `agents`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conftest import wait_for

from hpcstage.elastic.membership.arbiter import Arbiter
from hpcstage.elastic.membership.termstore import Board, connect
from hpcstage.elastic.membership.values import Term, TrainingEnd
from hpcstage.errors import HpcstageError

PROGRAM = Path(__file__).with_name("agents.py")
LEASE_S = 1.0
BUSY = 4
"""How much longer than on an idle machine something may take."""
TIMES = {"lease_s": LEASE_S, "last_call_s": 0.6}


class Agents:
    """The agents of one training."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pids: dict[str, int] = {}
        self.said = ""
        self.process = subprocess.Popen(
            [sys.executable, os.fspath(PROGRAM)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        try:
            assert self.process.stdout.readline() == "ready\n"
        except BaseException:
            self.process.kill()
            self.process.communicate()
            raise

    def start(
        self,
        name: str,
        least: int = 1,
        most: int = 4,
        *,
        is_cut_off: bool = False,
        address: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
        **config: object,
    ) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        command = {
            "log": os.fspath(self.directory / f"{name}.log"), "least": least, "most": most, "address": address,
            "config": {"dir": os.fspath(self.directory), "host": name, **TIMES, **config},
            "is_cut_off": is_cut_off, "env": dict(env or {}),
        }  # fmt: skip
        print(json.dumps(command), file=self.process.stdin, flush=True)
        self.pids[name] = int(self.process.stdout.readline())

    def log(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / f"{name}.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def training(self, *names: str) -> bool:
        """Whether these agents, and no others of them, train in these ranks now."""
        logs = [self.log(name) for name in names]
        now = [(log[-1].get("rank"), log[-1].get("world")) for log in logs if log]
        return (
            now == [(rank, len(names)) for rank in range(len(names))]
            and len({str(log[-1]["main"]) for log in logs}) == 1
        )

    def wait(self, *names: str) -> float:
        """Waits until these train, and returns the time when the last of them began to."""
        wait_for(lambda: self.training(*names), 20, f"training on {names}, not {list(map(self.log, self.pids))}")
        return max(self.log(name)[-1]["at"] for name in names)

    def wait_ended(self, name: str, code: int) -> None:
        wait_for(lambda: bool(self.log(name)) and self.log(name)[-1]["what"] == "ends", 20, f"end of {name}")
        assert self.log(name)[-1]["code"] == code

    def signal(self, name: str, signum: int) -> float:
        os.kill(self.pids[name], signum)
        return time.time()

    def generations(self) -> list[dict[str, Any]]:
        arbiter = Arbiter(self.directory / "elastic-t")
        newest = arbiter.newest_generation()
        count = newest.number if newest else 0
        return [json.loads(json.dumps(arbiter.generation(number)[0].to_json())) for number in range(1, count + 1)]

    def hosts(self) -> list[list[str]]:
        return [[node["host"] for node in generation["nodes"]] for generation in self.generations()]

    @contextlib.contextmanager
    def board(self) -> Iterator[Board]:
        """The store."""
        arbiter, term = Arbiter(self.directory / "elastic-t"), self.term()
        board = Board(connect(term.address, term.port, 30), arbiter.signer, 30)
        try:
            yield board
        finally:
            board.close()

    def place(self, name: str) -> bool:
        """Whether an agent has spoken in the store."""
        with self.board() as board:
            return any(beat.node.host == name for beat in board.beats().values())

    def wait_known(self, spare: str, *names: str) -> None:
        """Waits until these agents have heard of a spare: they have spoken since the store's host said so."""

        def counts() -> dict[str, int]:
            return {beat.node.host: beat.count for beat in board.beats().values()}

        with self.board() as board:
            ids = {beat.node.host: beat.node.id for beat in board.beats().values()}
            wait_for(lambda: ids[spare] in board.get("view")["spares"], 20, "a spare that is seen")
            before = counts()
            wait_for(lambda: all(counts()[name] > before[name] + 1 for name in names), 20, "agents that know it")

    @property
    def has_begun(self) -> bool:
        directory = self.directory / "elastic-t"
        return directory.exists() and Arbiter(directory).newest_term() is not None

    def term(self) -> Term:
        """Where the store is."""
        term = Arbiter(self.directory / "elastic-t").newest_term()
        assert term is not None
        return term

    def last_beat(self) -> tuple[int, int] | None:
        """The last beat of the store's host, or None while that cannot be read."""
        try:
            return Arbiter(self.directory / "elastic-t").last_beat()
        except HpcstageError:
            return None

    def store(self) -> str:
        """The host of the store."""
        return self.term().host

    def end_of_term(self) -> TrainingEnd | None:
        return Arbiter(self.directory / "elastic-t").end()

    def end(self) -> str:
        """Ends all that is left, and returns what the agents said."""
        for name in self.pids:
            for signum in (signal.SIGCONT, signal.SIGTERM):
                with contextlib.suppress(ProcessLookupError):
                    self.signal(name, signum)
        if self.process.poll() is None:
            try:
                _, self.said = self.process.communicate(timeout=60)
            finally:
                self.process.kill()
                self.process.communicate()
        return self.said


def order(agents: Agents, *names: str) -> list[str]:
    """These names by the ranks that they have now."""
    wait_for(lambda: all(agents.log(name) and agents.log(name)[-1]["what"] == "trains" for name in names), 20)
    return sorted(names, key=lambda name: agents.log(name)[-1]["rank"])


def started(agents: Agents, count: int, **options: Any) -> list[str]:
    """Starts agents and returns their names by rank, the host of the store first."""
    names = ["a", "b", "c", "d"][:count]
    agents.start(names[0], **options)
    wait_for(lambda: agents.has_begun, 10)
    for name in names[1:]:
        agents.start(name, **options)
    wait_for(lambda: all(agents.log(name) for name in names) and sum(len(agents.log(n)) for n in names) >= count, 20)
    ranks = order(agents, *names)
    agents.wait(*ranks)
    return ranks
