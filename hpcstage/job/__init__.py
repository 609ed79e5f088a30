"""Finds out about the job: its scheduler, its nodes, the local disk, the time that is left.

`here` returns the job, and `localdir.choose` the node-local directory, below which `node.directory` makes the job's.
"""

from __future__ import annotations

from hpcstage.job.environment import Job, detect, file_name, here, jobs_in

__all__ = ["Job", "detect", "file_name", "here", "jobs_in"]
