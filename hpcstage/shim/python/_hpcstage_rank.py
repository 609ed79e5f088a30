"""Finds out which virtual node this process is on: ranks are dealt to nodes in blocks, as launchers do it. Pure."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping

RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def node_of(env: MutableMapping[str, str], nodes: int) -> int:
    """Returns the node of the rank that the environment names; 0 if it names none that can be."""
    rank, size = _first(env, RANK), _first(env, SIZE)
    if rank is None or size is None or rank >= size:
        return 0
    return rank * nodes // size


def tell(env: MutableMapping[str, str], node_dir: bytes, sock: bytes) -> None:
    """Sets what programs may ask the environment to what is right for this node."""
    found = {"NODE_DIR": node_dir, "LOCAL_DIR": node_dir + b"/store", "SOCKET": sock}
    for name, value in found.items():
        env["HPCSTAGE_" + name] = value.decode("utf-8", "surrogateescape")


def _first(env: MutableMapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = env.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
    return None
