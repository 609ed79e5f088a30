"""Training that goes on in the same processes when nodes are lost or join.

`Elastic` owns the sequence: a place in the next membership, a process group, the state that counts, the training loop,
and all of that again after a change. `seat` says who trains, `handover` moves the state, `elasticsampler` divides the
epoch, `hangup` ends collectives. The program's own loop is a function that is called again.
"""

# ruff: noqa: ANN401 - models and optimizers are whatever the program has

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpcstage import stderr
from hpcstage.elastic.changed import MembershipChanged
from hpcstage.elastic.ledger import Head, SampleLedger, Step
from hpcstage.elastic.seats import AGREED
from hpcstage.errors import UsageError
from hpcstage.torch.checkpointer import Checkpointer
from hpcstage.torch.elasticsampler import ElasticSampler
from hpcstage.torch.handover import hand_over
from hpcstage.torch.hangup import GroupConnections
from hpcstage.torch.seat import Assignment, Seat
from hpcstage.torch.weights import WeightedMean

T = TypeVar("T")
STORE_S = 30.0
"""The time for which a process tries to reach the store of its next group."""
CONNECT_S = 60.0
"""The time that the processes of a group, which are all there, may take to connect to each other."""
MOST_FAILURES = 5
"""An error that looks like that of a collective, so often at one step, is the program's own."""
_OF_A_GROUP = ("gloo", "connection", "broken pipe", "timed out", "timeout", "socket", "process group", "store")
"""Words of errors that a collective ends with."""


@dataclass(frozen=True)
class Reached:
    """How far the training is: part of its state."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    """The samples of the epoch that count."""
    reference: int = 0
    """The number of ranks for which the program's learning rate is meant: that of the start."""
    lr_from: float = 1.0
    lr_to: float = 1.0
    lr_since: int = 0
    """The factor of the learning rate, which goes from one value to the other beginning with this step."""


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
        self._model, self._optimizer, self._sampler, self._scheduler = model, optimizer, sampler, scheduler
        self._scales_lr, self._warmup_steps = lr == "linear", warmup_steps
        self._timeout = timedelta(seconds=timeout_s)
        self._ddp = ddp
        self._checkpointer = checkpointer or _checkpointer()
        self._seat = Seat.taken()
        if self._seat is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            fix = "start it by `hpcstage run --elastic MIN:MAX --survivors keep -- torchrun ...`"
            raise UsageError("Elastic has no agent that says who trains", fix)
        self._place = Reached()
        self._last: Step | None = None
        self._has_state = self._is_torn = False
        self._buffers: list[torch.Tensor] = []
        self._net: torch.nn.Module | None = None
        self._mean = WeightedMean()
        self._store: Any = None
        self._connections = GroupConnections()
        self._ledger: SampleLedger | None = None
        self._lrs: list[Any] = []
        self._scaled = self._place
        """The place, with the learning rate of this membership, which is part of the state from its first step on."""
        self._failed_at = self._failures = 0
        self._epochs = 0
        self._step_s = self._stepped_s = 0.0
        self.rank, self.world, self.generation = 0, 1, 0
        optimizer.register_step_pre_hook(lambda *_: self._begin_step())
        optimizer.register_step_post_hook(lambda *_: self._end_step())

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self._place.step

    @property
    def epoch(self) -> int:
        """The epoch in which the training is."""
        return self._place.epoch

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
        self._epochs = count
        while self._place.epoch < count:
            place = self._place
            self._sampler.begin(epoch=place.epoch, position=place.position, rank=self.rank, world=self.world)
            self._weigh()
            yield place.epoch
            self._place = replace(self._place, epoch=self._place.epoch + 1, position=0)
            self._scaled = replace(self._scaled, epoch=self._place.epoch, position=0)

    def commit(self, batches: int = 1) -> None:
        """Says that the optimizer's step is done, with so many of the sampler's batches. Raises MembershipChanged if
        the membership is over; the step counts."""
        ids: list[int] = []
        for _ in range(batches):
            whole = self._sampler.share(self._place.position + len(ids)).whole
            ids += whole
        place = replace(self._scaled, step=self._place.step + 1, position=self._place.position + len(ids))
        self._last = Step(place.step, place.epoch, tuple(ids))
        self._place, self._scaled, self._has_state, self._is_torn = place, place, True, False
        self._keep_buffers()
        if self._ledger is not None:
            self._ledger.add(self._last)
        if self.rank == 0 and self._checkpointer is not None:
            self._checkpointer.save(self.state_dict, place.step)
        self._weigh()
        self._time_step()
        self.alive()

    def alive(self) -> None:
        """Says that the program goes on, in something that is no step and takes long, such as a validation. Raises
        MembershipChanged if the membership is over."""
        if self._seat is not None:
            self._seat.stepped(self._progress)
            if self._seat.is_over.is_set():
                raise MembershipChanged("the membership has changed")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the training, as it was committed last."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "place": asdict(self._place),
            "last": None if self._last is None else {**asdict(self._last), "ids": list(self._last.ids)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self._place = self._scaled = Reached(**state["place"])
        last = state["last"]
        self._last = None if last is None else Step(last["step"], last["epoch"], tuple(last["ids"]))
        self._is_torn = False
        self._keep_buffers()

    # ---- a membership

    def _join(self) -> None:
        """Takes a place in the next membership, with the state that counts."""
        self._optimizer.zero_grad(set_to_none=True)
        self._stepped_s = 0.0
        if self._seat is None:
            self._restore_alone()
            self._net = self._model
            return
        self._connections = GroupConnections()
        seat = self._seat.assigned(self._lead, self._connections.shut_down)
        self._form(seat)
        self._agree()
        self._scale(seat.world)
        self._net = DistributedDataParallel(self._model, **self._ddp)
        self._net.register_comm_hook(self._mean, WeightedMean.hook)
        dist.barrier()
        self._connections.complete()
        self._open_ledger(seat)
        if seat.rank == 0:
            stderr.say(f"elastic: generation {seat.generation}: {seat.world} ranks go on after step {self.step}")

    def _lead(self) -> int:
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "localhost", 0, None, True, timedelta(seconds=STORE_S), wait_for_workers=False
        )
        return int(self._store.port)

    def _form(self, seat: Assignment) -> None:
        self.rank, self.world, self.generation = seat.rank, seat.world, seat.generation
        store = self._store if seat.rank == 0 else None
        if store is None:
            limit = timedelta(seconds=STORE_S)
            store = dist.TCPStore(seat.address, seat.port, None, False, limit)  # type: ignore[attr-defined]
        named = dist.PrefixStore(f"generation/{seat.generation}", store)  # type: ignore[attr-defined]
        self._meet(named)
        limit = timedelta(seconds=CONNECT_S)
        dist.init_process_group("gloo", store=named, rank=seat.rank, world_size=seat.world, timeout=limit)
        dist.distributed_c10d._set_pg_timeout(self._timeout)

    def _meet(self, store: Any) -> None:
        """Waits until all ranks have come: a node may have to start its processes again. Connecting, which nothing
        ends before its limit, then takes little."""
        store.set(f"here/{self.rank}", "")
        store.wait([f"here/{rank}" for rank in range(self.world)], self._timeout)

    def _agree(self) -> None:
        """Brings all ranks to the newest state that one of them has."""
        if self._buffers:
            self._put_buffers_back()
        best, source, is_same = self._newest()
        if source is None:
            self._load_checkpoint()
            best, source, is_same = self._newest()
        if source is None or not is_same:
            state = hand_over(self.state_dict() if self.rank == (source or 0) else None, source or 0)
            if self.rank != (source or 0):
                self.load_state_dict(state)
        self._has_state = self._has_state or best > 0

    def _newest(self) -> tuple[int, int | None, bool]:
        """Returns the newest step, the first rank that has its state, if one has, and whether all have it."""
        is_good = self._has_state and not self._is_torn
        mine = torch.tensor([self._place.step, self._place.epoch, self._place.position, int(is_good)])
        all_of = [torch.zeros_like(mine) for _ in range(self.world)]
        dist.all_gather(all_of, mine)
        found = [tuple(one.tolist()) for one in all_of]
        good = [one[:3] for one in found if one[3]]
        if not good:
            return 0, None, False
        best = max(good, key=lambda one: (one[0], one[1]))
        source = found.index((*best, 1))
        return int(best[0]), source, all(one == (*best, 1) for one in found)

    def _load_checkpoint(self) -> None:
        loaded = None if self._checkpointer is None else self._checkpointer.load()
        if loaded is not None:
            self.load_state_dict(loaded.state)
            self._has_state = True
        elif self._is_torn:
            raise UsageError("a step was not committed, and no rank has the state before it", "call commit behind step")

    def _restore_alone(self) -> None:
        if not self._has_state:
            self._load_checkpoint()
        self._scale(1)

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
        """Leaves the membership: whoever waits for this rank in a collective need not."""
        if self._seat is not None:
            self._seat.leave()
        self._connections.shut_down()
        self._net = None
        self._close_ledger()
        gc.collect()  # the group's last user may be in a cycle
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    @contextlib.contextmanager
    def _surfaced(self) -> Iterator[None]:
        """Makes MembershipChanged of the errors with which collectives end."""
        try:
            yield
        except RuntimeError as error:
            is_over = self._seat is not None and self._seat.is_over.is_set()
            if not is_over and (self._seat is None or not _is_of_a_group(error) or self._fails_again()):
                raise
            raise MembershipChanged("a collective has ended: a rank is lost, or the membership has changed") from error

    def _fails_again(self) -> bool:
        """Returns whether the same step has ended so too often for a loss to be the reason."""
        self._failures = self._failures + 1 if self._failed_at == self.step else 1
        self._failed_at = self.step
        return self._failures > MOST_FAILURES

    # ---- a step

    def _begin_step(self) -> None:
        self._is_torn = True
        factor = self._factor()
        self._lrs = [group["lr"] for group in self._optimizer.param_groups]
        if factor != 1.0:
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _end_step(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = rate

    def _factor(self) -> float:
        """Returns the factor of the learning rate for the step that comes next."""
        return _factor(self._scaled, self._warmup_steps)

    def _scale(self, world: int) -> None:
        place = self._place
        to = world / (place.reference or world)
        if not place.reference:
            self._scaled = replace(place, reference=world)
        elif self._scales_lr and place.lr_to != to:
            now = _factor(place, self._warmup_steps)
            self._scaled = replace(place, lr_from=now, lr_to=to, lr_since=place.step)
        else:
            self._scaled = place

    def _weigh(self) -> None:
        if not self._sampler.is_over(self._place.position):
            share = self._sampler.share(self._place.position)
            self._mean.set(share.counted, len(share.whole))

    def _keep_buffers(self) -> None:
        """Copies what a forward pass changes before its step counts."""
        buffers = [*self._model.buffers()]
        if len(self._buffers) != len(buffers):
            self._buffers = [torch.empty_like(buffer) for buffer in buffers]
        with torch.no_grad():
            for kept, buffer in zip(self._buffers, buffers, strict=True):
                kept.copy_(buffer)

    def _put_buffers_back(self) -> None:
        with torch.no_grad():
            for kept, buffer in zip(self._buffers, self._model.buffers(), strict=True):
                buffer.copy_(kept)

    def _progress(self) -> dict[str, float]:
        """Returns what a policy may know of the training."""
        place, sampler = self._place, self._sampler
        told: dict[str, float] = {"step": place.step, "batch_per_process": sampler.batch_size}
        if self._epochs and sampler.samples:
            done = place.epoch * sampler.samples + place.position
            whole = self._epochs * sampler.samples
            told["share"] = min(1.0, done / whole)
            if self._step_s:
                told["process_s_left"] = max(0, whole - done) / sampler.batch_size * self._step_s
        return told

    def _time_step(self) -> None:
        """Follows the time that a step takes."""
        now_s = time.monotonic()
        if self._stepped_s:
            took_s = now_s - self._stepped_s
            self._step_s = took_s if not self._step_s else 0.9 * self._step_s + 0.1 * took_s
        self._stepped_s = now_s

    # ---- the ledger

    def _open_ledger(self, seat: Assignment) -> None:
        directory = os.environ.get(AGREED)
        if seat.rank == 0 and directory:
            head = Head(seat.generation, seat.hosts, seat.world, self._place.step, self._last)
            self._ledger = SampleLedger(Path(directory), head)

    def _close_ledger(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
        self._ledger = None


def _checkpointer() -> Checkpointer | None:
    return Checkpointer(every="60s") if os.environ.get("HPCSTAGE_CHECKPOINT") else None


def _factor(place: Reached, warmup_steps: int) -> float:
    done = min(1.0, (place.step - place.lr_since + 1) / max(1, warmup_steps)) if place.lr_since else 1.0
    return place.lr_from + (place.lr_to - place.lr_from) * done


def _is_of_a_group(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return any(word in str(error).lower() for word in _OF_A_GROUP)


def _let_go(error: BaseException | None) -> None:
    """Lets go of what the frames of an error hold: the model in its group, and the loader."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
