"""What MPI leaves in /tmp when a group is killed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

MPIEXEC = Path(sys.executable).parent / "mpiexec"
PROGRAM = """
import glob
from mpi4py import MPI
from hpcstage.node import mpifiles as segments
MPI.COMM_WORLD.Barrier()
names = glob.glob("/tmp/hydra_*")
MPI.COMM_WORLD.Barrier()
segments.unlink_description()
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    print(len(names), len(glob.glob("/tmp/hydra_*")))
"""

PRIVATE = """
exec 9<"$0"
mount -t tmpfs tmpfs /tmp || exit
case $0 in /tmp/*) mkdir -p "$0" && mount --no-canonicalize --bind /proc/self/fd/9 "$0" || exit ;; esac
exec "$@" 9<&-
"""
"""A /tmp of its own; the project stays visible where it lies there."""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a /tmp of its own")
@pytest.mark.skipif(not MPIEXEC.exists() or not importlib.util.find_spec("mpi4py"), reason="needs MPICH's wheel")
def test_the_launchers_file_goes_once_it_has_been_read() -> None:
    words = [MPIEXEC, "-launcher", "fork", "-n", "2", sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", PRIVATE, REPO, *words],
        cwd="/", env={**os.environ, "PYTHONPATH": os.fspath(REPO)}, capture_output=True, text=True, timeout=300,
        check=True,
    )  # fmt: skip
    before, after = done.stdout.split()
    if before == "0":
        pytest.skip("this MPI writes no such file")
    assert after == "0"
