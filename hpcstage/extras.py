"""Knows the packages that hpcstage does without until they are needed, and how they are installed.

The line names packages and not an extra of hpcstage, which is on no package index: its clone need not be there.
"""

from __future__ import annotations

from enum import Enum

from hpcstage.errors import UsageError


class Extra(Enum):
    """The packages of each extra, as in pyproject.toml."""

    CHECKPOINT = ("numpy", "xxhash", "pyeclib")
    TORCH = ("torch", "numpy")
    MPI = ("mpi4py", "mpich")

    @property
    def remedy(self) -> str:
        """Returns how they are installed."""
        return f"pip install {' '.join(self.value)}"


OF_CHECKPOINTS = ("numpy", "xxhash")
"""The packages without which there are no checkpoints: pyeclib is for their erasure code, where nodes are several."""


class MissingPackage(UsageError):
    """Packages that a command needs are not installed for this Python."""

    def __init__(self, names: list[str], extra: Extra) -> None:
        super().__init__(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed", extra.remedy)


def missing(extra: Extra, *names: str) -> MissingPackage | None:
    """Returns the error if some of these packages of an extra are not installed."""
    lacking = [name for name in names if not _can_be_found(name)]
    return MissingPackage(lacking, extra) if lacking else None


def _can_be_found(name: str) -> bool:
    import importlib.util  # takes time, and `run` needs it only here

    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what finds modules says so itself
        return False


def of_import(error: ModuleNotFoundError) -> MissingPackage | None:
    """Returns what an import that failed says to the user; None if it is of no extra."""
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra in Extra if name in extra.value), None)
    return None if extra is None else MissingPackage([name], extra)
