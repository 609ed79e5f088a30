"""The lock of DIR between nodes, where the file system's locks hold between them and where they do not."""

from __future__ import annotations

import pytest
from nfslab import PATIENCE_S
from nfsproject import Project

pytest_plugins = ("nfsfixtures",)
pytestmark = [pytest.mark.root]
RUN = "$HPCSTAGE run --out out -- sh -c"


def test_a_second_run_on_another_node_is_refused_until_the_first_ends(project: Project) -> None:
    one, other = "/n3local", "/n3localb"  # where locks do not hold between nodes
    first = project.start(f"{RUN} 'echo up; until [ -e go ]; do sleep 0.1; done'", one)
    project.lab.until(lambda: "up" in first.output, PATIENCE_S, "the first run")
    said = project.run(f"{RUN} 'echo started'", other, node=2, code=2)
    assert "--out out is in use by run " in said
    assert " on node1" in said
    assert "started" not in said
    project.run("touch go")
    first.wait()
    assert "started" in project.run(f"{RUN} 'echo started'", other, node=2)


def test_a_run_that_was_killed_on_another_node_does_not_block(project: Project) -> None:
    one, other = "/n42", "/n42b"
    first = project.start(f"{RUN} 'echo first >$HPCSTAGE_OUT/first; echo up; sleep 60'", one)
    project.lab.until(lambda: "up" in first.output, PATIENCE_S, "the first run")
    project.kill_all()
    first.wait(code=None)
    assert "started" in project.run(f"{RUN} 'echo second >$HPCSTAGE_OUT/second; echo started'", other, node=2)
    project.run("$HPCSTAGE clean --drain", one)
    assert project.run("ls out", one).split() == ["first", "second"]
