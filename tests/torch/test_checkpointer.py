"""Checkpointer: what is saved comes back bit for bit, on its own and when the disk, the program or the bytes fail."""

from __future__ import annotations

import collections
import doctest
import errno
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, wait_for

pytest.importorskip("torch")
pytest.importorskip("numpy")
pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")

import numpy as np
import torch
from savednames import names

import hpcstage.torch.checkpoints.checkpointer as room
from hpcstage.checkpoint.generations.files import Files
from hpcstage.checkpoint.generations.layout import BLOCK_BYTES
from hpcstage.torch import Checkpointer
from hpcstage.torch.checkpoints import entry
from hpcstage.torch.checkpoints.checkpointer import DirectoryInUse, NothingToLoad
from hpcstage.torch.checkpoints.saving import CheckpointNotSaved

pytestmark = pytest.mark.torch


def save(directory: Path, state: Any, step: int = 1) -> None:
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.save(state, step)


def loaded(directory: Path, **options: Any) -> Any:
    found = Checkpointer(directory).load(**options)
    assert found is not None
    return found.state


def same(one: Any, other: Any) -> bool:
    """Whether two states are alike to the last bit, types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        forms = [(t.dtype, t.shape, t.device) for t in (one, other)]
        raw = [t.resolve_conj().resolve_neg().clone().reshape(-1).view(torch.uint8) for t in (one, other) if t.numel()]
        return forms[0] == forms[1] and (one.numel() == 0 or torch.equal(*raw))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def trained() -> tuple[Any, Any]:
    """A model and an optimizer that took a step."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(70, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, 70)).sum().backward()
    optimizer.step()
    return model, optimizer


DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "bool"),
    *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
]


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_every_type_comes_back(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    content = torch.arange(48, dtype=torch.uint8) % (2 if name == "bool" else 48)
    tensor = content.view(dtype).reshape(-1, 3) if dtype.itemsize < 16 else content.view(dtype)
    state = {"whole": tensor, "part": tensor[::2], "zero": tensor.reshape(-1)[0], "none": tensor[:0]}
    save(tmp_path / "c", state)
    assert same(loaded(tmp_path / "c"), {key: value.clone() for key, value in state.items()})


def test_every_value_comes_back(tmp_path: Path) -> None:
    large = torch.randn(3, BLOCK_BYTES // 4 + 5)
    state = {
        "numbers": [1, -(2**70), 0.1, -0.0, float("inf"), float("nan"), True, None, "text \u00e9\x00", b"\x00\xff"],
        "keys": {1: "int", "1": "str", True and 2.5: "float", (3, "t"): "tuple", None: "none"},
        "kinds": (collections.OrderedDict(b=1, a=[()]), collections.Counter("aab"), torch.Size([3, 4])),
        "tensors": [large, large.t(), large[:, 7:9], torch.empty(0, 3), torch.tensor(4.5), large.new_zeros(())],
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "parameter": {"weight": torch.randn(3)},
        "numpy": [np.arange(5, dtype=np.uint32)[::2], np.float64(0.1), np.zeros((0, 2)), np.array(3, np.int8)],
        "random": [torch.get_rng_state(), np.random.get_state()],
        "empty": [{}, [], ()],
    }
    save(tmp_path / "c", state, 12)
    found = Checkpointer(tmp_path / "c").load()
    assert found is not None
    assert found.step == 12
    assert same(found.state, state)


def test_a_training_goes_on(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path / "c", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, fresh = (
        torch.nn.Sequential(torch.nn.Linear(70, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 2)),
        None,
    )
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    found = loaded(tmp_path / "c", into={"model": other.state_dict()})
    fresh.load_state_dict(found["optimizer"])
    assert same(other.state_dict(), model.state_dict()), "the tensors of the model itself were filled"
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    state = {"in": weight, "out": weight.detach(), "t": weight.t(), "rows": weight[:10]}
    save(tmp_path / "c", state)
    found = loaded(tmp_path / "c")
    assert found["in"] is found["out"]
    assert same(found["t"], weight.t())
    assert same(found["rows"], weight[:10])
    body = json.loads((tmp_path / "c" / "step-00000001" / "state.json").read_text().splitlines()[0])
    assert [name for name, *_ in body["tensors"]] == ["in", "t", "rows"]
    untied = {"in": torch.zeros(100, 100), "out": torch.zeros(100, 100)}
    loaded(tmp_path / "c", into=untied)
    assert same(untied, {"in": weight, "out": weight}), "both are filled where the other program does not tie them"


@pytest.mark.parametrize(
    ("state", "place", "why"),
    [
        ({"a": [1, {"b": object()}]}, "state['a'][1]['b']", "builtins.object"),
        ({"a": torch.eye(2).to_sparse()}, "state['a']", "to_dense()"),
        ({"a": torch.empty(2, device="meta")}, "state['a']", "no values"),
        (lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}, "state['a']", "int_repr()"),
        ({"a": {(1, (2, 3)): 0}}, "state['a'][(1, (2, 3))]", "key"),
        ({"a": np.array([object()])}, "state['a']", "ndarray"),
        (torch.nn.Linear(1, 1), "state", "Linear"),
        (lambda: {"a": {1, 2}}, "state['a']", "set"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_what_cannot_be_saved_is_named(tmp_path: Path, state: Any, place: str, why: str) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save({"fine": 1}, 1)
        with pytest.raises(TypeError) as caught:
            checkpointer.save(state, 2)
        assert str(caught.value).startswith(place + " ")
        assert why in str(caught.value)
    assert loaded(tmp_path / "c") == {"fine": 1}


def test_a_state_that_holds_itself(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(TypeError, match="holds itself"):
        save(tmp_path / "c", state)


def test_into_another_form_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path / "c", {"a": torch.ones(3), "b": torch.ones(2)})
    into = {"a": torch.zeros(3), "b": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"b is torch.float32 \(2,\) in the checkpoint, and torch.float32 \(5,\)"):
        loaded(tmp_path / "c", into=into)
    assert not into["a"].any()
    with pytest.raises(ValueError, match=r"no tensor more\.c"):
        loaded(tmp_path / "c", into={"a": torch.zeros(3), "more": {"c": torch.zeros(1)}})


def test_the_state_may_change_when_save_returns(tmp_path: Path) -> None:
    weight = torch.zeros(500_000)
    with Checkpointer(tmp_path / "c", keep=None) as checkpointer:
        for step in range(1, 6):
            weight.fill_(step)
            checkpointer.save({"weight": weight, "losses": [0.0] * step}, step)
            weight.fill_(-1)
    for step in range(1, 6):
        state = loaded(_alone(tmp_path / "c" / f"step-{step:08}", tmp_path / "alone"))
        assert torch.equal(state["weight"], torch.full((500_000,), float(step)))
        assert len(state["losses"]) == step


def test_forms_that_change_from_save_to_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer:
        for size in (10, 200_000, 30, 0, 70_000):
            state = {"a": torch.randn(size), "b": [torch.randn(size, 2), torch.ones(3)]}
            checkpointer.save(state, size)
            checkpointer.wait()
            (step,) = [s for s in checkpointer.directory.iterdir() if s.name == f"step-{size:08}"]
            assert same(Checkpointer(_alone(step, tmp_path / "alone")).load().state, state)


def _alone(path: Path, directory: Path) -> Path:
    """A directory with this checkpoint only."""
    directory.mkdir(exist_ok=True)
    for other in directory.iterdir():
        other.unlink()
    (directory / path.name).symlink_to(path)
    return directory


def test_large_tensors_begin_at_blocks_wherever_they_stand(tmp_path: Path) -> None:
    from hpcstage.checkpoint.generations.manifest import GenerationKind
    from hpcstage.checkpoint.generations.state import FileTree
    from hpcstage.checkpoint.generations.store import GenerationStore
    from hpcstage.checkpoint.generations.terms import GenerationPolicy

    large = {f"layer{n}": torch.randn(100_000 + n) for n in range(8)}
    save(tmp_path / "c", {"first": torch.randn(5), **large}, 1)
    save(tmp_path / "d", {"first": torch.randn(90_000), "losses": [0.5] * 99, **large}, 2)
    with GenerationStore(tmp_path / "store", GenerationPolicy(always=GenerationKind.DELTA)) as store:
        store.commit(FileTree(tmp_path / "c"))
        saved = store.commit(FileTree(tmp_path / "d"))
    assert saved.written_bytes < 3 * BLOCK_BYTES + 90_000 * 4, "what did not change is found behind what grew"


def test_on_a_file_system_in_memory(local_dir: Path) -> None:
    """Files there cannot be written past the page cache, or can in name only."""
    state = {"a": torch.randn(3_000_001), "b": torch.ones(2)}
    save(local_dir / "c", state)
    assert same(loaded(local_dir / "c"), state)


def test_names_and_how_many_are_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c", keep=2) as checkpointer:
        for step in (1, 5, 1200, 123_456_789):
            checkpointer.save({"step": step}, step)
    assert names(tmp_path / "c") == ["step-00001200", "step-123456789"]
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700
    with Checkpointer(tmp_path / "c", keep=1) as checkpointer:
        assert checkpointer.load().step == 123_456_789
        checkpointer.save({"step": "again"}, 123_456_789)
    assert names(tmp_path / "c") == ["step-123456789"]
    assert loaded(tmp_path / "c") == {"step": "again"}


def test_what_a_longer_training_left_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "c", {"of": "the long one"}, 900)
    with Checkpointer(tmp_path / "c", keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save({"of": "a new one"}, step)
    assert names(tmp_path / "c") == ["step-00000002", "step-00000900"]
    assert capfd.readouterr().err.count("step-00000900 is of a training that went further than step 1") == 1


def test_every_so_many_steps(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c", every=10, keep=None) as checkpointer:
        saved = []
        for step in range(1, 35):
            if checkpointer.save(lambda step=step: {"step": step}, step):
                saved.append(step)
                checkpointer.wait()
        assert saved == [10, 20, 30]
        assert checkpointer.save({}, 34, now=True)
    again = Checkpointer(tmp_path / "c", every=10)
    assert again.load().step == 34
    assert [step for step in range(34, 42) if again.due(step)] == [40, 41]


def test_numbers_of_numpy_are_steps(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c", every=np.int64(10), keep=np.int8(1)) as checkpointer:
        assert [step for step in np.arange(21) if checkpointer.save({"step": int(step)}, step, now=step == 20)] == [
            10,
            20,
        ]
    assert Checkpointer(tmp_path / "c").load().step == 20


def test_every_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: clock[0])
    with Checkpointer(tmp_path / "c", every="1m") as checkpointer:
        saved = []
        for step in range(20):
            clock[0] += 10
            if checkpointer.save({}, step):
                saved.append(step)
                checkpointer.wait()
    assert saved == [5, 11, 17]


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCSTAGE_CHECKPOINT", raising=False)
    with pytest.raises(Exception, match=r"no directory and \$HPCSTAGE_CHECKPOINT is not set"):
        Checkpointer()
    for options in ({"keep": 0}, {"every": 0}, {"every": "soon"}):
        with pytest.raises(ValueError, match=r"keep|every|soon"):
            Checkpointer(tmp_path, **options)
    for options in ({"keep": 1.0}, {"every": 500.0}, {"every": True}):
        with pytest.raises(TypeError, match=r"(keep|every) option should be a whole number"):
            Checkpointer(tmp_path, **options)
    with Checkpointer(tmp_path / "c") as checkpointer:
        with pytest.raises(ValueError, match="negative"):
            checkpointer.save({}, -1)
        for step in (1.0, True, "1", np.float64(1), None):
            with pytest.raises(TypeError, match="step should be a whole number"):
                checkpointer.save({}, step)
    monkeypatch.setenv("HPCSTAGE_CHECKPOINT", os.fspath(tmp_path / "given"))
    assert Checkpointer().load() is None
    with Checkpointer() as checkpointer:
        checkpointer.save({}, 0)
    assert names(tmp_path / "given") == ["step-00000000"]


@pytest.mark.parametrize("part", ["tensors", "state.json"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, part: str, capfd: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(tmp_path / "c", keep=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save({"net": {"weight": torch.full((100,), float(step))}}, step)
    path = tmp_path / "c" / "step-00000002" / part
    content = bytearray(path.read_bytes())
    content[50] ^= 0x10
    path.write_bytes(content)
    into = {"net": {"weight": torch.zeros(100)}}
    found = Checkpointer(tmp_path / "c").load(into=into)
    assert found is not None
    assert found.step == 1
    assert into["net"]["weight"].eq(1).all()
    (line,) = capfd.readouterr().err.splitlines()
    assert "step-00000002 is damaged" in line
    assert "step-00000001 is loaded" in line
    assert ("net.weight" if part == "tensors" else "state.json") in line
    (tmp_path / "c" / "step-00000001" / "tensors").write_bytes(b"")
    with pytest.raises(NothingToLoad) as caught:
        Checkpointer(tmp_path / "c").load(into=into)
    assert "step-00000001 is damaged: its tensors is shorter" in caught.value.line()


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    save(tmp_path / "c", {"a": torch.arange(20), "b": [1, 2]})
    path = tmp_path / "c" / "step-00000001"
    image = memoryview(mmap.mmap(-1, (path / "tensors").stat().st_size))
    entry.read_image(Files(), entry.find_entry(path), image)
    for name in ("tensors", "state.json"):
        content = (path / name).read_bytes()
        for place in range(0, len(content), 1 if name == "state.json" else 61):
            (path / name).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(entry.DamagedEntry):
                entry.read_image(Files(), entry.find_entry(path), image)
        (path / name).write_bytes(content)
    assert loaded(tmp_path / "c")["b"] == [1, 2]


def test_a_full_disk_comes_up_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save({"a": torch.ones(5)}, 1)
    checkpointer.wait()
    with monkeypatch.context() as patch:

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "pwrite", full)
        checkpointer.save({"a": torch.ones(6)}, 2)
        wait_for(lambda: not checkpointer._saver.busy, what="the end of the writing")
    with pytest.raises(CheckpointNotSaved) as caught:
        checkpointer.save({"a": torch.ones(7)}, 3)
    assert "step-00000002 was not saved" in caught.value.line()
    assert "No space left on device" in caught.value.line()
    checkpointer.close()
    assert capfd.readouterr().err.count("was not saved") == 1
    assert names(tmp_path / "c") == ["step-00000001", "step-00000003"], "and nothing of the second"
    assert len(loaded(tmp_path / "c")["a"]) == 7


def test_other_bytes_on_the_disk_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    written, zeros = os.pwrite, memoryview(mmap.mmap(-1, 1 << 20))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, offset: written(fd, zeros[: len(data)], offset))
        checkpointer = Checkpointer(tmp_path / "c")
        checkpointer.save({"a": torch.ones(5)}, 1)
        with pytest.raises(CheckpointNotSaved, match="was not saved") as caught:
            checkpointer.close()
    assert "its state.json" in caught.value.line()
    assert names(tmp_path / "c") == []
    assert "was not saved" in capfd.readouterr().err


def test_a_second_one_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "c") as first:
        first.save({}, 1)
        first.wait()
        second = Checkpointer(tmp_path / "c")
        assert second.load().step == 1
        with pytest.raises(DirectoryInUse, match=f"on {socket.gethostname()}, saves to"):
            second.save({}, 2)
    assert second.save({}, 2)
    second.close()


def test_a_forked_process_does_not_keep_the_directory(tmp_path: Path) -> None:
    """Workers of a loader outlive their killed parent for a while."""
    program = (
        "import os, sys, torch, signal\n"
        "from hpcstage.torch import Checkpointer\n"
        "made = Checkpointer(sys.argv[1])\n"
        "made.save({'a': torch.ones(3)}, 1)\n"
        "made.wait()\n"
        "if (pid := os.fork()) == 0:\n"
        "    signal.pause()\n"
        "print(pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, os.fspath(tmp_path / "c")]
    with open(tmp_path / "pid", "w") as file:  # a pipe would not end before the child that keeps it
        done = subprocess.run(command, cwd=REPO, stdout=file, check=False, timeout=300)
    orphan = int((tmp_path / "pid").read_text())
    try:
        assert done.returncode == -signal.SIGKILL
        save(tmp_path / "c", {}, 2)
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_program_that_ends_without_close_has_saved(tmp_path: Path) -> None:
    program = (
        "import sys, torch\nfrom hpcstage.torch import Checkpointer\n"
        "Checkpointer(sys.argv[1]).save({'a': torch.ones(3_000_000)}, 1)\n"
    )
    subprocess.run([sys.executable, "-c", program, os.fspath(tmp_path / "c")], cwd=REPO, check=True, timeout=300)
    assert loaded(tmp_path / "c")["a"].eq(1).all()


def test_the_thread_has_a_low_priority_and_the_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    give_name = entry.give_name

    def watched(*arguments: Any) -> Any:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return give_name(*arguments)

    monkeypatch.setattr(entry, "give_name", watched)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    save(tmp_path / "c", {})
    assert found == [min(19, own + 10)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_the_example_in_the_docstring() -> None:
    failed, tried = doctest.testmod(room)
    assert not failed
    assert tried > 5
