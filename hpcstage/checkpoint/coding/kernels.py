"""The kernels of this machine, the fastest first: the system's ISA-L, that of pyeclib's wheel, numpy."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from hpcstage.checkpoint.coding.blocks import Kernel
from hpcstage.checkpoint.coding.isal import IsalKernel
from hpcstage.checkpoint.coding.numpykernel import NumpyKernel


def kernels() -> Iterator[Kernel]:
    """Loads the kernels one by one; numpy's, which comes last, is always there."""
    yield from IsalKernel.found()
    yield NumpyKernel()


@functools.cache
def best_kernel() -> Kernel:
    """Returns the kernel that this process uses."""
    return next(kernels())
