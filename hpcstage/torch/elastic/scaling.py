"""Keeps the optimization the same when the number of ranks changes: a factor of the learning rate, by the linear rule,
and the weight of each rank's gradients.

The factor goes from one value to the other and is applied during the optimizer's step only: schedulers and checkpoints
see the program's own rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RateCourse:
    """How the factor goes: part of the training's state."""

    reference: int = 0
    """The number of ranks for which the program's learning rate is meant: that of the start."""
    lr_from: float = 1.0
    lr_to: float = 1.0
    lr_since: int = 0
    """The factor goes from one value to the other beginning with this step."""

    def factor(self, step: int, warmup_steps: int) -> float:
        """Returns the factor of the step that follows so many."""
        done = min(1.0, (step - self.lr_since + 1) / max(1, warmup_steps)) if self.lr_since else 1.0
        return self.lr_from + (self.lr_to - self.lr_from) * done

    def turned(self, world: int, step: int, warmup_steps: int, *, scales: bool) -> RateCourse:
        """Returns the course for so many ranks from a step on."""
        if not self.reference:
            return replace(self, reference=world)
        to = world / self.reference
        if not scales or self.lr_to == to:
            return self
        return replace(self, lr_from=self.factor(step, warmup_steps), lr_to=to, lr_since=step)


class ScaledRate:
    """Applies the factor to the rates of an optimizer."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, step: Callable[[], int], warmup_steps: int, *, scales: bool
    ) -> None:
        """`step` returns how many steps are committed. Without `scales` the factor stays what it is."""
        self._optimizer = optimizer
        self._step = step
        self._warmup_steps = warmup_steps
        self._scales = scales
        self._own: list[Any] = []
        self.course = RateCourse()
        """That of this membership, which is part of the state from its first step on."""
        optimizer.register_step_pre_hook(lambda *_: self._apply())
        optimizer.register_step_post_hook(lambda *_: self._put_back())

    def turn(self, course: RateCourse, world: int) -> None:
        """Begins a membership of so many ranks, with the course that is part of the state."""
        self.course = course.turned(world, self._step(), self._warmup_steps, scales=self._scales)

    def _apply(self) -> None:
        factor = self.course.factor(self._step(), self._warmup_steps)
        self._own = [group["lr"] for group in self._optimizer.param_groups]
        if factor != 1.0:
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _put_back(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._own, strict=True):
            group["lr"] = rate


class WeightedMean:
    """Averages the gradients of ranks that have different numbers of samples, as if the samples had been one batch: a
    communication hook for DistributedDataParallel.

    DistributedDataParallel divides the sum of the ranks' gradients by the number of ranks. With a loss that is a mean
    over the rank's own samples, that is the gradient of the global batch only if all ranks have as many samples.
    """

    def __init__(self) -> None:
        self.share = 0.0

    def set(self, local: int, whole: int) -> None:
        """Takes the number of samples of this rank in this step, and of all ranks; to be called before `backward`."""
        self.share = local / whole

    @staticmethod
    def hook(mean, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205  PyTorch refuses names as annotations
        """Is given to `register_comm_hook`: takes (WeightedMean, GradBucket) and returns a future of the tensor."""
        work = dist.all_reduce(bucket.buffer().mul_(mean.share), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])
