"""Runs the uploader in a process of its own, with threads, so that a shared file system that hangs holds up nobody
else.

Owns the process, its pipes and the lines of JSON in them. One thread does renames and removals in the order in which
they came, THREADS carry files, and each file in whose place a link is put has one: it mostly waits. A process of its
own and not a helper for each piece of work: a file needs a millisecond, a fork some ten. Not the copiers of the store:
they know files of a manifest by their ids, and never replace anything.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

from hpcstage.forked import fork, reap
from hpcstage.outputs.facts import Action, ActionResult, Deed, Ending, News
from hpcstage.outputs.journal import Charter, Journal
from hpcstage.outputs.prepare import OutputPlace
from hpcstage.outputs.told import Told, ToldPaths
from hpcstage.outputs.uploader import Uploader
from hpcstage.store.largecopy import Pacer

THREADS = 4
MOST_STARTS = 20
_NEWS_AT_ONCE = 200
_READ_BYTES = 1 << 16
_COMPACT = b"compact\n"
"""Asks for the journal to be written anew; null is the answer."""


class UploaderProcess:
    """Owns the process, starts it again when it has died, and answers for what it had been given."""

    def __init__(
        self,
        place: OutputPlace,
        charter: Charter,
        journal: Journal,
        rate: float | None = None,
        told: ToldPaths | None = None,
    ) -> None:
        """`rate` is the most bytes per second that are written to the target. `told` is where nodes tell each other of
        names; the process hears of them from its first action on, or from `listen`."""
        self._told = told
        self._heard: list[News] = []
        self._place = place
        self._charter = charter
        self._journal = journal
        self._rate = rate
        self._pid = 0
        self._into = self._out = -1
        self._unsent = b""
        self._rest = b""
        self._given: dict[tuple[str, str], Action] = {}
        self._starts = 0
        self._lost_names: set[str] = set()
        """Names that processes were carrying when they died."""

    @property
    def carrying(self) -> int:
        """The number of files that are under way."""
        return sum(deed == Deed.CARRY.value for deed, _ in self._given)

    def fds(self) -> list[int]:
        """Returns the descriptors to watch for reading."""
        return [self._out] if self._pid else []

    @property
    def is_resting(self) -> bool:
        """Whether no more files should be given now, so that the journal can be written anew."""
        return bool(self._pid) and (self._journal.is_held or self._journal.is_long())

    def give(self, actions: Sequence[Action]) -> None:
        """Hands out actions; their results come with `receive`."""
        for action in actions:
            self._given[action.deed.value, action.name] = action
            self._unsent += json.dumps(action.to_json()).encode() + b"\n"
        if self._given and not self._pid and self._starts < MOST_STARTS:
            with suppress(OSError):
                self._start()
        self.flush()

    def listen(self) -> None:
        """Starts the process where other nodes may have something to say."""
        if self._told is not None and not self._pid:
            with suppress(OSError):
                self._start()

    def heard(self) -> list[News]:
        """Returns what other nodes said, as far as it came with `receive`."""
        heard, self._heard = self._heard, []
        return heard

    def flush(self) -> bool:
        """Sends what the pipe takes, but nothing while the journal is written anew. Returns whether all is sent."""
        with suppress(BlockingIOError, BrokenPipeError):
            while self._unsent and self._pid and not self._journal.is_held:
                self._unsent = self._unsent[os.write(self._into, self._unsent) :]
        return not self._unsent

    def compact(self) -> None:
        """Has a long journal written anew if nothing is under way."""
        if self.is_resting and not (self._journal.is_held or self._given):
            self._journal.hold()
            with suppress(OSError):
                os.write(self._into, _COMPACT)

    def receive(self) -> list[ActionResult]:
        """Returns the results that have come. After the death of the process, what it had been given has failed."""
        if not self._pid:
            return self._lost()
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self._out, _READ_BYTES)
            if not data:
                self._end(0.5)
                return self._lost()
        *lines, self._rest = (self._rest + data).split(b"\n")
        said = [json.loads(line) for line in lines]
        self._heard += [News(*one) for data in said if isinstance(data, dict) for one in data["news"]]
        if None in said:
            self._journal.release()
        results = [ActionResult.from_json(data) for data in said if isinstance(data, list)]
        for result in results:
            self._given.pop((result.deed.value, result.name), None)
        return results

    def close(self) -> None:
        """Ends the process; what it was doing may have been done or not, as the journal says."""
        if self._pid:
            self._end(0.0)

    def _lost(self) -> list[ActionResult]:
        self._lost_names.update(action.name for action in self._given.values() if action.deed is Deed.CARRY)
        given, self._given, self._unsent, self._rest = self._given, {}, b"", b""
        text = "the process that writes to the target has died"
        return [ActionResult(action.deed, action.name, Ending.FAILED, text=text) for action in given.values()]

    def _end(self, timeout_s: float) -> None:
        os.close(self._into)
        os.close(self._out)
        reap(self._pid, timeout_s)
        self._pid = 0
        self._journal.release()

    def _start(self) -> None:
        self._starts += 1
        commands, self._into = os.pipe()
        self._out, results = os.pipe()
        self._pid = fork(lambda: self._work(commands, results), {commands, results, self._journal.fd})
        os.close(commands)
        os.close(results)
        os.set_blocking(self._into, False)
        os.set_blocking(self._out, False)

    def _work(self, commands: int, results: int) -> None:
        """Carries, in the child."""
        with suppress(OSError):
            os.nice(10)
        pace = None if self._rate is None else Pacer(self._rate)
        place = self._place
        told = None if self._told is None else Told(self._told, is_again=self._starts > 1)
        uploader = Uploader(place.root, place.scratch, self._charter, self._journal, pace, told)
        uploader.take_over(self._lost_names)
        _serve(uploader, commands, results, told, self._journal)


def _serve(uploader: Uploader, commands: int, results: int, told: Told | None, journal: Journal) -> None:
    """Does actions until the pipe closes."""
    lanes: tuple[SimpleQueue[Action], SimpleQueue[Action]] = (SimpleQueue(), SimpleQueue())
    lock = threading.Lock()

    def do(action: Action) -> None:
        try:
            result = uploader.do(action)
        except Exception as error:  # noqa: BLE001  a mistake of ours costs this file's drain, and is named
            traceback.print_exc()
            result = ActionResult(action.deed, action.name, Ending.FAILED, text=f"{type(error).__name__}: {error}")
        say(result.to_json())

    def say(what: object) -> None:
        data = json.dumps(what).encode() + b"\n"
        with lock:
            while data:
                data = data[os.write(results, data) :]

    def listen(told: Told) -> None:
        while True:
            news = told.look()
            for first in range(0, len(news), _NEWS_AT_ONCE):
                say({"news": news[first : first + _NEWS_AT_ONCE]})
            time.sleep(told.look_s)

    def work(lane: SimpleQueue[Action]) -> None:
        while True:
            do(lane.get())

    for lane in (lanes[0], *[lanes[1]] * THREADS):
        threading.Thread(target=work, args=(lane,), daemon=True).start()
    if told is not None:
        threading.Thread(target=listen, args=(told,), daemon=True).start()
    rest = b""
    while data := os.read(commands, _READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line + b"\n" == _COMPACT:
                journal.compact()
                say(None)
                continue
            action = Action.from_json(json.loads(line))
            if action.deed is Deed.FREE:
                threading.Thread(target=do, args=(action,), daemon=True).start()
            else:
                lanes[action.deed in {Deed.CARRY, Deed.STAMP}].put(action)
