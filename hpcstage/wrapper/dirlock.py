"""The lock of DIR, the directory of `--out` or `--checkpoint`: the run that has it owns DIR (see `hpcstage.owner`).

Owns what a user is told where a run cannot have it.
"""

from __future__ import annotations

import errno

from hpcstage import owner
from hpcstage.errors import UsageError
from hpcstage.wrapper import messages
from hpcstage.wrapper.child import is_fatal_pending

WRITABLE = "name a directory that you may write to, on the shared file system"
_ROOM = "free space there, or name a directory on another file system"
MOUNT = "mount its file system again, or name a directory on another one"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _ROOM),
    **dict.fromkeys((errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN), MOUNT),
}
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


def unusable(what: str, error: OSError) -> UsageError:
    return UsageError(f"{what}: {error.strerror}", REMEDIES.get(error.errno or 0, WRITABLE))
