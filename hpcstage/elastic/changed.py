"""The one exception by which training code learns that the membership has changed."""

from __future__ import annotations

from hpcstage.errors import HpcstageError


class MembershipChanged(HpcstageError):
    """Who trains changes: a running collective has ended, or none may begin. `hpcstage.torch.Elastic.run` takes it and
    goes on with the next membership; code that catches errors of its own has to let it pass."""
