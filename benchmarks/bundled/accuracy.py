"""Does the order of bundles cost accuracy? A small network, trained for real on images made for it.

Owns the images, the network and one training. The images are in order of class, as those of an ImageFolder: ten
classes, each a smooth pattern that is shifted, scaled and drowned in noise, so that it can be learnt, but not at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler

CLASSES = 10
PIXELS = 16
BATCH = 32
NOISE = 2.4
LEARNING_RATE = 0.02
TEST_IMAGES = 4000
# 97.5 % of Student's t, by degrees of freedom.
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Images:
    """Images in order of class."""

    pixels: Tensor
    labels: Tensor


def images(count: int, seed: int) -> Images:
    """`count` of them, the same number of each class; other seeds are other images of the same classes."""
    classes = torch.Generator().manual_seed(0)
    coarse = torch.randn(CLASSES, 3, 4, 4, generator=classes)
    patterns = functional.interpolate(coarse, PIXELS, mode="bilinear")
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) * CLASSES // count
    shifts = torch.randint(-3, 4, (count, 2), generator=random).tolist()
    shifted = [patterns[label].roll(shift, (1, 2)) for label, shift in zip(labels.tolist(), shifts, strict=True)]
    scale = 0.5 + torch.rand(count, 1, 1, 1, generator=random)
    noise = NOISE * torch.randn(count, 3, PIXELS, PIXELS, generator=random)
    return Images(torch.stack(shifted) * scale + noise, labels)


def train(data: Images, test: Images, sampler: Iterable[int], epochs: int, seed: int) -> float:
    """Trains with the sampler's order and gives the share of the test images that are then known."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = _network()
            _fit(model, data, sampler, epochs)
            return _accuracy(model, test)
    finally:
        torch.set_num_threads(threads)


def _network() -> nn.Module:
    def layer(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*layer(3, 12), *layer(12, 24), nn.Flatten(), nn.Linear(24 * (PIXELS // 4) ** 2, CLASSES))


def _fit(model: nn.Module, data: Images, sampler: Iterable[int], epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=1e-3)
    # To nothing at the last step: what the last batches were like plays no part in the accuracy.
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * (len(data.labels) // BATCH))
    for _ in range(epochs):
        for batch in BatchSampler(sampler, BATCH, drop_last=True):
            loss = functional.cross_entropy(model(data.pixels[batch]), data.labels[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            rates.step()


@torch.no_grad()
def _accuracy(model: nn.Module, test: Images) -> float:
    model.eval()
    return float((model(test.pixels).argmax(1) == test.labels).float().mean())


def loss_and_noise(base: Sequence[float], ours: Sequence[float]) -> tuple[float, float] | None:
    """By how many points of accuracy `ours` is below, seed by seed, and half the 95 % interval of that mean."""
    if len(base) != len(ours) or len(base) - 1 not in _STUDENT:
        return None
    lost = [100 * (a - b) for a, b in zip(base, ours, strict=True)]
    return statistics.fmean(lost), _STUDENT[len(lost) - 1] * statistics.stdev(lost) / math.sqrt(len(lost))
