"""Output files of jobs that join a training reach the directory of --out."""

from __future__ import annotations

import pytest
from test_elastic_join import Jobs, jobs  # noqa: F401 - a fixture

pytestmark = [pytest.mark.torch, pytest.mark.slow]
WRITES = """
import os, sys, time
import torch, torch.distributed as dist
out, = sys.argv[1:]
job, step = os.environ["JOB"], 0
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
with open("places", "a") as file:
    file.write(f"{job} {out} {os.environ['HPCSTAGE_OUT']}\\n")
stop = torch.zeros(1)
while not stop.item():
    step += 1
    for name in (f"of-{job}", "of-both"):
        with open(os.path.join(out, f".{name}"), "w") as file:
            file.write(f"{job} {world} {step}\\n")
        os.replace(os.path.join(out, f".{name}"), os.path.join(out, name))
    with open("steps", "a") as file:
        file.write(f"{job} {os.getpid()} {world} {step} {step}\\n")
    stop[0] = float(os.path.exists("stop"))
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    time.sleep(0.05)
with open("last", "a") as file:
    file.write(f"{job} {world} {step}\\n")
dist.destroy_process_group()
"""


def test_a_job_that_joins_writes_into_the_directory_itself(jobs: Jobs) -> None:  # noqa: F811
    out = jobs.work / "out"
    jobs.train(WRITES, "--elastic", "1:2", "--nodes", "1", "--out", str(out), arguments=("{out}",))
    jobs.wait("first")
    jobs.join("second")
    jobs.wait("first", "second")
    jobs.stop()
    assert jobs.processes["first"].wait(300) == 0, jobs.text()
    assert jobs.processes["second"].wait(300) == 0, jobs.text()
    of_second = f"second {out} {out}"
    places = set((jobs.work / "places").read_text().splitlines())
    assert {line for line in places if str(out) in line} == {of_second}, "the first job's is on its local disk"
    assert len(places) > 1
    assert f"{{out}} is {out} itself on the nodes of this job" in jobs.text("second")
    last = {line.split()[0]: line for line in (jobs.work / "last").read_text().splitlines(keepends=True)}
    assert (out / "of-second").read_text() == last["second"]
    assert (out / "of-first").read_text() == last["first"]
    assert sorted(path.read_text() for path in out.glob("of-both*")) == [last["first"], last["second"]]
    assert (out / "of-both").read_text() == last["second"], (
        "what a run wrote takes the place of nothing that is not its"
    )
    assert "somebody else changed of-both" in jobs.text("first")
