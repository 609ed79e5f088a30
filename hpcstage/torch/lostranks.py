"""Tells the errors with which collectives end, because a rank is lost, from those of the program.

The module owns how such an error looks, and how often one step may end so before it is the program's own.
"""

from __future__ import annotations

import torch.distributed as dist

MOST_FAILURES = 5
"""An error that looks like that of a collective, so often at one step, is the program's own."""
_OF_A_GROUP = ("gloo", "connection", "broken pipe", "timed out", "timeout", "socket", "process group", "store")
"""Words of errors that a collective ends with."""


class LostRanks:
    """Counts the failures of one training."""

    def __init__(self) -> None:
        self._failed_at = self._failures = 0

    def explain(self, error: RuntimeError, step: int) -> bool:
        """Returns whether a lost rank is the reason of an error that came after so many committed steps."""
        if not _is_of_a_group(error):
            return False
        self._failures = self._failures + 1 if self._failed_at == step else 1
        self._failed_at = step
        return self._failures <= MOST_FAILURES


def _is_of_a_group(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return any(word in str(error).lower() for word in _OF_A_GROUP)
