"""Virtual nodes: `--nodes N` on one machine, from the command line to the record."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import manylab
import pytest
from conftest import Hpcstage, problems, wait_for

from hpcstage.job.launchers import Mpi
from hpcstage.lead.world import find_mpiexec, mpi_of

Tree = Callable[..., Path]


def test_each_rank_reads_on_its_node_and_all_read_the_same_as_without_us(
    hpcstage: Hpcstage, make_tree: Tree, local_dir: Path
) -> None:
    data, nodes = make_tree(files=60), 3
    done = hpcstage("run", "--nodes", str(nodes), "--data", data, "--", *manylab.reader_command(hpcstage.cwd, data, 6))
    assert done.returncode == 0, done.stderr
    digests, places = manylab.written(hpcstage.cwd, 6)
    assert digests == manylab.expected(data, 6)
    assert [place.rsplit(".", 1)[1] for place in places] == [f"v{rank * nodes // 6}" for rank in range(6)]
    parts = manylab.parts_of(hpcstage)
    assert [part["node_index"] for part in parts] == list(range(nodes))
    assert all(part["complete"] and part["node_count"] == nodes for part in parts)
    assert not list(local_dir.glob("hpcstage-*/*/"))
    assert manylab.record_of(hpcstage)["complete"] is True


def test_one_node_is_a_run_without_a_group(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=10)
    done = hpcstage("run", "--nodes", "1", "--data", data, "--", *manylab.reader_command(hpcstage.cwd, data, 2))
    assert done.returncode == 0, done.stderr
    assert manylab.written(hpcstage.cwd, 2)[0] == manylab.expected(data, 2)
    assert [part["node_count"] for part in manylab.parts_of(hpcstage)] == [1]


@manylab.needs_mpi
def test_modules_of_other_versions_on_the_commands_pythonpath(hpcstage: Hpcstage, make_tree: Tree) -> None:
    """Lead, daemons and exchanges take their own."""
    theirs = hpcstage.cwd / "theirs"
    theirs.mkdir()
    for module in ("selectors", "mpi4py"):
        (theirs / f"{module}.py").write_text("raise ImportError('built for another Python')\n")
    env = {"PYTHONPATH": f"{theirs}:{hpcstage.env['PYTHONPATH']}"}
    done = hpcstage("run", "--nodes", "2", "--data", make_tree(files=20), "--", "true", env=env)
    assert done.returncode == 0, done.stderr
    record = manylab.record_of(hpcstage)
    assert (record["complete"], problems(record)) == (True, [])


@pytest.mark.parametrize("mode", ["upfront", "direct"])
def test_the_other_modes(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path, mode: str) -> None:
    data = make_tree(files=40)
    done = hpcstage(
        "run", "--mode", mode, "--nodes", "2", "--data", data, "--", *manylab.reader_command(hpcstage.cwd, data, 2)
    )
    assert done.returncode == 0, done.stderr
    assert manylab.written(hpcstage.cwd, 2)[0] == manylab.expected(data, 2)
    assert [part["complete"] for part in manylab.parts_of(hpcstage)] == [True, True]
    assert not list(local_dir.glob("hpcstage-*/*/"))


def test_exit_code_and_death_by_a_signal_pass_through(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    data = make_tree(files=5)
    run = ["run", "--nodes", "2", "--data", data, "--", "/bin/sh", "-c"]
    assert hpcstage(*run, "exit 77").returncode == 77
    assert hpcstage(*run, "kill -TERM $$").returncode == -signal.SIGTERM
    assert not list(local_dir.glob("hpcstage-*/*/"))


def test_a_signal_ends_the_command_and_all_nodes(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    data = make_tree(files=200)
    command = manylab.reader_command(hpcstage.cwd, data, 2, epochs=1000, pause_s=0.01)
    process = hpcstage.start("run", "--nodes", "2", "--data", data, "--", *command)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    ranks = manylab.below(process, str(hpcstage.cwd / "reader.py"))
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(timeout=300) == -signal.SIGTERM
    finally:
        manylab.kill(ranks)  # the launcher of this test does not pass signals on
    process.communicate(timeout=300)
    assert not list(local_dir.glob("hpcstage-*/*/"))
    assert [part["complete"] for part in manylab.parts_of(hpcstage)] == [True, True]


def test_a_second_run_and_a_first_do_not_see_each_other(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    data = make_tree(files=30)
    command = manylab.reader_command(hpcstage.cwd, data, 2, epochs=20, pause_s=0.005)
    first = hpcstage.start("run", "--nodes", "2", "--data", data, "--", *command)
    assert first.stdout is not None
    assert first.stdout.readline() == b"started\n"
    wait_for(lambda: len(list(local_dir.glob("hpcstage-*/*.v1/store"))) == 1)
    second = hpcstage("run", "--nodes", "2", "--data", data, "--", "true")
    assert second.returncode == 0, second.stderr
    first.communicate(timeout=300)
    assert first.returncode == 0
    assert manylab.written(hpcstage.cwd, 2)[0] == manylab.expected(data, 2, 20)


@manylab.needs_mpi
@pytest.mark.parametrize(("placement", "times"), [("replicate", 1), ("partition", 1), ("private", 3)])
def test_how_often_the_source_is_read_even_by_a_program_that_begins_at_once(
    hpcstage: Hpcstage, make_tree: Tree, placement: str, times: int
) -> None:
    data = make_tree(files=60)
    command = manylab.reader_command(hpcstage.cwd, data, 3, epochs=3, pause_s=0.01)
    done = hpcstage("run", "--nodes", "3", "--placement", placement, "--data", data, "--", *command)
    assert done.returncode == 0, done.stderr
    assert manylab.written(hpcstage.cwd, 3)[0] == manylab.expected(data, 3, 3)
    parts = manylab.parts_of(hpcstage)
    assert {part["placement"] for part in parts} == {placement}
    opens = [process["counters"].get("source_opens", 0) for part in parts for process in part["processes"]]
    read = sum(part["totals"]["copied_bytes"] for part in parts)
    if placement == "private":
        assert read <= times * 60 * 10_000
    else:
        assert sum(opens) == 0
        assert read == times * 60 * 10_000


def test_without_mpi_each_node_stages_alone_and_the_report_says_so(
    hpcstage: Hpcstage, make_tree: Tree, local_dir: Path
) -> None:
    data, hidden = make_tree(files=30), hpcstage.cwd / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['mpi4py'] = None\n")
    path = os.pathsep.join([str(hidden), hpcstage.env["PYTHONPATH"]])
    command = manylab.reader_command(hpcstage.cwd, data, 2, epochs=3, pause_s=0.02)
    done = hpcstage("run", "--nodes", "2", "--data", data, "--", *command, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert manylab.written(hpcstage.cwd, 2)[0] == manylab.expected(data, 2, 3)
    assert b"mpi4py is not installed" in done.stderr
    record = manylab.record_of(hpcstage)
    (lost,) = [problem for problem in record["notes"] if problem["id"] == "group-lost"]
    assert "see nodes/lead.log in the run directory" in lost["remedy"]
    assert list(hpcstage.cwd.glob("hpcstage-runs/*/nodes/lead.log"))
    parts = manylab.parts_of(hpcstage)
    assert [part["placement"] for part in parts] == ["private", "private"]
    assert all(part["totals"]["copied_files"] for part in parts), "each node staged"
    assert not list(local_dir.glob("hpcstage-*/*/"))


REFUSES = """
import os
if b"hpcstage.exchange" in open("/proc/self/cmdline", "rb").read().split(b"\\0"):
    os.write(2, b"fabric: Connection refused\\n")
    os._exit(1)
"""


@manylab.needs_mpi
def test_checkpoints_of_nodes_that_cannot_be_connected_do_not_hold_up_the_start(
    hpcstage: Hpcstage, local_dir: Path
) -> None:
    """A program of MPI that fails at once, again and again; output files need none."""
    refusing = hpcstage.cwd / "refusing"
    refusing.mkdir()
    (refusing / "sitecustomize.py").write_text(REFUSES)
    env = {"PYTHONPATH": os.pathsep.join([str(refusing), hpcstage.env["PYTHONPATH"]])}
    words = ["--nodes", "2", "--out", "results", "--checkpoint", "ckpt"]
    command = ["sh", "-c", 'echo "$0 $1"; echo mine > "$0/file"; echo saved > "$1/state"', "{out}", "{checkpoint}"]
    began = time.monotonic()
    assert hpcstage("run", *words[:4], "--", "true", env=env).returncode == 0
    alone_s = time.monotonic() - began
    done = hpcstage("run", *words, "--", *command, env=env)
    took_s = time.monotonic() - began - alone_s
    assert done.returncode == 0, done.stderr
    out, checkpoint = done.stdout.decode().split()
    assert out.startswith(f"{local_dir}/")
    assert checkpoint == os.fspath(hpcstage.cwd / "ckpt")
    (line,) = [line for line in done.stderr.decode().splitlines() if "{checkpoint} is" in line]
    assert "fabric: Connection refused" in line
    assert done.stderr.count(b"each node has a {out} of its own") == 1, "while the checkpoints are waited for"
    assert took_s < alone_s + 12, "not the 15 s until it is tried no more"
    assert (hpcstage.cwd / "results/file").read_text() == "mine\n"
    assert (hpcstage.cwd / "ckpt/state").read_text() == "saved\n"
    assert not list(local_dir.glob("hpcstage-*/*/"))


BY_MPI = """
import os, sys
for name in sorted(os.listdir(sys.argv[1])):
    open(os.path.join(sys.argv[1], name)).read()
with open("mpi." + os.environ["PMI_RANK"], "w") as file:
    file.write(os.environ["HPCSTAGE_NODE_DIR"])
"""


@manylab.needs_mpi
def test_ranks_of_mpiexec_are_dealt_to_the_nodes(hpcstage: Hpcstage, tmp_path: Path) -> None:
    mpiexec = find_mpiexec()
    if mpiexec is None or mpi_of(mpiexec) is not Mpi.HYDRA:
        pytest.skip("needs MPICH's mpiexec")
    data = tmp_path / "data"
    data.mkdir()
    for index in range(20):
        (data / f"{index}").write_text("x" * 1000)
    command = [mpiexec, "-launcher", "fork", "-n", "4", sys.executable, "-c", BY_MPI, str(data)]
    done = hpcstage("run", "--nodes", "2", "--data", data, "--", *command)
    assert done.returncode == 0, done.stderr
    places = [(hpcstage.cwd / f"mpi.{rank}").read_text().rsplit(".", 1)[1] for rank in range(4)]
    assert places == ["v0", "v0", "v1", "v1"]
    assert [len(part["processes"]) for part in manylab.parts_of(hpcstage)] == [2, 2]


WRITER = """
import os, sys, time
data, files = sys.argv[1], int(sys.argv[2])
rank = int(os.environ["RANK"])

def barrier(name):
    os.close(os.open(f"{name}.{rank}", os.O_CREAT | os.O_WRONLY))
    limit = time.monotonic() + 60
    while not os.path.exists(f"{name}.{1 - rank}"):
        assert time.monotonic() < limit
        time.sleep(0.0005)

stale = 0
for at, name in enumerate(sorted(os.listdir(data))[:files]):
    with open(f"{data}/{name}", "rb") as file:
        file.read()
    barrier(f"{at}.read")
    if rank == 0:
        with open(f"{data}/{name}", "wb") as file:
            file.write(b"new")
    barrier(f"{at}.written")
    with open(f"{data}/{name}", "rb") as file:
        stale += file.read() != b"new"
with open(f"stale.{rank}", "w") as file:
    file.write(str(stale))
"""


@manylab.needs_mpi
def test_what_one_rank_wrote_before_a_barrier_others_read_after_it(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=100) / "class0"
    ranks, _ = manylab.write_programs(hpcstage.cwd)
    writer = hpcstage.cwd / "writer.py"
    writer.write_text(WRITER)
    command = [sys.executable, str(ranks), "2", str(writer), str(data), str(len(list(data.iterdir())))]
    done = hpcstage("run", "--mode", "upfront", "--nodes", "2", "--data", data, "--", *command)
    assert done.returncode == 0, done.stderr
    assert [(hpcstage.cwd / f"stale.{rank}").read_text() for rank in range(2)] == ["0", "0"]
    assert problems(manylab.record_of(hpcstage)) == []
