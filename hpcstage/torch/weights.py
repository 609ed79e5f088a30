"""Averages the gradients of ranks that have different numbers of samples, as if the samples had been one batch.

DistributedDataParallel adds up the ranks' gradients and divides by the number of ranks. With a loss that is a mean over
the rank's own samples, that is the gradient of the global batch only if all ranks have the same number of samples;
otherwise a rank has to be weighted by `local * ranks / whole`. The module owns that weight and two ways to apply it;
the sampler decides how many samples each rank has.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gradient_weight(local: int, whole: int, ranks: int) -> float:
    """Returns the factor by which a rank's loss (a mean over its samples) is multiplied before `backward`.

    local: samples of this rank in this step. whole: samples of all ranks, `sampler.global_size(step)`. ranks: their
    number.

        sampler = LocalityAwareSampler(dataset, 32, balance=False)
        for step, (inputs, labels) in enumerate(DataLoader(dataset, batch_sampler=sampler)):
            loss = criterion(model(inputs), labels)
            weight = gradient_weight(len(labels), sampler.global_size(step), sampler.num_replicas)
            (loss * weight).backward()

    >>> import torch
    >>> losses = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> ranks = losses[:3], losses[3:]
    >>> weighted = [part.mean() * gradient_weight(len(part), 5, 2) for part in ranks]
    >>> (sum(weighted) / 2).item(), losses.mean().item()
    (3.0, 3.0)
    """
    if not 0 <= local <= whole or whole < 1 or ranks < 1:
        raise ValueError(f"{local} of {whole} samples on one of {ranks} ranks")
    return local * ranks / whole


class WeightedMean:
    """Applies the same weight without a change of the loss, as a communication hook for DistributedDataParallel.

        mean = WeightedMean()
        model.register_comm_hook(mean, WeightedMean.hook)
        for step, (inputs, labels) in enumerate(loader):
            mean.set(len(labels), sampler.global_size(step))
            criterion(model(inputs), labels).backward()

    >>> mean = WeightedMean()
    >>> mean.set(5, 8)
    >>> mean.share
    0.625
    """

    def __init__(self, group: Any = None) -> None:  # noqa: ANN401  a ProcessGroup
        self.group = group
        self.share = 0.0

    def set(self, local: int, whole: int) -> None:
        """Takes the number of samples of this rank in this step, and of all ranks; to be called before `backward`."""
        self.share = gradient_weight(local, whole, 1)

    @staticmethod
    def hook(mean, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205  PyTorch refuses names as annotations
        """Is given to `register_comm_hook`: takes (WeightedMean, GradBucket) and returns a future of the tensor."""
        summed = bucket.buffer().mul_(mean.share)
        work = dist.all_reduce(summed, group=mean.group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])
