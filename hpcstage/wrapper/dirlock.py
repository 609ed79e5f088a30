"""The lock of DIR, the directory of `--out` or `--checkpoint`: the run that has it owns DIR (see `hpcstage.owner`).

Owns what a user is told where a run cannot have it.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import TYPE_CHECKING

from hpcstage import owner
from hpcstage.errors import NotStarted, UsageError
from hpcstage.wrapper import messages
from hpcstage.wrapper.child import is_fatal_pending

if TYPE_CHECKING:
    from hpcstage.job import Job

WRITABLE = "name a directory that you may write to, on the shared file system"
_ROOM = "free space there, or name a directory on another file system"
MOUNT = "mount its file system again, or name a directory on another one"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _ROOM),
    **dict.fromkeys((errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN), MOUNT),
}
REQUEUED_S = 120.0
"""A start waits for so long for the end of an earlier start of its job, on another host: Grid Engine starts a job that
is rescheduled anew before it ends it."""
_WAIT_S = 0.1
_OWN = "give each run a directory of its own"


class TargetInUse(UsageError):
    """Another run has the lock of DIR; `holder` says which."""

    def __init__(self, said: str, holder: str) -> None:
        super().__init__(f"{said} is in use by {holder}", _OWN)
        self.holder = holder


def lock(target: str, said: str, holder: str) -> int:
    """Takes the lock of DIR; returns a descriptor for `owner.let_go`. Raises TargetInUse if another run has it, and
    UsageError if DIR cannot be written to."""

    def tell(other: str) -> None:
        messages.warn(
            f"{target}/{owner.OWNER} names {other}: watching for {owner.OLD_S:g} s at most whether that is still there"
        )

    try:
        return owner.take(target, holder, tell=tell, is_stopped=is_fatal_pending)
    except owner.Owned as error:
        raise TargetInUse(said, error.holder) from None
    except OSError as error:
        raise unusable(f"{said} cannot be written to", error) from None


def lock_for_run(target: str, said: str, run_id: str, job: Job) -> int:
    """Takes the lock of DIR for a run. Where an earlier start of its job has it, on another host, it is waited for.
    Raises as `lock` does, and NotStarted when a signal that is blocked will end this process."""
    host, deadline = socket.gethostname(), None
    task = f" task {job.array_task}" if job.array_task else ""
    of_job = "" if job.job_id is None else f", {job.scheduler} job {job.job_id}{task}"
    while True:
        try:
            return lock(target, said, f"run {run_id} on {host}{of_job}")
        except TargetInUse as error:
            is_here = error.holder.endswith(f" on {host}{of_job}")
            is_earlier = bool(of_job) and error.holder.endswith(of_job) and not is_here
            if not is_earlier or (deadline is not None and time.monotonic() > deadline):
                raise
            if deadline is None:
                deadline = time.monotonic() + REQUEUED_S
                text = f"{said} is in use by an earlier start of this job, {error.holder}"
                messages.warn(f"{text}: waiting for its end, for {REQUEUED_S:g} s at most")
        if is_fatal_pending():
            raise NotStarted("a signal came while an earlier start of the job was waited for", "start it again")
        time.sleep(_WAIT_S)


def unusable(what: str, error: OSError) -> UsageError:
    return UsageError(f"{what}: {error.strerror}", REMEDIES.get(error.errno or 0, WRITABLE))
