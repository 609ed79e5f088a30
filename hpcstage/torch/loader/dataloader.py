"""Extends PyTorch's loader by threads in each worker, and by this package's samplers as options.

The module owns the options. `threads` owns what the threads do.
"""

# ruff: noqa: ANN401 - samplers, contexts and generators are of any type, as in PyTorch

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Subset

from hpcstage.torch.loader.threads import ThreadedDataset, WorkerStart
from hpcstage.torch.samplers.bundles import BundleRandomSampler
from hpcstage.torch.samplers.locality import LocalityAwareSampler

T_co = TypeVar("T_co", covariant=True)


# The base class has no type parameters here: PyTorch's has one, and will have two.
class DataLoader(torch.utils.data.DataLoader, Generic[T_co]):  # type: ignore[type-arg]
    """Works as `torch.utils.data.DataLoader` does; its workers load the samples of a batch side by side.

    >>> import torch
    >>> from torch.utils.data import Dataset
    >>> class Squares(Dataset):
    ...     def __len__(self):
    ...         return 6
    ...     def __getitem__(self, index):
    ...         return torch.tensor(index * index)
    >>> for batch in DataLoader(Squares(), batch_size=4, threads_per_worker=2):
    ...     print(batch.tolist())
    [0, 1, 4, 9]
    [16, 25]

    All other arguments, attributes, errors and seeds are PyTorch's, and so are the batches, bit for bit, however many
    threads there are: a sample that draws from a global generator of torch, NumPy or random first waits until all
    samples before it are done. What it does before that, such as reading and decoding, overlaps.

    * `threads_per_worker`: how many samples each worker (or the main process, without workers) loads at once. The
      dataset's `__getitem__` must allow that: no file handle with a position that samples share, for example. With one
      thread this is PyTorch's loader. Datasets that are iterable or fetch whole batches are loaded as by PyTorch.
    * `bundle_ratio`: with `shuffle=True`, the order is `BundleRandomSampler`'s; `seed` is its seed.
    * `locality`: batches are `LocalityAwareSampler`'s; `seed` is its seed.
    * `reproducible`: False lets samples draw without waiting. That is faster where the work comes after the first draw,
      and what a sample draws then depends on timing.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        threads_per_worker: int = 1,
        bundle_ratio: float | None = None,
        locality: bool = False,
        seed: int = 0,
        reproducible: bool = True,
        **options: Any,
    ) -> None:
        if threads_per_worker < 1:
            raise ValueError("threads_per_worker option should be at least 1")
        if bundle_ratio is not None or locality:
            if sampler is not None or batch_sampler is not None:
                raise ValueError("bundle_ratio and locality options are mutually exclusive with samplers")
            if isinstance(dataset, IterableDataset):
                raise ValueError("bundle_ratio and locality options need indices, not an IterableDataset")
        samples: Any = dataset
        if bundle_ratio is not None:
            if locality:
                raise ValueError("bundle_ratio option is mutually exclusive with locality")
            if not shuffle:
                raise ValueError("bundle_ratio option needs shuffle=True")
            sampler, shuffle = BundleRandomSampler(samples, bundle_ratio=bundle_ratio, seed=seed), None
        if locality:
            if batch_size is None:
                raise ValueError("locality option needs a batch_size")
            if shuffle is False:
                raise ValueError("locality option shuffles: it is mutually exclusive with shuffle=False")
            batch_sampler = LocalityAwareSampler(samples, batch_size, seed=seed, drop_last_batch=drop_last)
            batch_size, shuffle, drop_last = 1, None, False
        self.threads_per_worker = threads_per_worker
        self.reproducible = reproducible
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            **options,
        )

    def set_epoch(self, epoch: int) -> None:
        """Tells the samplers that want to know it which epoch is next, as `DistributedSampler.set_epoch`."""
        wants = [self.batch_sampler, self.sampler, getattr(self.batch_sampler, "sampler", None)]
        for sampler in {id(one): one for one in wants}.values():
            tell = getattr(sampler, "set_epoch", None)
            if callable(tell):
                tell(epoch)

    def _get_iterator(self) -> Any:
        """Returns PyTorch's iterator, of a dataset that loads batches with threads."""
        given: tuple[Any, Any] = self.dataset, self.worker_init_fn
        if self.threads_per_worker == 1 or not _has_samples(self.dataset):
            return super()._get_iterator()
        own = vars(self)  # PyTorch keeps others from changing these attributes
        own["dataset"] = ThreadedDataset(self.dataset, self.threads_per_worker, self.reproducible)
        own["worker_init_fn"] = WorkerStart(self.worker_init_fn)
        try:
            return super()._get_iterator()
        finally:
            own["dataset"], own["worker_init_fn"] = given


def _has_samples(dataset: Any) -> bool:
    """Returns whether the samples of a batch are asked for one by one: not those of a stream, nor of a dataset that
    fetches batches by itself."""
    if isinstance(dataset, IterableDataset):
        return False
    if type(dataset) is Subset:  # its own way to fetch a batch is that of what it holds
        return _has_samples(dataset.dataset)
    return not getattr(dataset, "__getitems__", None)
