"""hpcstage: one word before a training command makes the disk inside each compute node work for the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

__version__ = "0.1.0"
__all__ = ["__version__", "order"]


def order(paths: Iterable[str | bytes | os.PathLike[str]]) -> bool:
    """Announces the files that this program will read, in this order. Returns True if a daemon of `hpcstage run` took
    it.

    The function does nothing outside of `hpcstage run`, so it may stay in the program.
    """
    from hpcstage.announce import order as announce

    return announce(paths)
