"""Brings givers and receivers together, in an agent of `torchrun`: whoever joins asks the nodes that train, one by one,
and each starts a giver for it and says where that is.

The module owns the names in the training's store: `copies/NODE`, where a node is asked, and `copies/SESSION`, where it
answers. The values are signed; the key of a session follows from that of the training and from what both sides have
drawn, so that an old question, put there again, is of no use.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcstage.elastic.membership.keeping import Keeper
from hpcstage.elastic.membership.setting import AgentSetting
from hpcstage.elastic.membership.signing import Signer
from hpcstage.elastic.membership.store import StoreLost
from hpcstage.elastic.membership.values import Node
from hpcstage.elastic.passing import process
from hpcstage.protocol import passing

DIRECTORY = "HPCSTAGE_ELASTIC_NODE_DIR"
"""The variable that names the node directory, where anything is staged."""
LOOK_S = 0.5
ANSWER_S = 30.0
"""A node that has not answered within this time is asked once more: another one that joins may have asked at the same
time. It has to start a process, which imports PyTorch."""
MOST_QUESTIONS = 3
MOST_GIVERS = 8
"""A node serves so many at a time."""
END_S = 1.0
COMES = "comes"
"""The first answer to a question: the process that gives is started."""


def node_dir(env: Mapping[str, str]) -> Path | None:
    """Returns the node directory of this node; None where nothing is staged."""
    found = env.get(DIRECTORY)
    return Path(found) if found else None


@dataclass
class _Giver:
    """A process that gives copies to one node, and what this side has drawn."""

    process: subprocess.Popen[bytes]
    drawn: str
    has_said: bool = False
    """Whether the one that joins was told where the process is."""


@dataclass
class _Question:
    """The last question to a node."""

    session: str
    asked_s: float
    count: int = 1
    comes: bool = False
    is_answered: bool = False

    def is_late(self, now_s: float) -> bool:
        """Returns whether the node is to be asked once more."""
        return self.count < MOST_QUESTIONS and now_s - self.asked_s > ANSWER_S


class Passing:
    """Owns the givers and the receiver of one node, and the thread that looks after them."""

    def __init__(self, keeper: Keeper, setting: AgentSetting, signer: Signer, directory: Path) -> None:
        self._keeper = keeper
        self._node = setting.node
        self._joins = setting.joins
        self._signer = signer
        self._directory = directory
        self._givers: dict[str, _Giver] = {}
        self._seen: set[str] = set()
        self._questions: dict[str, _Question] = {}
        self._receiver: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic copies", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and the processes."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(END_S)
        ended = [giver.process for giver in [*self._givers.values()]]
        for one in (*ended, *filter(None, (self._receiver,))):
            process.end(one, END_S)

    def _run(self) -> None:
        if self._joins:
            self._begin_to_receive()
        while not self._stopping.wait(LOOK_S):
            with contextlib.suppress(StoreLost, OSError):
                self._give()
                if self._receiver is not None and self._receiver.poll() is None:
                    self._ask(time.monotonic())

    def _begin_to_receive(self) -> None:
        try:
            self._receiver = self._process("receiver")
        except OSError:
            with contextlib.suppress(OSError):
                (self._directory / passing.SOCKET).touch()  # copiers wait for nobody

    def _process(self, module: str, **more: str) -> subprocess.Popen[bytes]:
        return process.start(module, node_dir=os.fspath(self._directory), address=self._node.address, **more)

    def _key(self, session: str, drawn: str) -> str:
        return self._signer.derived(f"copies {session} {drawn}").hex()

    # ---- giving

    def _give(self) -> None:
        """Starts a giver for whoever asks, and says where it is."""
        for session, giver in [*self._givers.items()]:
            if giver.process.poll() is not None:
                process.end(giver.process, END_S)
                del self._givers[session]
            elif not giver.has_said:
                self._say(session, giver)
        asked = self._keeper.get(f"copies/{self._node.id}")
        if isinstance(asked, str) and asked not in self._seen and len(self._givers) < MOST_GIVERS:
            self._seen.add(asked)
            drawn = secrets.token_hex(16)
            self._givers[asked] = _Giver(self._process("giver", key=self._key(asked, drawn)), drawn)
            self._keeper.put(f"copies/{asked}", COMES)

    def _say(self, session: str, giver: _Giver) -> None:
        output = giver.process.stdout
        assert output is not None
        if select.select([output], [], [], 0)[0]:
            port = output.readline().strip()
            if port:
                where = {"address": self._node.address, "port": int(port), "drawn": giver.drawn}
                self._keeper.put(f"copies/{session}", where)
            giver.has_said = True

    # ---- asking

    def _ask(self, now_s: float) -> None:
        """Asks the nodes that train for their copies, and tells the receiver of those that answer."""
        for node in self._keeper.members:
            if node.id == self._node.id:
                continue
            asked = self._questions.get(node.id)
            if asked is None:
                self._questions[node.id] = self._asked(node, now_s, 1)
            elif not (asked.is_answered or self._hear(asked)) and asked.is_late(now_s):
                self._questions[node.id] = self._asked(node, now_s, asked.count + 1)

    def _asked(self, node: Node, now_s: float, count: int) -> _Question:
        session = secrets.token_hex(16)
        self._keeper.put(f"copies/{node.id}", session)
        return _Question(session, now_s, count)

    def _hear(self, asked: _Question) -> bool:
        found = self._keeper.get(f"copies/{asked.session}")
        if self._receiver is None:
            return False
        if found == COMES and not asked.comes:
            asked.comes = True
            process.tell(self._receiver, comes=True)
        if not isinstance(found, dict):
            return False
        asked.is_answered = True
        key = self._key(asked.session, str(found["drawn"]))
        process.tell(self._receiver, address=found["address"], port=found["port"], key=key)
        return True
