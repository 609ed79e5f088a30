"""Training that goes on in the same processes when nodes are lost or join.

`Elastic` owns the sequence: a place in the next membership, a process group, the state that counts, the training loop,
and all of that again after a change. `seat` says who trains, `committedstate` brings them to the same state, and
`sampler` divides the epoch. The program's own loop is a function that is called again.
"""

# ruff: noqa: ANN401 - models and optimizers are whatever the program has

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpcstage import stderr
from hpcstage.elastic.policy import MembershipChanged
from hpcstage.elastic.sampleledger import EpochPlace, Head, SampleLedger
from hpcstage.elastic.seats import AGREED, VARIABLE
from hpcstage.errors import UsageError
from hpcstage.torch.checkpoints.checkpointer import Checkpointer
from hpcstage.torch.elastic.committedstate import CommittedState, SavedStates
from hpcstage.torch.elastic.connections import GroupConnections
from hpcstage.torch.elastic.sampler import ElasticSampler
from hpcstage.torch.elastic.scaling import ScaledRate, WeightedMean
from hpcstage.torch.elastic.seat import Assignment, Seat

T = TypeVar("T")


class Elastic:
    """Trains with whoever is there: `hpcstage run --elastic 2:4 --survivors keep -- torchrun train.py`.

        sampler = ElasticSampler(data, 32)
        elastic = Elastic(model, optimizer, sampler, scheduler)

        def train(net):
            for epoch in elastic.epochs(10):
                for inputs, labels in DataLoader(data, batch_sampler=sampler):
                    optimizer.zero_grad()
                    criterion(net(inputs), labels).backward()
                    optimizer.step()
                    elastic.commit()

        elastic.run(train)

    `train` gets the model as DistributedDataParallel, which weights gradients by the samples of each rank, and is
    called again when the membership has changed: `epochs` and the sampler then begin where the last committed step
    ended. All ranks go on from the newest step that one of them has committed; a rank that joins gets that state from
    it. If no rank has one, it is that of the newest checkpoint, else the initial one.

    * `commit` belongs directly behind `optimizer.step()` (and a scheduler's `step()`): nothing between communicates.
    * `lr`: "linear" multiplies the learning rate by the number of ranks over that of the start, with a transition of
      `warmup_steps` after a change; "keep" leaves it alone.
    * `checkpointer`: saves what is committed, on rank 0, when its `every` says so, and is what a training without
      survivors goes on from. By default one in `$HPCSTAGE_CHECKPOINT`, where that is set, each 60 s.
    * `timeout_s`: of the collectives. A rank that makes no step for so long ends the collectives of the others.

    Without `hpcstage run --elastic` it trains alone, in one process.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: ElasticSampler,
        scheduler: Any = None,
        *,
        lr: Literal["linear", "keep"] = "linear",
        warmup_steps: int = 100,
        checkpointer: Checkpointer | None = None,
        timeout_s: float = 1800.0,
        **ddp: Any,
    ) -> None:
        if lr not in ("linear", "keep"):
            raise ValueError(f"lr is {lr!r}; it is 'linear' or 'keep'")
        self._model, self._sampler = model, sampler
        self._ddp = ddp
        self._optimizer = optimizer
        self._checkpointer = checkpointer or _checkpointer()
        self._seat = _seat()
        self._group = ElasticGroup(timeout_s)
        self._state = CommittedState(model, optimizer, scheduler)
        self._saved = SavedStates(self._checkpointer)
        self._rate = ScaledRate(optimizer, lambda: self.step, warmup_steps, scales=lr == "linear")
        self._progress = TrainingProgress()
        self._lost = LostRanks()
        self._mean = WeightedMean()
        self._net: torch.nn.Module | None = None
        self._ledger: SampleLedger | None = None
        self.rank, self.world, self.generation = 0, 1, 0

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self._state.place.step

    @property
    def epoch(self) -> int:
        """The epoch in which the training is."""
        return self._state.place.epoch

    def run(self, train: Callable[[torch.nn.Module], T]) -> T:
        """Calls `train` until it returns in a membership that holds to its end, and returns what it returned."""
        while True:
            try:
                with self._surfaced():
                    self._join()
                    assert self._net is not None
                    result = train(self._net)
                    self._finish()
                return result
            except MembershipChanged as changed:
                _let_go(changed)
            self._part()

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs from the present one on, and has the sampler begin where it is."""
        self._progress.epochs = count
        while self.epoch < count:
            place = self._state.place
            self._sampler.begin(epoch=place.epoch, position=place.position, rank=self.rank, world=self.world)
            self._weigh()
            yield place.epoch
            self._state.end_epoch()

    def commit(self, batches: int = 1) -> None:
        """Says that the optimizer's step is done, with so many of the sampler's batches. Raises MembershipChanged if
        the membership is over; the step counts."""
        samples = 0
        for _ in range(batches):
            samples += self._sampler.step_size(self._state.place.position + samples)
        done = self._state.commit(samples, self._rate.course, self.generation)
        if self._ledger is not None:
            self._ledger.add(done)
        if self.rank == 0 and self._checkpointer is not None:
            self._checkpointer.save(self.state_dict, self.step)
        self._weigh()
        self._progress.stepped()
        self.alive()

    def alive(self) -> None:
        """Says that the program goes on, in something that is no step and takes long, such as a validation. Raises
        MembershipChanged if the membership is over."""
        if self._seat is not None:
            self._seat.stepped(self._progress.told(self._state.place, self._sampler))
            if self._seat.is_over.is_set():
                raise MembershipChanged("the membership has changed")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the training, as it was committed last."""
        return self._state.to_state()

    # ---- a membership

    def _join(self) -> None:
        """Takes a place in the next membership, with the state that counts."""
        self._optimizer.zero_grad(set_to_none=True)
        self._progress.pause()
        if self._seat is None:
            self._go_alone()
            return
        place = self._group.form(self._seat, self._state.is_good or self._saved.are_there())
        self.rank, self.world, self.generation = place.rank, place.world, place.generation
        self._state.bring(self._saved)
        self._rate.turn(self._state.rate, place.world)
        self._net = DistributedDataParallel(self._model, **self._ddp)
        self._net.register_comm_hook(self._mean, WeightedMean.hook)
        self._group.complete()
        self._open_ledger(place)
        if place.rank == 0:
            stderr.say(f"elastic: generation {place.generation}: {place.world} ranks go on after step {self.step}")

    def _go_alone(self) -> None:
        if not self._state.is_there:
            self._state.load_saved(self._saved)
        self._rate.turn(self._state.rate, 1)
        self._net = self._model

    def _finish(self) -> None:
        if self._seat is None:
            return
        dist.barrier()  # all ranks have come to the end
        self._seat.finished()
        self._close_ledger()
        if self._checkpointer is not None and self.rank == 0 and self.step:
            self._checkpointer.save(self.state_dict, self.step, now=True)
            self._checkpointer.wait()
        self._net = None
        dist.destroy_process_group()

    def _part(self) -> None:
        """Leaves the membership."""
        if self._seat is not None:
            self._seat.leave()
        self._group.hang_up()
        self._net = None
        self._close_ledger()
        self._group.end()

    @contextlib.contextmanager
    def _surfaced(self) -> Iterator[None]:
        """Makes MembershipChanged of the errors with which collectives end."""
        try:
            yield
        except RuntimeError as error:
            is_over = self._seat is not None and self._seat.is_over.is_set()
            if not is_over and (self._seat is None or not self._lost.explain(error, self.step)):
                raise
            raise MembershipChanged("a collective has ended: a rank is lost, or the membership has changed") from error

    def _weigh(self) -> None:
        """Gives the gradients of the next step their weight."""
        position = self._state.place.position
        if not self._sampler.is_over(position):
            share = self._sampler.share(position)
            self._mean.set(share.counted, len(share.whole))

    # ---- the ledger

    def _open_ledger(self, place: Assignment) -> None:
        directory = os.environ.get(AGREED)
        if place.rank == 0 and directory:
            head = Head(place.generation, place.hosts, place.world, self._state.place)
            self._ledger = SampleLedger(Path(directory), head)

    def _close_ledger(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
        self._ledger = None


def _checkpointer() -> Checkpointer | None:
    return Checkpointer(every="60s") if os.environ.get("HPCSTAGE_CHECKPOINT") else None


def _seat() -> Seat | None:
    if path := os.environ.get(VARIABLE):
        return Seat(path, int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        fix = "start it by `hpcstage run --elastic MIN:MAX --survivors keep -- torchrun ...`"
        raise UsageError("Elastic has no agent that says who trains", fix)
    return None


def _let_go(error: BaseException | None) -> None:
    """Lets go of what the frames of an error hold: the model in its group, and the loader."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


MOST_FAILURES = 5
"""An error that looks like that of a collective, so often at one step, is the program's own."""
_OF_A_GROUP = ("gloo", "connection", "broken pipe", "timed out", "timeout", "socket", "process group", "store")
"""Words of errors that a collective ends with."""


class LostRanks:
    """Counts the failures of one training."""

    def __init__(self) -> None:
        self._failed_at = self._failures = 0

    def explain(self, error: RuntimeError, step: int) -> bool:
        """Returns whether a lost rank is the reason of an error that came after so many committed steps."""
        if not _is_of_a_group(error):
            return False
        self._failures = self._failures + 1 if self._failed_at == step else 1
        self._failed_at = step
        return self._failures <= MOST_FAILURES


def _is_of_a_group(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return any(word in str(error).lower() for word in _OF_A_GROUP)


_OF_NEWEST = 0.1
"""The weight of the newest step in the time of a step."""


class TrainingProgress:
    """Follows one process."""

    def __init__(self) -> None:
        self.epochs = 0
        """How many the training has, once that is known."""
        self._step_s = self._stepped_s = 0.0

    def pause(self) -> None:
        """Says that the next step is the first of a membership: what it takes says nothing."""
        self._stepped_s = 0.0

    def stepped(self) -> None:
        """Takes the end of a step."""
        now_s = time.monotonic()
        if self._stepped_s:
            took_s = now_s - self._stepped_s
            self._step_s = took_s if not self._step_s else (1 - _OF_NEWEST) * self._step_s + _OF_NEWEST * took_s
        self._stepped_s = now_s

    def told(self, place: EpochPlace, sampler: ElasticSampler) -> dict[str, float]:
        """Returns what a policy may know."""
        told: dict[str, float] = {"step": place.step, "batch_per_process": sampler.batch_size}
        if self.epochs and sampler.samples:
            done = place.epoch * sampler.samples + place.position
            whole = self.epochs * sampler.samples
            told["share"] = min(1.0, done / whole)
            if self._step_s:
                told["process_s_left"] = max(0, whole - done) / sampler.batch_size * self._step_s
        return told


STORE_S = 30.0
"""The time for which a process tries to reach the store of its next group."""
CONNECT_S = 60.0
"""The time that the processes of a group, which are all there, may take to connect to each other."""


class ElasticGroup:
    """The process group in which this process trains, or will: its store, its forming, and its end."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` bounds its collectives, and the wait for the other processes."""
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None
        self._connections = GroupConnections()

    def form(self, seat: Seat, has_state: bool | None) -> Assignment:
        """Waits for a place in the next membership and makes its group the default one. `has_state`: whether this
        process has a state to go on from, or could load one; None where it cannot tell."""
        self._connections = GroupConnections()
        place = seat.assigned(has_state, self._lead, self._connections)
        store = self._store if place.rank == 0 else None
        if store is None:
            limit = timedelta(seconds=STORE_S)
            store = dist.TCPStore(place.address, place.port, None, False, limit)  # type: ignore[attr-defined]
        named = dist.PrefixStore(f"generation/{place.generation}", store)  # type: ignore[attr-defined]
        self._meet(named, place)
        limit = timedelta(seconds=CONNECT_S)
        dist.init_process_group("gloo", store=named, rank=place.rank, world_size=place.world, timeout=limit)
        dist.distributed_c10d._set_pg_timeout(self._timeout)
        return place

    def complete(self) -> None:
        """Notes that the group has all of its connections, when all ranks are here."""
        dist.barrier()
        self._connections.complete()

    def hang_up(self) -> None:
        """Ends the collectives: whoever waits for this rank need not."""
        self._connections.shut_down()

    def end(self) -> None:
        """Ends the group, which nobody uses any more."""
        gc.collect()  # the group's last user may be in a cycle
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def _lead(self) -> int:
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "localhost", 0, None, True, timedelta(seconds=STORE_S), wait_for_workers=False
        )
        return int(self._store.port)

    def _meet(self, store: Any, place: Assignment) -> None:
        """Waits until all ranks have come: a node may have to start its processes again. Connecting, which nothing
        ends before its limit, then takes little."""
        store.set(f"here/{place.rank}", "")
        store.wait([f"here/{rank}" for rank in range(place.world)], self._timeout)
