"""Loads the samples of a batch side by side in threads, and gives each sample its turn to touch what they share.

The module owns the threads and their waits. A sample's turn has come when all samples before it are loaded, so what is
done in turn is done in the order in which one thread would do it.
"""

# ruff: noqa: ANN401 - datasets, indices and samples are of any type

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data import get_worker_info

from hpcstage.torch.loader import draws

STALL_S = 60.0
"""If no sample is finished for so many seconds, one that waits for its turn may hold what the others need."""
_LOOK_S = 1.0
"""Ctrl-C that comes while a thread falls asleep does not wake it: it is seen when the wait is over."""
_here = threading.local()
_log = logging.getLogger(__name__)
_Work = Callable[[], None]


class GivenUp(BaseException):
    """Unwinds a sample that nobody waits for any more, or that is to be loaded again."""


def turn() -> None:
    """Waits until all samples of the batch before the calling one are loaded, as they are where one thread loads them.

    The function is for datasets whose samples share something that depends on the order, such as a generator of the
    dataset's own: from here to the sample's end no other sample of the same worker is past its `turn`. It returns at
    once in a thread that is not loading a sample for a loader.
    """
    sample: _Sample | None = getattr(_here, "sample", None)
    if sample is not None:
        sample.wait_for_turn()
        _here.sample = None


@dataclass
class ThreadedDataset:
    """Takes the place of a dataset in an iterator of PyTorch, which asks it for whole batches."""

    dataset: Any
    threads: int
    _queue: SimpleQueue[_Work | None] | None = None
    _is_threaded: bool = True

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        """Loads one sample, where there are no batches."""
        return self.dataset[index]

    def __getitems__(self, indices: Any) -> list[Any]:
        """Loads a batch. Raises the error of the first sample that has one."""
        if self._queue is None:
            self._queue = self._started()
        if not self._is_threaded:
            return [self.dataset[index] for index in indices]
        batch = _Batch(self.dataset, list(indices))
        for sample in batch.samples:
            self._queue.put(sample.run)
        return batch.collected()

    def _started(self) -> SimpleQueue[_Work | None]:
        queue: SimpleQueue[_Work | None] = SimpleQueue()
        if not draws.install(turn):
            _log.warning("threads_per_worker has no effect: the generators of PyTorch or NumPy are not known here")
            self._is_threaded = False
            return queue
        for number in range(self.threads):
            threading.Thread(target=_serve, args=(queue,), name=f"hpcstage-loader-{number}", daemon=True).start()
        weakref.finalize(self, _end, queue, self.threads)
        return queue


@dataclass(frozen=True)
class WorkerStart:
    """What a loader's worker does first: PyTorch's facts about the worker name the dataset that the program made."""

    own: Callable[[int], None] | None
    """The program's `worker_init_fn`."""

    def __call__(self, worker: int) -> None:
        """Runs in the worker, before it makes its fetcher."""
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # PyTorch keeps it from being changed
        if self.own is not None:
            self.own(worker)


def _serve(queue: SimpleQueue[_Work | None]) -> None:
    # PyTorch limits a worker to one processor, but libraries keep the limit for each thread.
    torch.set_num_threads(torch.get_num_threads())
    while (work := queue.get()) is not None:
        work()
        del work  # an idle thread keeps no sample


def _end(queue: SimpleQueue[_Work | None], threads: int) -> None:
    for _ in range(threads):
        queue.put(None)


class _Batch:
    """Samples that are waited for together."""

    def __init__(self, dataset: Any, indices: Sequence[Any]) -> None:
        modes = _Modes()
        self.changed = threading.Condition()
        self.samples = [_Sample(self, place, dataset, index, modes) for place, index in enumerate(indices)]
        self.ready = 0
        """The number of samples, counted from the first, that are loaded."""
        self.is_over = False
        """Whether nobody waits for its samples any more."""

    def collected(self) -> list[Any]:
        """Waits for all samples, or the error of the first that has one."""
        try:
            with self.changed:
                while not self.changed.wait_for(self._is_settled, _LOOK_S):
                    pass
            error = self.samples[self.ready].error if self.ready < len(self.samples) else None
            if error is not None:
                raise error
            return [sample.value for sample in self.samples]
        finally:
            error = None  # its traceback holds this frame
            with self.changed:
                self.is_over = True
                self.samples = []
                self.changed.notify_all()

    def advance(self) -> None:
        """Counts the samples that are loaded. A sample behind an error is never counted, and so never has its turn."""
        while self.ready < len(self.samples) and self.samples[self.ready].is_loaded:
            self.ready += 1
        self.changed.notify_all()

    def _is_settled(self) -> bool:
        return self.ready == len(self.samples) or self.samples[self.ready].error is not None


class _Sample:
    """One sample of a batch."""

    def __init__(self, batch: _Batch, place: int, dataset: Any, index: Any, modes: _Modes) -> None:
        self._batch = batch
        self._place = place
        self._load = lambda: modes.load(dataset, index)
        self._context = contextvars.copy_context()
        self._is_to_repeat = False
        self.is_loaded = False
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Loads the sample in the calling thread, which is one of the pool's."""
        if self._batch.is_over:
            return
        _here.sample, value, error = self, None, None
        try:
            value, error = self._loaded()
            if self._is_to_repeat:  # also where the dataset has caught what unwound it
                self.wait_for_turn()
                value, error = self._loaded()
        except GivenUp:  # nobody waits for it any more
            return
        finally:
            _here.sample = None
        with self._batch.changed:
            self.value, self.error, self.is_loaded = value, error, error is None
            self._batch.advance()

    def wait_for_turn(self) -> None:
        """Waits for the turn of the sample. Raises GivenUp if the turn will not come in this try."""
        batch = self._batch
        with batch.changed:
            while batch.ready < self._place and not batch.is_over:
                before = batch.ready
                if not batch.changed.wait(STALL_S) and batch.ready == before and not self._is_to_repeat:
                    self._is_to_repeat = True
                    _log.warning(
                        "a sample waited for its turn and none was finished: perhaps it draws random numbers while it "
                        "holds a lock that others need. It is loaded again in its turn; draw outside the lock."
                    )
                    raise GivenUp
            if batch.is_over:
                raise GivenUp

    def _loaded(self) -> tuple[Any, BaseException | None]:
        try:
            return self._context.run(self._load), None
        except BaseException as error:  # noqa: BLE001 - raised where the batch is collected
            return None, error


class _Modes:
    """What is set in the thread that wants a batch and would be different in a new one."""

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        asked: Any = getattr(torch, "get_default_device", None)
        device = asked() if asked is not None else None
        self._device = device if device is not None and device.type != "cpu" else None

    def load(self, dataset: Any, index: Any) -> Any:
        """Loads a sample in any thread as in that one."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            if self._device is not None:
                stack.enter_context(self._device)
            stack.enter_context(draws.TorchDraws(turn))
            return dataset[index]
