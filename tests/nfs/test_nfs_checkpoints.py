"""`--checkpoint` on NFS: the newest checkpoint that a program completed outlives the kill of everything."""

from __future__ import annotations

import os

import pytest
from nfsproject import Project

pytest_plugins = ("nfsfixtures",)
pytestmark = [pytest.mark.root, pytest.mark.timeout(3600), pytest.mark.slow]
KILLS = int(os.environ.get("HPCSTAGE_TEST_KILLS", "2"))
SEED = int(os.environ.get("HPCSTAGE_TEST_SEED", "1"))


def test_the_newest_checkpoint_is_there_after_kills_of_everything(project: Project) -> None:
    """Half of them while the server is away."""
    said = project.run(
        f"$PYTHON $PROGRAMS/killing.py {SEED} {KILLS} {project.back}", timeout_s=400 + 90 * KILLS, code=None
    )
    print(said)
    assert said.splitlines()[-1].startswith("well"), said
