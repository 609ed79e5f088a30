"""Which line of a launcher's output tells why it failed: outputs as real launchers wrote them."""

from __future__ import annotations

import pytest

from hpcstage.lead.children import cause

HYDRA = """
ssh: connect to host node2 port 22: Connection refused
[mpiexec@node1] ui_cmd_cb (mpiexec/pmiserv_pmci.c:51): Launch proxy failed.
[mpiexec@node1] HYDT_dmxu_poll_wait_for_event (lib/tools/demux/demux_poll.c:76): callback returned error status
[mpiexec@node1] main (mpiexec/mpiexec.c:288): process manager error waiting for completion
"""
OPEN_MPI = """
--------------------------------------------------------------------------
ORTE was unable to reliably start one or more daemons.
This usually is caused by:

* not finding the required libraries and/or binaries on
  one or more nodes. Please check your PATH and LD_LIBRARY_PATH
  settings, or configure OMPI with --enable-orterun-prefix-by-default
--------------------------------------------------------------------------
"""
MPICH = """
[1795422409.346343] [node2:3700 :0] select.c:657  UCX  ERROR   no active messages transport to <no debug data>: no route
Abort(741491983) on node 1: Fatal error in internal_Init_thread: Other MPI error, error stack:
internal_Init_thread(71)..............: MPI_Init_thread(argc=(nil), argv=(nil), required=3, provided=0x7fff) failed
MPIDI_UCX_comm_addr_exchange(159).....:  ucx function returned with failed status(Destination is unreachable)
"""
PYTHON = """
Traceback (most recent call last):
  File "/home/error/hpcstage/exchange/transport/mpi.py", line 91, in _initialised
    raise WorldError(f"cannot {name}")
ImportError: libmpi.so.12: cannot open shared object file: No such file or directory
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   EXIT CODE: 1
=   CLEANING UP REMAINING PROCESSES
===================================================================================
"""
EXCHANGE = """
srun: error: node2: task 1: Exited with exit code 3
hpcstage exchange on node1: MPI was started with 1 processes instead of 2
srun: error: node1: task 0: Exited with exit code 3
"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (HYDRA, "ssh: connect to host node2 port 22: Connection refused"),
        (OPEN_MPI, "ORTE was unable to reliably start one or more daemons."),
        (MPICH, MPICH.splitlines()[1]),
        (PYTHON, "ImportError: libmpi.so.12: cannot open shared object file: No such file or directory"),
        (EXCHANGE, "hpcstage exchange on node1: MPI was started with 1 processes instead of 2"),
        ("one\ntwo", "two"),
        ("", ""),
    ],
)
def test_the_line_that_tells(said: str, told: str) -> None:
    assert cause([line.strip() for line in said.splitlines() if line.strip()]) == told
