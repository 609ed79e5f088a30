"""The process group of one membership: its store, its forming, and its end.

The module owns the waits while a group forms. `seat` says who is in it; `connections` ends its collectives.
"""

# ruff: noqa: ANN401 - PyTorch's stores are declared only where PyTorch has them

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpcstage.torch.elastic.connections import GroupConnections
from hpcstage.torch.elastic.seat import Assignment, Seat

STORE_S = 30.0
"""The time for which a process tries to reach the store of its next group."""
CONNECT_S = 60.0
"""The time that the processes of a group, which are all there, may take to connect to each other."""


class ElasticGroup:
    """The group in which this process trains, or will."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` bounds its collectives, and the wait for the other processes."""
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None
        self._connections = GroupConnections()

    def form(self, seat: Seat, has_state: bool | None) -> Assignment:
        """Waits for a place in the next membership and makes its group the default one. `has_state`: whether this
        process has a state to go on from, or could load one; None where it cannot tell."""
        self._connections = GroupConnections()
        place = seat.assigned(has_state, self._lead, self._connections)
        store = self._store if place.rank == 0 else None
        if store is None:
            limit = timedelta(seconds=STORE_S)
            store = dist.TCPStore(place.address, place.port, None, False, limit)  # type: ignore[attr-defined]
        named = dist.PrefixStore(f"generation/{place.generation}", store)  # type: ignore[attr-defined]
        self._meet(named, place)
        limit = timedelta(seconds=CONNECT_S)
        dist.init_process_group("gloo", store=named, rank=place.rank, world_size=place.world, timeout=limit)
        dist.distributed_c10d._set_pg_timeout(self._timeout)
        return place

    def complete(self) -> None:
        """Notes that the group has all of its connections, when all ranks are here."""
        dist.barrier()
        self._connections.complete()

    def hang_up(self) -> None:
        """Ends the collectives: whoever waits for this rank need not."""
        self._connections.shut_down()

    def end(self) -> None:
        """Ends the group, which nobody uses any more."""
        gc.collect()  # the group's last user may be in a cycle
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def _lead(self) -> int:
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "localhost", 0, None, True, timedelta(seconds=STORE_S), wait_for_workers=False
        )
        return int(self._store.port)

    def _meet(self, store: Any, place: Assignment) -> None:
        """Waits until all ranks have come: a node may have to start its processes again. Connecting, which nothing
        ends before its limit, then takes little."""
        store.set(f"here/{place.rank}", "")
        store.wait([f"here/{rank}" for rank in range(place.world)], self._timeout)
