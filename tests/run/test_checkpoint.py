"""`hpcstage run --checkpoint DIR`: what the command completes in `{checkpoint}` is in DIR, and the next run has it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Hpcstage, below, kill_all, python_command, wait_for

from hpcstage.node.kept import KeptPlace

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

Tree = Callable[..., Path]
NOT_DRAINED = 74
SAVE = """
import os, sys
checkpoint, *steps = sys.argv[1:]
assert os.environ["HPCSTAGE_CHECKPOINT"] == checkpoint
print(checkpoint, *sorted(name for name in os.listdir(checkpoint) if not name.startswith(".")))
for step in steps:
    with open(f"{checkpoint}/.new", "wb") as file:
        file.write(step.encode() * 50_000)
    os.rename(f"{checkpoint}/.new", f"{checkpoint}/step{step}")
"""
WAIT = """
open(f"{os.environ['FLAG']}.up", "w").close()
import time
while not os.path.exists(os.environ["FLAG"]):
    time.sleep(0.01)
"""
STEPS = """
import itertools
checkpoint = sys.argv[1]
for step in itertools.count():
    with open(f"{checkpoint}/.new", "wb") as file:
        file.write(b"%d" % step * 5000)
    os.rename(f"{checkpoint}/.new", f"{checkpoint}/step{step}")
    with open(f"{os.environ['FLAG']}.steps", "a") as file:
        file.write(f"{step}\\n")
    if os.path.exists(os.environ["FLAG"]):
        break
    time.sleep(0.01)
"""
TRAIN = """
import os, sys, torch
checkpoint, until = sys.argv[1], int(sys.argv[2])
torch.manual_seed(7)
model = torch.nn.Linear(20, 20)
optimizer = torch.optim.Adam(model.parameters())
done = sorted(os.listdir(checkpoint))
first = 0
if done:
    state = torch.load(f"{checkpoint}/{done[-1]}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"] + 1
print("from", first)
for step in range(first, 8):
    generator = torch.Generator().manual_seed(step)
    loss = model(torch.randn(4, 20, generator=generator)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, f"{checkpoint}/.new.pt")
    os.rename(f"{checkpoint}/.new.pt", f"{checkpoint}/step{step}.pt")
    if step == until:
        open(os.environ["FLAG"] + ".up", "w").close()
        import time
        time.sleep(60)
print("weights", model.weight.double().sum().item().hex(), model.bias.double().sum().item().hex())
"""


def kept(local_dir: Path) -> list[Path]:
    """The checkpoint directories that are still on the local disk."""
    return list(local_dir.glob("hpcstage-out-*/*.checkpoint"))


def saves(*steps: int) -> Sequence[str]:
    """A command that saves these steps."""
    return python_command(SAVE, "{checkpoint}", *map(str, steps))


def run(hpcstage: Hpcstage, *more: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return hpcstage("run", "--checkpoint", "ckpt", *map(str, more), **options)


def shown(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    """The checkpoints that the command found at its start."""
    return done.stdout.decode().split()[1:]


def part_of(hpcstage: Hpcstage) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hpcstage.records()[-1].read_bytes())["checkpoints"]
    return found


def drain_of(hpcstage: Hpcstage) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hpcstage.records()[-1].read_bytes())["drains"]["checkpoint"]
    return found


def names(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def killed(hpcstage: Hpcstage, local_dir: Path, flag: Path, *steps: int, every: int = 1000, then: str = "") -> None:
    """A run that saved steps, and of which everything was killed when all were in a generation."""
    command = python_command(f"{SAVE}{then}\n{WAIT}", "{checkpoint}", *map(str, steps))
    options = ("--checkpoint", "ckpt", "--drain-every", str(every))
    wrapper = hpcstage.start("run", *options, "--", *command, env={"FLAG": os.fspath(flag)})
    wait_for(Path(f"{flag}.up").exists, 120, "the command")
    wait_for(lambda: {f"step{step}" for step in steps} <= set(saved_names(local_dir)), 120, "the generation")
    kill_all(wrapper)
    Path(f"{flag}.up").unlink()


def saved_names(local_dir: Path) -> list[str]:
    """The checkpoints in the newest generation on the local disk."""
    for manifest in sorted(local_dir.glob("hpcstage-out-*/*.checkpoint/out/store/*/manifest.json"), reverse=True):
        with contextlib.suppress(FileNotFoundError):  # it may just be removed, as a newer one is there
            return [one["name"] for one in json.loads(manifest.read_bytes())["body"]["entries"]]
    return []


def test_what_the_command_completes_is_in_the_directory_and_the_next_run_goes_on(
    hpcstage: Hpcstage, tmp_path: Path, local_dir: Path
) -> None:
    done = run(hpcstage, "--", *saves(1, 2))
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().startswith(os.fspath(local_dir)), "a directory on the local disk"
    assert shown(done) == []
    assert names(tmp_path / "ckpt") == ["step1", "step2"]
    assert (tmp_path / "ckpt/step2").read_bytes() == b"2" * 50_000
    assert kept(local_dir) == []
    done = run(hpcstage, "--", *saves(3))
    assert (done.returncode, shown(done)) == (0, ["step1", "step2"]), done.stderr
    assert names(tmp_path / "ckpt") == ["step1", "step2", "step3"]
    part = part_of(hpcstage)
    assert "verified" in part["restored"]
    assert f"state {part['saved'][-1]['number']}, which is in DIR" in part["protection"]
    assert drain_of(hpcstage)["undrained"] == {}
    report = hpcstage("report").stdout.decode()
    assert "Checkpoints" in report
    assert "which is in DIR" in report
    assert part["standstill"] is None, "a program that saves by itself is not measured"
    assert re.search(r"stood still +not measured", report)


CHECKPOINTER = """
import sys, time, torch
from hpcstage.torch import Checkpointer
took_s = 0.0
with Checkpointer() as checkpointer:
    for step in (1, 2, 3):
        began_s = time.monotonic()
        checkpointer.save(lambda: time.sleep(0.05) or {"weights": torch.full((1000,), float(step))}, step)
        took_s += time.monotonic() - began_s
print(took_s)
"""


@pytest.mark.torch
def test_the_report_says_how_long_training_stood_still(hpcstage: Hpcstage) -> None:
    pytest.importorskip("torch", reason="needs the extra `torch`")
    done = run(hpcstage, "--", *python_command(CHECKPOINTER))
    assert done.returncode == 0, done.stderr
    part = part_of(hpcstage)
    assert part["standstill"]["saves"] == 3
    assert 3 * 0.05 <= part["standstill"]["seconds"] <= float(done.stdout), "as the program's own clock says"
    assert re.search(r"stood still +[0-9.]+ m?s in 3 saves", hpcstage("report").stdout.decode())


@pytest.mark.parametrize("option", ["out", "checkpoint"])
def test_each_run_with_one_directory_has_the_same_path(hpcstage: Hpcstage, tmp_path: Path, option: str) -> None:
    """Also after one that was killed."""
    flag = tmp_path / "flag"
    write = "import os, sys\nprint(sys.argv[1], flush=True)\nopen(f'{sys.argv[1]}/name', 'w').write('text')"
    words, show = ("run", f"--{option}", "dir", "--"), ("echo", f"{{{option}}}")
    first = hpcstage(*words, *show).stdout
    wrapper = hpcstage.start(*words, *python_command(f"{write}\n{WAIT}", show[1]), env={"FLAG": os.fspath(flag)})
    wait_for(Path(f"{flag}.up").exists, 20, "the command")
    assert wrapper.stdout is not None
    assert wrapper.stdout.readline() == first
    kill_all(wrapper)
    done = hpcstage(*words, *show)
    assert (done.returncode, done.stdout) == (0, first), done.stderr
    assert hpcstage("run", f"--{option}", "other", "--", *show).stdout != first


LIGHTNING = """
import lightning, os, torch
from lightning.pytorch.callbacks import ModelCheckpoint

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, _):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

saves = ModelCheckpoint(os.environ["HPCSTAGE_CHECKPOINT"], save_last=True)
last = os.path.join(os.environ["HPCSTAGE_CHECKPOINT"], "last.ckpt")
done = torch.load(last, weights_only=False)["epoch"] + 1 if os.path.exists(last) else 0
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
trainer = lightning.Trainer(max_epochs=done + 1, callbacks=[saves], **quiet)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(2, 1)), ckpt_path=last if done else None)
print(done)
"""


def test_lightning_writes_over_what_the_last_run_left(hpcstage: Hpcstage) -> None:
    """Lightning compares the path where it writes with the one in its checkpoint."""
    pytest.importorskip("lightning")
    for done in range(3):
        run = hpcstage("run", "--checkpoint", "DIR", "--", *python_command(LIGHTNING))
        assert (run.returncode, run.stdout) == (0, b"%d\n" % done), run.stderr
    assert not list((hpcstage.cwd / "DIR").glob("last-*"))


def test_training_that_was_killed_goes_on_to_the_same_weights(
    hpcstage: Hpcstage, tmp_path: Path, local_dir: Path
) -> None:
    pytest.importorskip("torch", reason="needs the extra `torch`")
    flag = {"FLAG": os.fspath(tmp_path / "flag")}
    wrapper = hpcstage.start("run", "--checkpoint", "ckpt", "--", *python_command(TRAIN, "{checkpoint}", "4"), env=flag)
    wait_for(Path(f"{flag['FLAG']}.up").exists, 120, "step 4")
    wait_for(lambda: "step4.pt" in saved_names(local_dir), 120, "its generation")
    kill_all(wrapper)
    done = run(hpcstage, "--", *python_command(TRAIN, "{checkpoint}", "100"), env=flag)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"from 5\n")
    (tmp_path / "plain").mkdir()
    plain = subprocess.run([sys.executable, "-c", TRAIN, tmp_path / "plain", "100"], capture_output=True, check=True)
    assert plain.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    assert names(tmp_path / "ckpt") == names(tmp_path / "plain")
    assert kept(local_dir) == []


def test_beside_what_a_killed_run_left_lies_what_others_put_into_dir(
    hpcstage: Hpcstage, tmp_path: Path, local_dir: Path
) -> None:
    """What the killed run's program had is not shown if it removed it, though DIR has it; one start after the other."""
    assert run(hpcstage, "--", *saves(1)).returncode == 0
    (tmp_path / "ckpt/removed").write_text("of the user")
    killed(hpcstage, local_dir, tmp_path / "flag", 2, then="os.unlink(f'{checkpoint}/removed')")
    (tmp_path / "ckpt/pretrained").write_text("of the user, later")
    killed(hpcstage, local_dir, tmp_path / "flag", 3)
    done = run(hpcstage, "--", *saves())
    assert (done.returncode, shown(done)) == (0, ["pretrained", "step1", "step2", "step3"]), done.stderr
    assert "from this node" in part_of(hpcstage)["restored"]
    assert names(tmp_path / "ckpt") == ["pretrained", "removed", "step1", "step2", "step3"]


def test_a_run_whose_program_lives_on_is_named_once(hpcstage: Hpcstage, local_dir: Path) -> None:
    script = 'cd "$0"; echo 1 > step1; sleep 60 > /dev/null 2>&1 & echo $!'
    done = run(hpcstage, "--", "sh", "-c", script, "{checkpoint}")
    try:
        assert done.returncode == 0, done.stderr
        assert b"live on" in done.stderr
        said = run(hpcstage, "--", "true").stderr.decode()
        assert said.count("is left alone") == 1, said
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)
    wait_for(lambda: hpcstage("clean", "--drain").returncode == 0 and not kept(local_dir), 120, "the program's end")


@pytest.mark.parametrize("option", ["out", "checkpoint"])
def test_while_the_command_of_a_killed_wrapper_lives_no_other_run_uses_its_directory(
    hpcstage: Hpcstage, tmp_path: Path, option: str
) -> None:
    flag = tmp_path / "flag"
    make = "import os, sys\nos.chdir(sys.argv[1])\nopen('.new', 'w').close()\nos.rename('.new', 'step1')"
    script = f"{make}\n{WAIT}"
    command = python_command(script, f"{{{option}}}")
    wrapper = hpcstage.start("run", f"--{option}", "dir", "--", *command, env={"FLAG": os.fspath(flag)})
    wait_for(Path(f"{flag}.up").exists, 120, "the command")
    family = psutil.Process(wrapper.pid).children(recursive=True)
    wrapper.kill()
    wrapper.wait()
    other = hpcstage("run", f"--{option}", "dir", "--", "true")
    assert (other.returncode, other.stderr.count(b"dir is in use by run ")) == (2, 1), other.stderr
    flag.touch()
    wrapper.communicate()
    psutil.wait_procs(family, timeout=300)
    other = hpcstage("run", f"--{option}", "dir", "--", "true")
    assert other.returncode == 0, other.stderr
    assert names(tmp_path / "dir") == ["step1"]


def test_clean_drains_what_a_killed_run_left(hpcstage: Hpcstage, tmp_path: Path, local_dir: Path) -> None:
    killed(hpcstage, local_dir, tmp_path / "flag", 1, 2)
    (place,) = kept(local_dir)
    run_id = KeptPlace(place).run_id
    (place / "out/tree/torn").write_bytes(b"half")
    (place / "out/tree/latest").symlink_to(place / "out/tree/step2")
    assert hpcstage("checkpoint", "verify", "ckpt").returncode == 0
    assert hpcstage("clean").returncode == NOT_DRAINED
    done = hpcstage("clean", "--drain")
    assert done.returncode == 0, done.stderr
    left = ["latest", "step1", "step2", f"torn.{run_id}"]
    assert names(tmp_path / "ckpt") == left, "nothing is lost, nor taken for complete"
    assert os.readlink(tmp_path / "ckpt/latest") == "step2"
    (line,) = [line for line in hpcstage("checkpoint", "ls", "ckpt").stdout.splitlines() if b"torn" in line]
    assert b"not shown to a run" in line
    assert kept(local_dir) == []


def test_half_a_checkpoint_of_a_killed_command_is_none(hpcstage: Hpcstage, tmp_path: Path) -> None:
    script = SAVE + "os.write(os.open(f'{checkpoint}/half', os.O_CREAT | os.O_WRONLY), b'x'); os.kill(os.getpid(), 9)"
    done = run(hpcstage, "--", *python_command(script, "{checkpoint}", "1"))
    assert done.returncode == -signal.SIGKILL, done.stderr
    run_id = hpcstage.records()[-1].parent.name
    assert names(tmp_path / "ckpt") == [f"half.{run_id}", "step1"]
    assert [one["name"] for one in drain_of(hpcstage)["names"]] == [f"half.{run_id}"]
    assert f"checkpoints were not complete at the end, such as half.{run_id}".encode() in done.stderr


def test_sockets_and_pipes_are_left_out(hpcstage: Hpcstage, tmp_path: Path, local_dir: Path) -> None:
    script = (
        SAVE
        + """
import socket
os.chdir(checkpoint)
os.mkdir("both")
for place in (".", "both"):
    os.mkfifo(f"{place}/pipe")
    socket.socket(socket.AF_UNIX).bind(f"{place}/socket")
"""
    )
    done = run(hpcstage, "--", *python_command(script, "{checkpoint}", "1"))
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "ckpt") == ["both", "step1"]
    assert not (tmp_path / "ckpt/.hpcstage-beside").exists()
    assert kept(local_dir) == []


def test_what_cannot_be_drained_is_named_and_kept(hpcstage: Hpcstage, tmp_path: Path, local_dir: Path) -> None:
    script = f"import os\nos.rename({os.fspath(tmp_path / 'ckpt')!r}, {os.fspath(tmp_path / 'away')!r})" + SAVE
    done = run(hpcstage, "--", *python_command(script, "{checkpoint}", "1"))
    assert done.returncode == NOT_DRAINED, done.stderr
    assert b"step1" in done.stderr
    assert [one["name"] for one in drain_of(hpcstage)["names"]] == ["step1"]
    assert kept(local_dir) != []
    (tmp_path / "away").rename(tmp_path / "ckpt")
    assert hpcstage("clean", "--drain").returncode == 0
    assert names(tmp_path / "ckpt") == ["step1"]


def test_where_the_command_removed_the_directory_no_file_of_ours_is_taken_for_what_lay_in_it(
    hpcstage: Hpcstage, local_dir: Path
) -> None:
    script = SAVE + "import shutil; shutil.rmtree(checkpoint)"
    done = run(hpcstage, "--", *python_command(script, "{checkpoint}", "1"))
    assert done.returncode == NOT_DRAINED, done.stderr
    assert b"was removed or moved while it was used" in done.stderr
    drain = drain_of(hpcstage)
    assert ([one["fate"] for one in drain["names"]], drain["undrained"]) == (["gone"], {}), drain
    assert kept(local_dir) == []


@pytest.mark.parametrize("env", [{"HPCSTAGE_DISABLE": "1"}, {"HPCSTAGE_LOCAL_DIR": "/nonexistent"}])
def test_without_a_local_disk_it_is_the_directory_itself(
    hpcstage: Hpcstage, tmp_path: Path, env: dict[str, str]
) -> None:
    done = run(hpcstage, "--", *saves(1), env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().strip() == os.fspath(tmp_path / "ckpt")
    assert names(tmp_path / "ckpt") == ["step1"]


def test_both_directories_in_one_run(hpcstage: Hpcstage, tmp_path: Path, local_dir: Path) -> None:
    script = 'echo 1 > "$HPCSTAGE_OUT/log"; echo 2 > "$HPCSTAGE_CHECKPOINT/step"; echo {out} {checkpoint}'
    done = run(hpcstage, "--out", "results", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 2
    assert (names(tmp_path / "results"), names(tmp_path / "ckpt")) == (["log"], ["step"])
    assert kept(local_dir) == []


def test_protection_on_one_node_is_the_copy(hpcstage: Hpcstage) -> None:
    done = run(hpcstage, "--protect", "4+2", "--", "true")
    assert done.returncode == 0
    assert done.stderr.count(b"--protect 4+2") == 1
    done = run(hpcstage, "--protect", "4+2", "--strict", "--", "echo", "started")
    assert (done.returncode, done.stdout) == (125, b"")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--protect", "4"), "--protect"),
        (("--protect", "0+2"), "--protect"),
        (("--drain-every", "0"), "--drain-every"),
        (("--out", "ckpt/below"), "lie in each other"),
        (("--data", ".", "--checkpoint", "below"), "lies in the dataset"),
    ],
)
def test_bad_input(hpcstage: Hpcstage, tmp_path: Path, options: Sequence[str], said: str) -> None:
    (tmp_path / "file").write_text("of a dataset")
    done = run(hpcstage, *options, "--", "echo", "started")
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert said in line


def test_the_placeholder_and_a_protection_without_a_directory(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree()
    for words in (["--", "echo", "{checkpoint}"], ["--protect", "2+1", "--", "echo"]):
        done = hpcstage("run", "--data", data, *words)
        assert (done.returncode, done.stdout) == (2, b"")
        assert b"--checkpoint" in done.stderr


def test_checkpoints_on_a_login_node(hpcstage: Hpcstage, tmp_path: Path) -> None:
    assert run(hpcstage, "--", *saves(1, 2)).returncode == 0
    env = {"HPCSTAGE_LOCAL_DIR": "/nonexistent"}
    assert b"step2" in hpcstage("checkpoint", "ls", "ckpt", env=env).stdout
    assert hpcstage("checkpoint", "verify", "ckpt", env=env).returncode == 0
    assert hpcstage("checkpoint", "restore", "ckpt", "to", env=env).returncode == 0
    assert (tmp_path / "to/step2").read_bytes() == b"2" * 50_000
    with (tmp_path / "ckpt/step2").open("r+b") as file:
        file.write(b"X")
    assert hpcstage("checkpoint", "verify", "ckpt", env=env).returncode == 1
    shutil.rmtree(tmp_path / "to")
    assert hpcstage("checkpoint", "restore", "ckpt", "to", env=env).returncode == 1
    assert names(tmp_path / "to") == ["step1"], "what is damaged is not restored"
    (tmp_path / "ckpt/step2").unlink()
    verified = hpcstage("checkpoint", "verify", "ckpt", env=env)
    assert (verified.returncode, verified.stdout.decode().splitlines()) == (
        0,
        [f"{tmp_path}/ckpt/step1: whole", f"{tmp_path}/ckpt/step2: it was removed"],
    )
    assert hpcstage("checkpoint", "restore", "ckpt", "again", env=env).returncode == 0
    assert names(tmp_path / "again") == ["step1"]
    assert hpcstage("checkpoint", "ls", "missing", env=env).returncode == 2


@pytest.mark.parametrize("victims", ["daemon", "wrapper", "all"])
def test_no_completed_step_is_lost(hpcstage: Hpcstage, tmp_path: Path, local_dir: Path, victims: str) -> None:
    """Killed at a random moment, while steps are completed, saved, drained and pruned."""
    flag = tmp_path / "flag"
    command = python_command(f"import os, sys, time\n{STEPS}", "{checkpoint}")
    wrapper = hpcstage.start("run", "--checkpoint", "ckpt", "--", *command, env={"FLAG": os.fspath(flag)})
    wait_for((tmp_path / "ckpt/step1").exists, 120, "a step in DIR")
    family = below(wrapper.pid)
    daemon = next(one for one, words in family if "hpcstage.daemon" in words)
    time.sleep(random.random())
    if victims == "all":
        kill_all(wrapper)
    else:
        (daemon if victims == "daemon" else wrapper).send_signal(signal.SIGKILL)
    flag.touch()
    code = wrapper.wait(300)
    psutil.wait_procs([one for one, _ in family], timeout=300)
    done = hpcstage("clean", "--drain")
    assert (code, done.returncode) == (0 if victims == "daemon" else -signal.SIGKILL, 0), done.stderr
    there = {name.partition(".")[0]: name for name in names(tmp_path / "ckpt")}
    completed = Path(f"{flag}.steps").read_text().split()
    assert [step for step in completed if f"step{step}" not in there] == []
    assert all((tmp_path / "ckpt" / there[f"step{step}"]).read_bytes() == step.encode() * 5000 for step in completed)
    assert kept(local_dir) == []


def test_every_state_is_copied_when_the_jobs_time_ends(hpcstage: Hpcstage, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    options = ("--drain-every", "1000", "--time-limit", "1h", "--drain-before", "1h")
    command = python_command(SAVE + WAIT, "{checkpoint}", "1")
    wrapper = hpcstage.start("run", "--checkpoint", "ckpt", *options, "--", *command, env={"FLAG": os.fspath(flag)})
    wait_for((tmp_path / "ckpt/step1").exists, 120, "the step in DIR while the command runs")
    other = run(hpcstage, "--", "echo", "started")
    assert (other.returncode, other.stdout) == (2, b""), "two runs with one DIR"
    assert b"is in use by" in other.stderr
    flag.touch()
    assert wrapper.wait(300) == 0
