"""Which saved state a training goes on from: its own, or the copy on the shared file system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from hpcstage.elastic.seats import DRAINED
from hpcstage.torch import Checkpointer
from hpcstage.torch.checkpoints.checkpointer import NothingToLoad
from hpcstage.torch.elastic.committedstate import SavedStates

pytestmark = pytest.mark.torch


def save(directory: Path, step: int, name: str) -> None:
    with Checkpointer(directory) as made:
        made.save({"name": name, "weights": torch.ones(100)}, step)


def found(own: Path, drained: Path, monkeypatch: pytest.MonkeyPatch) -> SavedStates:
    monkeypatch.setenv(DRAINED, os.fspath(drained))
    return SavedStates(Checkpointer(own))


def loaded(states: SavedStates) -> tuple[int, str] | None:
    state = states.load()
    return None if state is None else (state.step, state.state["name"])


def test_the_newest_is_loaded_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, drained = tmp_path / "o[w]n", tmp_path / "drained"
    states = found(own, drained, monkeypatch)
    assert loaded(states) is None
    assert states.are_there() is False
    save(drained, 7, "drained")
    assert loaded(states) == (7, "drained")
    assert states.are_there()
    save(own, 9, "own")
    assert loaded(states) == (9, "own")


def test_an_older_copy_is_loaded_if_the_own_one_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, drained = tmp_path / "own", tmp_path / "drained"
    save(own, 9, "own")
    (own / "step-00000009" / "tensors").write_bytes(b"")
    states = found(own, drained, monkeypatch)
    with pytest.raises(NothingToLoad):
        states.load()
    save(drained, 7, "drained")
    assert loaded(states) == (7, "drained")


def test_without_a_checkpointer_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 7, "drained")
    monkeypatch.setenv(DRAINED, os.fspath(tmp_path))
    states = SavedStates(None)
    assert (states.are_there(), states.load()) == (False, None)
