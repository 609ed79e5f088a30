"""Datasets on NFS: a program reads the same with and without hpcstage, from copies, whatever the server does."""

from __future__ import annotations

import json
import shlex

import pytest
from conftest import problems
from nfslab import PATIENCE_S
from nfsproject import Project

pytest_plugins = ("nfsfixtures",)
pytestmark = [pytest.mark.root]
MAKE = """$PYTHON -c '
import os
for number in range(1, 61):
    os.makedirs(f"data/c{number % 3}", exist_ok=True)
    with open(f"data/c{number % 3}/f{number}", "wb") as file:
        file.write(os.urandom(number * 3000))'
"""
READ = "$PYTHON $PROGRAMS/reading.py data"


def test_a_program_reads_the_same_from_copies(project: Project) -> None:
    plain = project.run(f"{MAKE}{READ} 3 0", "/n3")
    staged = project.run(f"$HPCSTAGE run --data data -- {READ} 3 0.05 2>/disk/err || cat /disk/err", "/n3")
    assert staged == plain
    record = project.record()
    assert problems(record) == []
    assert record["coverage"]["swapped"] > 60, record["coverage"]


def test_a_server_that_goes_away_for_seconds_changes_nothing(project: Project) -> None:
    plain = project.run(f"{MAKE}{READ} 2 0")
    job = project.start(f"$HPCSTAGE run --data data -- {READ} 2 0.02 2>/disk/err || cat /disk/err")
    project.lab.until(lambda: "0 " in job.output, PATIENCE_S, "the first epoch")
    project.lab.run("ip link set v0 down; sleep 2; ip link set v0 up")
    assert job.wait() == plain


def test_a_scan_that_got_no_answer_is_repeated(project: Project) -> None:
    """The attributes of the dataset are still known to the client when the server goes, its names are not."""
    project.run(MAKE)
    failed = "until grep -q 'got no answer' /disk/tmp/hpcstage-*/*/daemon.log; do sleep 0.5; done"
    scanned = "until [ -e /disk/tmp/hpcstage-*/*/scan/manifest.bin ]; do sleep 0.5; done"
    program = f"timeout 450 sh -c {shlex.quote(f'{failed}; rpc.nfsd 8; {scanned}')} || cat /disk/tmp/hpcstage-*/*/*.log"
    said = project.run(
        f"""[ -r data ] && [ -x data ]; data=$PWD/data; mkdir /disk/away; cd /disk/away; rpc.nfsd 0
        $HPCSTAGE run --data $data -- sh -c {shlex.quote(program)} 2>&1
        cat hpcstage-runs/*/run.json; rm -r /disk/away""",
        "/nsoft",
        timeout_s=500,
    )
    assert "{" in said, said
    (problem,) = (one for one in json.loads(said[said.index("{") :])["notes"] if one["id"] == "scan-unanswered")
    assert "/data: Input/output error" in problem["text"]


def test_a_dataset_whose_server_does_not_answer_is_no_matter_of_permissions(project: Project) -> None:
    project.run("mkdir data")
    said = project.run(
        "data=$PWD/data; cd /disk; rpc.nfsd 0; $HPCSTAGE run --data $data -- true 2>&1", "/nsoft", code=2
    )
    (line,) = said.splitlines()
    assert "Input/output error" in line
    assert "is its file system mounted, and does it answer?" in line
