"""Says what the lead does with the other nodes of a run, in whichever way they come up: `launched` and `virtual` do it.

Owns what both ways share: what is known of each node (`states`), and the wish that all drain their output files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcstage.job.launchers import Mpi
from hpcstage.lead.children import Output
from hpcstage.lead.states import NodeStates
from hpcstage.protocol.leadspec import LeadSpec


class Nodes:
    """Owns the nodes that the wrapper did not start; what it does not say of them it leaves to its two forms."""

    def __init__(self, spec: LeadSpec, directory: Path) -> None:
        self.spec = spec
        self.directory = directory
        self.states = NodeStates(spec.daemon.run_id, spec.daemon.membership.nodes)
        self.is_drain_asked = False

    def begin(self, mpi: Mpi) -> None:
        """Starts the nodes. A node whose start fails at once is missing."""

    def outputs(self) -> Sequence[Output]:
        """Returns the outputs of processes to wait for."""
        return ()

    def look(self, now: float) -> None:
        """Takes the news of the nodes."""

    def joined(self) -> bool:
        """Returns whether the daemons of all other nodes know the files."""
        return self.states.have_others_joined

    def staged(self) -> bool:
        """Returns whether, with mode upfront, all other nodes hold what they will hold."""
        return self.states.have_others_staged

    def ask_drained(self) -> None:
        """Tells all nodes that the command has ended, so that they drain their output files."""
        self.is_drain_asked = True

    def drained(self, now: float) -> bool:  # noqa: ARG002
        """Returns whether no other node still drains output files."""
        return self.is_drain_asked and self.states.have_others_drained

    def ask_staged(self) -> None:
        """Asks the daemons of this machine whether they hold what they will hold; agents ask theirs by themselves."""

    def attach(self, child_pid: int) -> None:
        """Tells the daemons of this machine that the command runs; they serve it to its end even if the lead dies."""

    def give_up_waiting(self) -> None:
        """Leaves out the nodes that have not come by now."""
        self.states.give_up_waiting(f"no answer within {self.spec.wait_s:g} s")

    def tell_end(self) -> None:
        """Tells all nodes that the run is over."""

    def ended(self, deadline: float) -> bool:
        """Waits until all other nodes have written their parts, at most until the deadline. Returns whether they
        have."""
        raise NotImplementedError

    def close(self, removal_s: float) -> None:
        """Waits until the nodes that still answer are clean, then makes sure that nothing of the run is left on this
        machine."""
