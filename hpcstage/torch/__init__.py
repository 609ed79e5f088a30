"""Offers what training code may import: samplers that use caches well, and a loader with threads. Needs PyTorch.

    from hpcstage.torch import BundleRandomSampler, DataLoader, LocalityAwareSampler, read_file

`hpcstage run` needs none of this and never imports it. These classes are for programs that may be edited: unlike
`hpcstage run` they may change the order of samples, and each says how. All of them work without a running daemon.

A class is imported when it is asked for, so importing this package is cheap; a missing PyTorch is reported only then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcstage.torch.bundle import BundleRandomSampler
    from hpcstage.torch.loader import DataLoader
    from hpcstage.torch.locality import LocalityAwareSampler
    from hpcstage.torch.pages import read_file

__all__ = ["BundleRandomSampler", "DataLoader", "LocalityAwareSampler", "read_file"]

_MODULES = {
    "BundleRandomSampler": "bundle",
    "DataLoader": "loader",
    "LocalityAwareSampler": "locality",
    "read_file": "pages",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the module has
    """Imports a class when it is first used. Raises ImportError where PyTorch or NumPy is missing."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "numpy"):
            raise
        raise ImportError(
            f"hpcstage.torch.{name} needs PyTorch 2.1 or newer and NumPy, and {missing} is not installed here: "
            "pip install torch numpy"
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
