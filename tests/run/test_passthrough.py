"""The command's exit code, its death by a signal, its streams and its signals pass through `hpcstage run` unchanged."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Hpcstage, wait_for

from hpcstage.wrapper.child import FORWARDED

Tree = Callable[..., Path]


CODES = [0, 1, 2, 74, 75, 125, 126, 127, 130, 255]


@pytest.mark.slow
def test_exit_codes(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=1)

    def code_of(wanted: int) -> int:
        return hpcstage("run", "-q", "--data", data, "--", "sh", "-c", f"exit {wanted}").returncode

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(code_of, CODES)) == CODES


ALL_CODES = """
import os
from hpcstage.wrapper.child import Child, Signals, finish

signals = Signals()
for code in range(256):
    print(finish(Child(["sh", "-c", f"exit {code}"], os.environ, signals).wait(lambda: None)))
"""


def test_all_exit_codes_as_the_wrapper_sees_them() -> None:
    """All 256 of them, without a run for each; in a process of its own, which is as small as a wrapper."""
    done = subprocess.run([sys.executable, "-c", ALL_CODES], capture_output=True, text=True, timeout=300, check=True)
    assert [int(line) for line in done.stdout.split()] == list(range(256))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGPIPE])
def test_death_by_a_signal(hpcstage: Hpcstage, make_tree: Tree, number: signal.Signals) -> None:
    done = hpcstage("run", "--data", make_tree(files=1), "--", "sh", "-c", f"kill -{int(number)} $$")
    assert done.returncode == -number


def test_the_exit_code_of_a_caller_that_ignores_its_children(hpcstage: Hpcstage, make_tree: Tree) -> None:
    """The kernel throws exit codes away there."""
    command = hpcstage.command("run", "--data", make_tree(files=1), "--", "sh", "-c", "exit 7")
    ignoring = ["env", "--ignore-signal=CHLD", *command]
    done = subprocess.run(ignoring, cwd=hpcstage.cwd, env=hpcstage.env, capture_output=True, timeout=300, check=False)
    assert done.returncode == 7, done.stderr
    assert len(hpcstage.records()) == 1


def test_nohup_holds_while_all_is_copied_first(hpcstage: Hpcstage, make_tree: Tree) -> None:
    """A terminal that closes signals a run that ignores that."""
    slowly = ["--mode", "upfront", "--max-rate", "200kB", "--data", os.fspath(make_tree(files=30))]
    words = ["run", *slowly, "--", "sh", "-c", "exit 7"]
    started = hpcstage.start(*words, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for(lambda: bool(list(hpcstage.local_dir.glob("hpcstage-*/*/store/*/*/*"))), 120, "the first copy")
    started.send_signal(signal.SIGHUP)
    assert started.wait(300) == 7


def test_streams_are_untouched(hpcstage: Hpcstage, make_tree: Tree) -> None:
    code = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1]); sys.stderr.write('mine\\n')"
    payload = bytes(range(256)) * 1000
    command = hpcstage.command("run", "-q", "--data", make_tree(files=1), "--", sys.executable, "-c", code)
    done = subprocess.run(
        command, cwd=hpcstage.cwd, env=hpcstage.env, input=payload, capture_output=True, timeout=300, check=False
    )
    assert done.stdout == payload[::-1]
    assert done.stderr == b"mine\n"


def test_only_lines_with_our_name_on_stderr(hpcstage: Hpcstage, make_tree: Tree) -> None:
    done = hpcstage("run", "--data", make_tree(files=1), "--", "true")
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 0
    assert lines
    assert all(line.startswith("hpcstage: ") for line in lines)
    assert len(lines) <= 8


@pytest.mark.parametrize("env", [{}, {"HPCSTAGE_DISABLE": "1"}], ids=["", "switched off"])
def test_an_empty_command(hpcstage: Hpcstage, make_tree: Tree, env: dict[str, str]) -> None:
    done = hpcstage("run", "--data", make_tree(files=1), "--", "", env=env)
    assert (done.returncode, done.stderr.decode().splitlines()[-1:]) == (
        127,
        ["hpcstage: cannot run '': No such file or directory (check the command after `--`)"],
    )


def test_a_script_whose_interpreter_is_not_there(hpcstage: Hpcstage, make_tree: Tree) -> None:
    script = hpcstage.cwd / "script"
    script.write_text("#!/nonexistent/python\n")
    script.chmod(0o755)
    done = hpcstage("run", "--data", make_tree(files=1), "--", script)
    assert done.returncode == 127
    assert b"check the interpreter in its first line" in done.stderr


def test_arguments_of_the_command_are_not_ours(hpcstage: Hpcstage, make_tree: Tree) -> None:
    show = "import sys; print(sys.argv[1:])"
    arguments = ["--mode", "x", "--help", "--", "-v", "--data", "y"]
    done = hpcstage("run", "-q", "--data", make_tree(files=1), sys.executable, "-c", show, *arguments)
    assert done.stdout.decode().strip() == str(arguments)


def test_switched_off_is_a_plain_exec(hpcstage: Hpcstage, make_tree: Tree) -> None:
    show = "import os; print(os.getpid(), 'HPCSTAGE_ACTIVE' in os.environ, os.environ['PYTHONPATH'], sep='\\n')"
    process = hpcstage.start(
        "run", "--data", make_tree(files=1), "--", sys.executable, "-c", show, env={"HPCSTAGE_DISABLE": "1"}
    )
    out, err = process.communicate(timeout=300)
    assert out.decode().splitlines() == [str(process.pid), "False", hpcstage.env["PYTHONPATH"]]
    assert err == b""


def test_nested_runs_pass_through(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=1)
    inner = [sys.executable, "-m", "hpcstage", "run", "--data", os.fspath(data), "--", "sh", "-c", "exit 7"]
    done = hpcstage("run", "--data", data, "--", *inner)
    assert done.returncode == 7
    assert len(hpcstage.records()) == 1


def inherited(hpcstage: Hpcstage, **more: str) -> dict[str, str]:
    """What a job has that the command of a run submitted with all of its variables."""
    node_dir = hpcstage.local_dir / f"hpcstage-{os.geteuid()}" / "ended-run"
    return {
        "HPCSTAGE_ACTIVE": "ended-run", "HPCSTAGE_RUN_ID": "ended-run", "HPCSTAGE_NODE_DIR": os.fspath(node_dir),
        "HPCSTAGE_SOCKET": os.fspath(node_dir / "sock"), "HPCSTAGE_STORE": os.fspath(node_dir / "store"),
        "HPCSTAGE_OUT": f"{hpcstage.local_dir}/hpcstage-out-0/ended-run/out/tree",
        "HPCSTAGE_CHECKPOINT": f"{hpcstage.local_dir}/hpcstage-out-0/ended-run.checkpoint/out/tree",
        "PYTHONPATH": f"/other/entry:/other/entry{node_dir}/shim:{hpcstage.env['PYTHONPATH']}", **more,
    }  # fmt: skip


SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def test_a_job_that_was_submitted_inside_of_a_run_that_has_ended(hpcstage: Hpcstage, make_tree: Tree) -> None:
    words = ("run", "-q", "--data", make_tree(files=1), "--", sys.executable, "-c", SHOW)
    done = hpcstage(*words, env=inherited(hpcstage, PBS_JOBID="2.server", PBS_ENVIRONMENT="PBS_BATCH"))
    assert (done.returncode, done.stderr) == (0, b"")
    (record,) = hpcstage.records()
    assert json.loads(record.read_text())["coverage"]["layers"] == {"native": 1}
    env = json.loads(done.stdout)
    assert "ended-run" not in f"{env}"
    assert env["PYTHONPATH"].endswith(f"/shim:{hpcstage.env['PYTHONPATH']}")
    assert env["PYTHONPATH"].count(":") == 1 + hpcstage.env["PYTHONPATH"].count(":") + 1
    assert env["HPCSTAGE_JOB"] == "pbs 2.server"


def test_the_socket_of_a_daemon_that_was_killed_serves_nobody(hpcstage: Hpcstage, make_tree: Tree) -> None:
    env = inherited(hpcstage)
    del env["HPCSTAGE_OUT"], env["HPCSTAGE_CHECKPOINT"]
    place = Path(env["HPCSTAGE_SOCKET"])
    place.parent.mkdir(parents=True, mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(place))
        listener.listen()
        words = ("run", "--data", make_tree(files=1), "--", "sh", "-c", "exit 7")
        assert hpcstage(*words, env=env).returncode == 7
        assert not hpcstage.records()
    assert hpcstage(*words, env=env).returncode == 7
    assert len(hpcstage.records()) == 1


def test_a_job_on_the_node_of_the_run_that_submitted_it(hpcstage: Hpcstage, make_tree: Tree) -> None:
    """The run around it lives, but is of another job."""
    job = {"PBS_JOBID": "2.server", "PBS_ENVIRONMENT": "PBS_BATCH"}
    data = os.fspath(make_tree(files=1))
    inner = [sys.executable, "-m", "hpcstage", "run", "-q", "--data", data, "--", sys.executable, "-c", SHOW]
    as_job = ["env", *(f"{name}={value}" for name, value in job.items()), *inner]
    outer_job = {name: value.replace("2", "1") for name, value in job.items()}
    done = hpcstage("run", "-q", "--data", data, "--", *as_job, env=outer_job)
    assert (done.returncode, done.stderr) == (0, b"")
    records = [json.loads(path.read_text()) for path in hpcstage.records()]
    assert len({record["run"]["id"] for record in records}) == 2
    assert json.loads(done.stdout)["PYTHONPATH"].count("/entry/") == 1


CATCHER = """
import signal, sys, time
wanted = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
          signal.SIGCONT, signal.SIGWINCH, signal.SIGALRM, signal.SIGXCPU]
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
open(sys.argv[1], "w").close()
for _ in wanted:
    print(signal.sigtimedwait(wanted, 30).si_signo, flush=True)
print(signal.sigtimedwait(wanted, 0.2))
"""


def test_each_signal_reaches_the_command_once(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = hpcstage.start("run", "-q", "--data", make_tree(files=1), "--", sys.executable, "-c", CATCHER, ready)
    assert process.stdout is not None
    wait_for(ready.exists, 120, "the command's start")
    for number in FORWARDED:
        process.send_signal(number)
        assert int(process.stdout.readline()) == number
    assert process.communicate(timeout=300)[0] == b"None\n", "none came twice"
    assert process.returncode == 0


@pytest.mark.parametrize(
    "env", [{}, {"HPCSTAGE_DISABLE": "1"}, {"HPCSTAGE_LOCAL_DIR": "/nonexistent"}], ids=["", "switched off", "unstaged"]
)
def test_the_command_starts_with_the_callers_signal_mask(
    hpcstage: Hpcstage, make_tree: Tree, env: dict[str, str]
) -> None:
    show = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]
    plain = subprocess.run(show, capture_output=True, check=True).stdout
    done = hpcstage("run", "-q", "--data", make_tree(files=1), "--", *show, env=env)
    assert masks(done.stdout) == masks(plain)


def masks(status: bytes) -> list[int]:
    """The signal masks, without 32 and 33: glibc's posix_spawn leaves these two of its own ignored."""
    return [int(line.split()[1], 16) & ~(0b11 << 31) for line in status.splitlines()]
