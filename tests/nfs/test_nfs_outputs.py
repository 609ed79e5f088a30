"""`--out` on NFS: what programs store through memory maps is in DIR, from the first sample to the last."""

from __future__ import annotations

import pytest
from nfslab import PATIENCE_S
from nfsproject import Project

pytest_plugins = ("nfsfixtures",)
pytestmark = [pytest.mark.root]
CHECK = """$PYTHON -c '
import numpy as np
results, scores = np.load("out/predictions.npy"), np.fromfile("out/scores.bin", np.int64)
print("missing", int((results != np.arange(1, len(results) + 1)[:, None]).any(axis=1).sum()),
      int((scores != np.arange(1, len(scores) + 1)).sum()))'"""


def test_what_is_stored_through_a_memory_map_arrives(project: Project) -> None:
    run = "$HPCSTAGE run --out out -- $PYTHON $PROGRAMS/mapping.py {out}"
    project.run(f"{run} each; {CHECK} >found")
    assert project.run("cat found") == "missing 0 0\n"


def test_after_a_kill_of_everything_the_late_drain_has_what_was_stored(project: Project) -> None:
    run = "$HPCSTAGE run --out out -- sh -c '$PYTHON $PROGRAMS/mapping.py {out} late; sleep 60'"
    job = project.start(run)
    project.lab.until(lambda: "stored" in job.output, PATIENCE_S, "the results")
    project.kill_all()
    job.wait(code=None)
    project.run(f"$HPCSTAGE clean --drain; {CHECK} >found")
    assert project.run("cat found") == "missing 0 0\n"
