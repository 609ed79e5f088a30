"""Offers what training code may import: samplers that use caches well, a loader with threads, checkpoints that are
written in the background. Needs PyTorch.

    from hpcstage.torch import BundleRandomSampler, Checkpointer, DataLoader, LocalityAwareSampler, read_file

`hpcstage run` needs none of this and never imports it. These classes are for programs that may be edited: unlike
`hpcstage run` they may change the order of samples, and each says how. All of them work without a running daemon.

A class is imported when it is asked for, so importing this package is cheap; a missing PyTorch is reported only then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcstage.torch.checkpoints.accelerated import AcceleratedState
    from hpcstage.torch.checkpoints.checkpointer import Checkpointer
    from hpcstage.torch.checkpoints.lightningio import LightningCheckpointIO
    from hpcstage.torch.elastic.sampler import ElasticSampler
    from hpcstage.torch.elastic.training import Elastic
    from hpcstage.torch.loader.dataloader import DataLoader
    from hpcstage.torch.loader.threads import turn
    from hpcstage.torch.samplers.bundles import BundleRandomSampler
    from hpcstage.torch.samplers.locality import LocalityAwareSampler
    from hpcstage.torch.samplers.pages import read_file

__all__ = [
    "AcceleratedState",
    "BundleRandomSampler",
    "Checkpointer",
    "DataLoader",
    "Elastic",
    "ElasticSampler",
    "LightningCheckpointIO",
    "LocalityAwareSampler",
    "read_file",
    "turn",
]

_MODULES = {
    "AcceleratedState": "checkpoints.accelerated",
    "BundleRandomSampler": "samplers.bundles",
    "Checkpointer": "checkpoints.checkpointer",
    "DataLoader": "loader.dataloader",
    "Elastic": "elastic.training",
    "ElasticSampler": "elastic.sampler",
    "LightningCheckpointIO": "checkpoints.lightningio",
    "LocalityAwareSampler": "samplers.locality",
    "read_file": "samplers.pages",
    "turn": "loader.threads",
}
_INSTALLED_BY = {
    "torch": "pip install torch numpy",
    "numpy": "pip install torch numpy",
    "xxhash": "pip install xxhash",
    "lightning_fabric": "pip install lightning",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the module has
    """Imports a class when it is first used. Raises ImportError where a package that it needs is missing."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _INSTALLED_BY:
            raise
        needed = "PyTorch 2.1 or newer and NumPy" + ("" if missing in ("torch", "numpy") else f" and {missing}")
        raise ImportError(
            f"hpcstage.torch.{name} needs {needed}, and {missing} is not installed here: {_INSTALLED_BY[missing]}"
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
