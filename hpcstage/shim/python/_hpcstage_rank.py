"""Finds out which virtual node this process is on: ranks are dealt to nodes in blocks, as launchers do it. Pure."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping

LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""A rank and a number of ranks belong together only if one launcher set both."""


def node_of(env: MutableMapping[str, str], nodes: int) -> int:
    """Returns the node that the environment names, or that of its rank; 0 if it names none that can be."""
    named = _number(env.get("HPCSTAGE_VIRTUAL_NODE", ""))
    if named is not None:
        return named if named < nodes else 0
    for rank_name, size_name in LAUNCHERS:
        rank, size = _number(env.get(rank_name, "")), _number(env.get(size_name, ""))
        if rank is not None and size is not None:
            return rank * nodes // size if rank < size else 0
    return 0


def tell(env: MutableMapping[str, str], node_dir: bytes, sock: bytes) -> None:
    """Sets what programs may ask the environment to what is right for this node."""
    found = {"NODE_DIR": node_dir, "STORE": node_dir + b"/store", "SOCKET": sock}
    for name, value in found.items():
        env["HPCSTAGE_" + name] = value.decode("utf-8", "surrogateescape")


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
