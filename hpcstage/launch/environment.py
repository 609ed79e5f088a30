"""The environments of the command and of the daemon: values in, values out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hpcstage import __version__

MPI_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "HYDRA_", "HYDI_", "MPIR_", "MPI_", "I_MPI_", "MV2_", "PALS_", "PRTE_")


def for_command(
    env: Mapping[str, str], *, shim_dir: Path, node_dir: Path, run_dir: Path, run_id: str, sock: Path
) -> dict[str, str]:
    """The caller's environment with the shim in front of PYTHONPATH and the names that tell where things are."""
    ours = {
        "HPCSTAGE_ACTIVE": run_id,
        "HPCSTAGE_RUN_ID": run_id,
        "HPCSTAGE_VERSION": __version__,
        "HPCSTAGE_RUN_DIR": os.fspath(run_dir),
        "HPCSTAGE_NODE_DIR": os.fspath(node_dir),
        "HPCSTAGE_LOCAL_DIR": os.fspath(node_dir / "store"),
        "HPCSTAGE_SOCKET": os.fspath(sock),
        "PYTHONPATH": _prepend(os.fspath(shim_dir), env.get("PYTHONPATH", "")),
    }
    return {**env, **ours}


def for_daemon(env: Mapping[str, str], package_parent: Path) -> dict[str, str]:
    """Without what would make an MPI library believe that the daemon is a rank; our own package importable."""
    kept = {name: value for name, value in env.items() if not name.startswith(MPI_PREFIXES)}
    kept["PYTHONPATH"] = _prepend(os.fspath(package_parent), env.get("PYTHONPATH", ""))
    return kept


def _prepend(entry: str, path: str) -> str:
    # An empty entry would mean the current directory, which the user did not ask for.
    return f"{entry}{os.pathsep}{path}" if path else entry
