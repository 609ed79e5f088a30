"""The entry point of the group `torchrun.handlers`. Every `torchrun` loads it, whatever its backend: it imports nothing
before it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns what makes a handler."""
    return _create


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    from hpcstage.elastic.rendezvous import create_handler

    return create_handler(parameters)
