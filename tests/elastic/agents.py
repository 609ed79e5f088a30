"""Agents of an elastic training, each a process that stands where `torchrun` does: it asks the handler for its rank,
trains nothing, and asks again when it has to. What happens to an agent is in its log, a JSON value a line.

One process imports PyTorch and forks the agents, which saves each of them the import. It takes commands on its standard
input: the name of an agent and its options.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters

from hpcstage.elastic.rendezvous import Handler, create_handler


class Leaves(Exception):
    """The agent was asked to end."""


class Finishes(Exception):
    """The training is over, on this host."""


def leave(signum: int, frame: object) -> None:
    for ignored in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)
    raise Leaves if signum == signal.SIGTERM else Finishes


class Agent:
    def __init__(self, log: Path, least: int, most: int, address: str, config: dict[str, Any]) -> None:
        self.log = log
        self.parameters = RendezvousParameters("hpcstage", "", "t", least, most, address, **config)

    def say(self, **facts: object) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps({"at": time.time(), **facts}) + "\n")

    def run(self) -> int:
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, leave)
        try:
            handler = create_handler(self.parameters)
            try:  # as torchrun does
                self.train(handler)
            finally:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                handler.shutdown()
        except Leaves:
            self.say(what="leaves")
        except SystemExit as ended:
            self.say(what="ends", code=ended.code)
            return int(ended.code or 0)
        return 0

    def train(self, handler: Handler) -> None:
        with contextlib.suppress(Finishes):
            self.train_on(handler)

    def train_on(self, handler: Handler) -> None:
        while True:
            info = handler.next_rendezvous()
            met = info.bootstrap_store_info
            self.say(what="trains", rank=info.rank, world=info.world_size, main=[met.master_addr, met.master_port])
            while not handler.num_nodes_waiting():
                time.sleep(0.02)
            self.say(what="stops")


def cut_off() -> None:
    """Has this process reach no network, not even this machine's."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):
        os._exit(99)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            if command.pop("is_cut_off"):
                cut_off()
            os.environ.update(command.pop("env"))
            if command["address"] != "127.0.0.1":
                signal.sigwait({signal.SIGUSR2})  # the test gives it a network meanwhile
            sys.exit(Agent(Path(command.pop("log")), **command).run())
        print(pid, flush=True)


if __name__ == "__main__":
    main()
