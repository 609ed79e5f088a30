"""Elastic training: which hosts train, who decides that, and how a change is agreed on.

The room owns scale policies (`ScalePolicy` and those that are ready-made) and the membership of a training, a backend
for the rendezvous of `torchrun`. It owns no trainer and no launcher. It works without `hpcstage run`; PyTorch is
imported only by the modules of `membership` that need it.
"""

from __future__ import annotations

from hpcstage.elastic.policies import FailStop, FinishIfNear, KeepBatch, MinMax, TimeLeft, WaitFor
from hpcstage.elastic.policy import Answer, Cause, Facts, Host, MembershipChanged, Progress, ScalePolicy

__all__ = [
    "Answer",
    "Cause",
    "Facts",
    "FailStop",
    "FinishIfNear",
    "Host",
    "KeepBatch",
    "MembershipChanged",
    "MinMax",
    "Progress",
    "ScalePolicy",
    "TimeLeft",
    "WaitFor",
]
