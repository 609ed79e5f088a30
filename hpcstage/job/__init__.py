"""Inside the job: which scheduler, which nodes, which local disk, how much time is left.

`detect` says where we are, `localdir.choose` which node-local directory to use, `nodedir.claim` makes ours below it.
"""

from __future__ import annotations

from hpcstage.job.environment import detect
from hpcstage.job.types import Job

__all__ = ["Job", "detect"]
