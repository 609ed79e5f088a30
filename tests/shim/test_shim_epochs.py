"""Announced epochs of real loaders: the announced order is the one read, and the program's randomness is untouched."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from epochlab import Announced, Epochs
from shimlab import Lab, stepped

from hpcstage.node import shimdir
from hpcstage.protocol import shim

pytest.importorskip("torch")
pytest.importorskip("numpy")
import loaderforms

pytest_plugins = ("shimfixtures",)
pytestmark = pytest.mark.torch
UNKNOWN = list(loaderforms.FORMS)[list(loaderforms.FORMS).index("known but raises") : -1]
KNOWN = [form for form in loaderforms.FORMS if form not in UNKNOWN]
BEGINNING = [form for form in KNOWN if form.startswith("abandoned")]


@dataclass
class Run:
    with_us: dict[str, Any]
    without: dict[str, Any]
    epochs: Epochs
    lab: Lab


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The program with and without the shim."""
    base = tmp_path_factory.mktemp("forms")
    lab = Lab(base, "native" if shimdir.native_available() else "python")
    for index in range(loaderforms.FILES):
        lab.put(f"f{index:03d}", b"%d" % index)
    lab.install()
    results = []
    with Epochs(lab) as epochs:
        for name, env in (("with", lab.environment()), ("without", lab.environment(HPCSTAGE_DISABLE="1"))):
            sock = [lab.sock] if name == "with" else []
            command = [sys.executable, loaderforms.__file__, lab.source, base / name, *sock]
            done = subprocess.run(command, env=env, timeout=300, check=True, capture_output=True)
            results.append((json.loads((base / name).read_text()), done.stdout, done.stderr))
    assert results[0][1:] == results[1][1:]
    return Run(results[0][0], results[1][0], epochs, lab)


@pytest.mark.parametrize("form", loaderforms.FORMS)
def test_as_without_us(run: Run, form: str) -> None:
    assert run.with_us[form] == run.without[form]


def read(announced: Announced, form: str) -> list[int]:
    """The numbers of the files in the announced order."""
    return [int(os.path.basename(path)[1:]) for path in announced.paths()]


@pytest.mark.parametrize("form", [form for form in KNOWN if form not in ("two iterators", "no length")])
def test_what_is_announced_is_what_is_read(run: Run, form: str) -> None:
    announced = [read(one, form) for one in run.epochs.begun(form)]
    orders = run.with_us[form]["orders"]
    if form in BEGINNING:
        assert all(len(one) == loaderforms.FILES for one in announced)
        announced = [one[: len(order)] for one, order in zip(announced, orders, strict=True)]
    assert announced == orders


@pytest.mark.parametrize("form", UNKNOWN)
def test_what_is_not_known_is_left_alone(run: Run, form: str) -> None:
    assert run.epochs.said[form] == []


@pytest.mark.parametrize("form", KNOWN)
def test_each_stream_ends(run: Run, form: str) -> None:
    live: set[int] = set()
    for one in run.epochs.said[form]:
        (live.discard if one.ended else live.add)(one.stream)
    assert not live


def test_streams_are_numbered(run: Run) -> None:
    assert [one.stream for one in run.epochs.begun("sequential")] == [1, 2]
    first, second = run.epochs.begun("interleaved")
    assert first.stream != second.stream


def test_two_iterators_of_one_loader_are_two_streams(run: Run) -> None:
    announced = run.epochs.begun("two iterators")
    assert len({one.stream for one in announced}) == 2
    orders = run.with_us["two iterators"]["orders"]
    assert [read(one, "") for one in announced] == [orders[2], orders[1]]


def test_without_a_length_there_is_no_table(run: Run) -> None:
    announced = run.epochs.begun("no length")
    assert [one.indices for one in announced] == run.with_us["no length"]["orders"]
    assert [one.columns for one in announced] == [0, 0]


def test_nothing_went_wrong(run: Run) -> None:
    assert run.lab.counters().get("errors", 0) == 0


SMALL = """
import torch
class Files(torch.utils.data.Dataset):
    def __init__(self): self.paths = [src(name) for name in sorted(os.listdir(SOURCE))]
    def __len__(self): return len(self.paths)
    def __getitem__(self, index): return int(open(self.paths[index]).read())
loader = torch.utils.data.DataLoader(Files(), 3, shuffle=True)
say([[i for batch in loader for i in batch.tolist()] for epoch in range(EPOCHS)])
"""


def small(lab: Lab, epochs: int = 1, files: int = 8) -> Any:
    """Runs a small program."""
    return lab.run(SMALL.replace("EPOCHS", str(epochs)))


def fill(lab: Lab, files: int = 8) -> None:
    """Its files."""
    for index in range(files):
        lab.put(f"f{index:03d}", b"%d" % index)
    lab.install()


def test_both_layers_announce(lab: Lab) -> None:
    fill(lab)
    with Epochs(lab) as epochs:
        orders = small(lab, 2)
    assert [read(one, "") for one in epochs.begun()] == orders
    assert [path.name.split("-")[0] for path in epochs.orders.iterdir()] == ["table"]


USEFUL = [
    ("SCANNING", 0, True),
    ("STARTING", 0, True),
    ("SETTLED", 0, False),
    ("SETTLED", 1, True),
    ("MEASURING", 1, True),
    ("ENDED", 0, False),
]
"""By what the page says: state, whether opens are logged, and whether epochs are announced."""


def test_only_while_it_is_of_use(native_lab: Lab) -> None:
    fill(native_lab)
    code = SMALL.partition("say(")[0] + f"for _ in range({len(USEFUL)}): step(); list(loader)\nsay(None)"
    counts = []

    def say(state: str, logging: int) -> None:
        counts.append(len(epochs.begun()))
        native_lab.state(shim.State[state])
        native_lab._poke(shim.LOGGING_OFFSET, logging)

    with Epochs(native_lab) as epochs:
        stepped(native_lab, code, actions=[partial(say, state, logging) for state, logging, _ in USEFUL])
        counts.append(len(epochs.begun()))
    assert [after > before for before, after in itertools.pairwise(counts)] == [announced for *_, announced in USEFUL]


def test_nobody_listens(native_lab: Lab) -> None:
    fill(native_lab)
    (native_lab.node / "orders").mkdir()
    assert len(small(native_lab, 2)[1]) == 8


def test_no_place_for_orders(native_lab: Lab) -> None:
    fill(native_lab)
    assert len(small(native_lab, 2)[1]) == 8
    assert native_lab.counters()["errors"] == 4  # the table's and the epoch's, twice


def test_the_head_of_a_long_epoch_comes_first(native_lab: Lab) -> None:
    fill(native_lab)
    code = SMALL.replace("sorted(os.listdir(SOURCE))]", "sorted(os.listdir(SOURCE))] * 600").replace("EPOCHS", "2")
    with Epochs(native_lab) as epochs:
        orders = native_lab.run(code)
    assert [len(head) for head in epochs.heads] == [2048]
    assert [int(os.path.basename(path)[1:]) for path in epochs.heads[0]] == orders[0][:2048]


def test_workers_killed(native_lab: Lab) -> None:
    fill(native_lab)
    code = (
        SMALL.split("loader =", maxsplit=1)[0]
        + """
import signal
loader = torch.utils.data.DataLoader(Files(), 1, shuffle=True, num_workers=2, collate_fn=list)
# lists: tensors need the worker that sent them
batches = iter(loader)
next(batches)
for worker in batches._workers: os.kill(worker.pid, signal.SIGKILL)
try:
    for batch in batches: pass
    say("no error")
except RuntimeError as error: say("exited unexpectedly" in str(error) or "killed by signal" in str(error))
"""
    )
    with Epochs(native_lab) as epochs:
        process = native_lab.start(code)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert json.loads(out.splitlines()[-1]) is True
    assert [one.ended for one in epochs.all] == [False, True]


def test_the_program_sees_no_difference(native_lab: Lab, tmp_path: Path) -> None:
    fill(native_lab)
    code = (
        SMALL.split("loader =", maxsplit=1)[0]
        + """
import inspect, pickle
loader = torch.utils.data.DataLoader(Files(), 3, shuffle=True)
kind = torch.utils.data.dataloader._BaseDataLoaderIter
it = iter(loader); next(it)
say([sorted(vars(loader)), sorted(vars(loader.dataset)), sorted(vars(loader.sampler)),
     [str(inspect.signature(getattr(kind, n))) for n in ("__init__", "_next_index", "_reset", "__next__")],
     str(inspect.signature(torch.utils.data.DataLoader))])
"""
    )
    with Epochs(native_lab):
        with_us = native_lab.run(code)
    assert with_us == native_lab.run(code, env=native_lab.environment(HPCSTAGE_DISABLE="1"))
