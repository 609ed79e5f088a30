"""The seat of a training process at the agent of its node, which tells it in which membership it trains.

The module owns the connection and its thread. When the membership is over, the thread says so and hangs up, whatever
the program does at that moment. What is said is described in `hpcstage.elastic.seats`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcstage.errors import HpcstageError
from hpcstage.torch.elastic.connections import GroupConnections, answers

CONNECT_S = 30.0
STEP_EVERY_S = 0.2
LOOK_S = 0.25
"""The connections of the group are looked at so often."""
SENT_AGAIN_S = 0.6
"""A host has not answered for at least so long when its connection is seen to be stuck: the kernel sends again after
0.2 s, and after 0.4 s more."""
STUCK_S = 2.0
_WAITS = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/graph.py")
_WORKS = "/torch/distributed/checkpoint/"


class AgentLost(HpcstageError):
    """The agent of this node is gone: nobody will say any more who trains."""


@dataclass(frozen=True)
class Assignment:
    """A process's place in a membership."""

    generation: int
    rank: int
    world: int
    address: str
    port: int
    hosts: tuple[str, ...]
    cut_s: float
    """A host that acknowledges nothing for so long is not reached."""

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Assignment:
        """Reads what the agent says."""
        return cls(**{**said, "hosts": tuple(said["hosts"])})


class MainThread:
    """Knows for how long the main thread has been at one place of PyTorch from which it waits for other processes. A
    long backward step looks the same."""

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None
        self._since_s = 0.0

    def waits_s(self, now_s: float) -> float:
        """Returns the seconds up to this look; 0 if it is anywhere else."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        file = "" if frame is None else frame.f_code.co_filename.replace(os.sep, "/")
        waits = frame is not None and any(part in file for part in _WAITS) and _WORKS not in file
        place = (id(frame), frame.f_lasti) if frame is not None and waits else None
        if place is None or place != self._place:
            self._place, self._since_s = place, now_s
        return now_s - self._since_s


class Seat:
    """The seat of this process."""

    def __init__(self, path: str, local_rank: int) -> None:
        self._local_rank = local_rank
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(CONNECT_S)
        self._connection.connect(path)
        self._connection.settimeout(None)
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._generation = 0
        self._stepped_s = 0.0
        self._sending = threading.Lock()
        self._links: GroupConnections | None = None
        self._cut_s = 0.0
        self._stuck_since_s: dict[int, float] = {}
        self._main = MainThread()
        self.is_over = threading.Event()
        """Set when the membership in which this process trains is over."""
        threading.Thread(target=self._listen, name="elastic seat", daemon=True).start()

    def assigned(self, has_state: bool | None, lead: Callable[[], int], links: GroupConnections) -> Assignment:
        """Says that this process is ready, and returns its place in the next membership. Waits as long as the others
        train without it, or a policy says `wait`: the agent bounds that, and ends this process.

        `lead` makes the store of the next group and returns its port, if this process is the first. `links` are ended
        when the membership is over, and watched until then. Raises AgentLost.
        """
        self._say(ready=self._local_rank, has_state=has_state)
        while True:
            said = self._said.get()
            if said is None:
                raise AgentLost("the agent of this node has ended", "look at what torchrun said")
            if "lead" in said:
                self._say(port=lead(), generation=said["lead"])
            if "train" in said:
                found = Assignment.from_json(said["train"])
                with self._lock:
                    self._generation, self._links, self._cut_s = found.generation, links, found.cut_s
                    self._stuck_since_s = {}
                    self.is_over.clear()
                return found

    def stepped(self, progress: dict[str, float]) -> None:
        """Says that a step is done and how far the training is, a few times a second at most."""
        now_s = time.monotonic()
        if now_s - self._stepped_s >= STEP_EVERY_S:
            self._stepped_s = now_s
            self._say(step=progress)

    def leave(self) -> None:
        """Says nothing, but takes no word of the membership any more in which this process was."""
        with self._lock:
            self._generation, self._links = 0, None

    def finished(self) -> None:
        """Says that the training is over for this process."""
        self.leave()
        self._say(finished=self._local_rank)

    def _say(self, **what: Any) -> None:  # noqa: ANN401 - plain data
        with contextlib.suppress(OSError):  # the thread finds out
            with self._sending:
                self._connection.sendall(json.dumps(what).encode() + b"\n")

    def _listen(self) -> None:
        buffer = b""
        while True:
            self._look(time.monotonic())
            if not select.select([self._connection], [], [], LOOK_S)[0]:
                continue
            try:
                data = self._connection.recv(65536)
            except OSError:
                data = b""
            if not data:
                self._said.put(None)
                self._over(None)
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if "stop" in said:
                    self._over(said["stop"])
                else:
                    self._said.put(said)

    def _look(self, now_s: float) -> None:
        """Says which hosts do not acknowledge what the group sends them."""
        with self._lock:
            generation = self._generation
            stuck = self._links.stuck() if self._links is not None else {}
            self._stuck_since_s = {link: self._stuck_since_s.get(link, now_s) for link in stuck}
            more_s = self._cut_s - SENT_AGAIN_S
            late = {stuck[link] for link, since_s in self._stuck_since_s.items() if now_s - since_s >= more_s}
        if unreached := sorted(address for address in late if not answers(address)):
            self._say(unreached=unreached, generation=generation)
        if self._main.waits_s(now_s) >= STUCK_S and self.is_over.is_set():
            self._say(stuck=True)

    def _over(self, generation: int | None) -> None:
        with self._lock:
            if self._links is not None and generation in (None, self._generation):
                self.is_over.set()
                self._links.shut_down()
