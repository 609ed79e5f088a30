"""Nodes, links and one source as a discrete-event simulation, driven by the placement that real nodes compute.

Owns the clock and what waits for what; what is run and what it should come to is in `scale`. What is modelled: the
source serves one transfer at a time at its rate (first come, first served), each with a latency; a node's link carries
one file at a time in each direction; each node keeps a number of transfers from the source and of requests to others
in flight, and its readers work a number of files ahead of the training; a step needs all files of its batch; epochs
begin together (with `lockstep`, steps do). Reading what is on the node takes no time. What is not: stragglers, other
jobs, processors.
"""

from __future__ import annotations

from benchmarks.simulated.training import Simulation
from benchmarks.simulated.values import DIRECT, Machine, Outcome, Work

__all__ = ["DIRECT", "Machine", "Outcome", "Simulation", "Work"]
