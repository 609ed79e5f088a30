"""The demonstration runs on a fresh machine and says the truth about what it compared."""

from __future__ import annotations

import importlib.util
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import REPO, Hpcstage

from hpcstage import demo
from hpcstage.errors import HpcstageError
from hpcstage.record.schema import TimeSplit


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_the_demo(hpcstage: Hpcstage) -> None:
    done = hpcstage("demo", "--files", "60", timeout_s=400)
    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert text.splitlines()[-1].endswith(" identical in all three modes.")
    for mode in ("direct", "upfront", "runtime"):
        assert mode in text


@pytest.mark.parametrize("file_s", [-1.0, 0.0, 0.004, 0.5, 30.0])
def test_the_rate_is_one_that_can_be_shown_and_waited_for(file_s: float) -> None:
    rate = demo.rate_of(file_s)
    assert f"{rate / 1e6:.0f}" != "0"
    assert 500 * demo.FILE_BYTES / rate < demo.RUN_LIMIT_S / 2


def test_a_run_that_takes_too_long_cleans_up_and_is_said_in_one_line(
    hpcstage: Hpcstage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "RUN_LIMIT_S", 0.5)
    ended = tmp_path / "ended"
    with pytest.raises(HpcstageError, match="the run took longer than"):
        demo.finished(["sh", "-c", f"trap 'touch {ended}; exit 0' TERM; while :; do sleep 0.05; done"], "the run")
    assert ended.exists()
    with pytest.raises(HpcstageError, match="the run failed: why"):
        demo.finished(["sh", "-c", "echo why >&2; exit 3"], "the run")


def split(compute_s: float | None, waited_s: float | None, wall_s: float) -> TimeSplit:
    return TimeSplit(
        wall_s=wall_s, compute_s=compute_s, wait_source_s=waited_s, wait_local_s=0.0, preprocess_s=0.0, other_s=0.0,
        hidden_s=0.0, before_s=0.5, unmeasured=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("computed", "same", "said"),
    [
        ((6, 6.5, 7), True, "waited 4 s for data without hpcstage and 0.5 s with it, and took 8 s instead of 12 s; "),
        ((6, 6.5, 7.5), True, "too busy for these times to mean anything (equal work computed for 6 s to 7.5 s); "),
        ((None, None, None), True, "waited 4 s for data without hpcstage and 0.5 s with it, "),
        ((6, 6, 9), False, "DIFFER"),
    ],
)
def test_the_last_sentence(computed: tuple[float | None, ...], same: bool, said: str) -> None:
    direct, upfront, runtime = (
        split(computed[0], 4.0, 11.5), split(computed[1], 0.0, 9.0), split(computed[2], 0.5, 7.5),
    )  # fmt: skip
    sentence = demo.seen({"direct": direct, "upfront": upfront, "runtime": runtime}, same)
    assert said in sentence
    assert ("identical" in sentence) is same
    assert "\n" not in sentence


@pytest.fixture
def bare_machine(tmp_path: Path) -> Path:
    """The scripts, on a machine that seems to have no package of Debian: what they would install is written down."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (tmp_path / "scripts").mkdir()
    for name in ("demo", "prepare"):
        shutil.copy(REPO / "scripts" / name, tmp_path / "scripts")
    for name, does in {
        "dpkg-query": "echo unknown ok not-installed",
        "id": "echo 0",
        "apt-get": f'echo "$@" >> {tmp_path}/installed',
    }.items():
        (bin_dir / name).write_text(f"#!/bin/sh\n{does}\n")
        (bin_dir / name).chmod(0o755)
    for name in ("python", "hpcstage"):
        program = tmp_path / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "answer", "installs"),
    [((), None, False), ((), b"\n", False), ((), b"n\n", False), ((), b"y\n", True), (("--yes",), None, True)],
)
def test_it_asks_before_it_installs(
    bare_machine: Path, words: tuple[str, ...], answer: bytes | None, installs: bool
) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "PATH": f"{bare_machine}/bin:{os.environ['PATH']}"}
    command = [os.fspath(bare_machine / "scripts" / "demo"), *words, "--files", "60"]
    stdin = subprocess.DEVNULL if answer is None else theirs
    with subprocess.Popen(
        command, env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(theirs)
        os.write(ours, answer or b"")
        out, err = process.communicate(timeout=300)
    os.close(ours)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "hpcstage demo --files 60"
    assert (bare_machine / "installed").exists() is installs
    assert ("what needs them is skipped: python3 " in err) is not installs
    assert ("with apt-get? python3 " in err) is (answer is not None)
