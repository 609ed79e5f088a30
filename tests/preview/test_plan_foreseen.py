"""`hpcstage plan --order trace` and `--order sampler`: the command line against torch and against what a run left."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcstage.cli.samplers import asked
from hpcstage.errors import UsageError
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.pathlist import PathList
from hpcstage.plan.dataset.scan import scan
from hpcstage.plan.order import readings, trace
from hpcstage.plan.types import Dataset, DatasetKind, Entry

RANDOM = readings.SamplerAsked("random", seed=3)


def manifest_of(*names: bytes) -> Manifest:
    dataset = Dataset("0-d", DatasetKind.DIRECTORY, b"/d", (), ("/d",))
    return Manifest.build([dataset], [Entry(0, n, 1, 0, 0o100644, 1, 1, False) for n in names])


# ---- whose index


def test_the_dataset_is_sorted_by_class_then_by_name() -> None:
    manifest = manifest_of(b"a-b/1", b"a/2", b"a/10", b"a/s/0", b"a/s-t/0", b"b/1")
    found = readings.readings(RANDOM, manifest)
    paths = [b"a/10", b"a/2", b"a/s/0", b"a/s-t/0", b"a-b/1", b"b/1"]
    assert [manifest.path(i) for i in found.dataset] == paths
    assert [manifest.path(i) for i in range(6)] != paths, "as whole paths they are sorted otherwise"
    assert "6 files" in found.about
    assert "ImageFolder" in found.about


def test_files_beside_the_classes_are_no_samples() -> None:
    manifest = manifest_of(b"README", b"a/1", b"b/1", b"z.txt")
    found = readings.readings(RANDOM, manifest)
    assert [manifest.path(i) for i in found.dataset] == [b"a/1", b"b/1"]
    assert "2 files" in found.about
    assert "2 outside of a class left out" in found.about
    flat = readings.readings(RANDOM, manifest_of(b"b", b"a"))
    assert flat.dataset.tolist() == [0, 1]
    assert "left out" not in flat.about


def test_the_dataset_of_a_list_has_its_order_and_its_repetitions() -> None:
    lists = [PathList("@l", [b"/d/b", b"/d/x", b"/d/a", b"/d/b"])]
    found = readings.readings(RANDOM, manifest_of(b"a", b"b"), lists)
    assert found.dataset.tolist() == [1, 0, 1]
    assert "@l" in found.about
    with pytest.raises(UsageError, match="holds no file"):
        readings.readings(RANDOM, manifest_of(b"a"), [PathList("@l", [b"/x"])])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1,), (0, 2)])
def test_samples_of_an_epoch_are_told_before_it_is_computed(ranks: tuple[int, ...], drop_last: bool) -> None:
    made = readings.SamplerAsked("distributed", epochs=3, replicas=3, ranks=ranks, batch=2, drop_last=drop_last)
    found = readings.readings(made, manifest_of(*(b"%02d" % i for i in range(20))))
    epochs = list(found)
    assert [epoch.epoch for epoch in epochs] == [0, 1, 2]
    assert {len(epoch.indices) for epoch in epochs} == {found.samples}
    first = list(dict.fromkeys(found.dataset[i] for epoch in epochs for i in epoch.indices))
    assert found.order().ids.tolist() == first
    assert [found.rank_at(position) for position in range(len(ranks) + 1)] == [*ranks, ranks[0]]


@pytest.mark.torch
def test_ranks_of_a_node_read_in_turn_what_torch_gives_them() -> None:
    torch = pytest.importorskip("torch")
    made = readings.SamplerAsked("distributed", 5, epochs=2, replicas=4, ranks=(1, 3), batch=3, drop_last=True)
    found = readings.readings(made, manifest_of(*(b"%02d" % i for i in range(29))))
    for reading in found:
        for place, rank in enumerate(made.ranks):
            sampler = torch.utils.data.DistributedSampler(range(29), 4, rank, seed=5)
            sampler.set_epoch(reading.epoch)
            loader = torch.utils.data.DataLoader(range(29), 3, sampler=sampler, drop_last=True)
            assert [int(i) for batch in loader for i in batch] == reading.indices[place::2].tolist()


# ---- options


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 2}, "--ranks needs --sampler distributed"),
        ({"sampler": "random", "rank": "0"}, "--rank needs --sampler distributed"),
        ({"sampler": "random", "no_shuffle": True}, "--no-shuffle needs"),
        ({"seed": 0}, "--seed needs --sampler random or distributed"),
        ({"sampler": "sequential", "seed": 1}, "--seed needs"),
        ({"sampler": "distributed"}, "number of processes"),
        ({"sampler": "random", "drop_last": True}, "size of a batch"),
        ({"sampler": "random", "seed": 2**64}, "no seed"),
        ({"sampler": "distributed", "ranks": 4, "rank": "4"}, "4 is not among 0 to 3"),
        ({"sampler": "distributed", "ranks": 4, "rank": "2-1"}, "not among"),
        ({"sampler": "distributed", "ranks": 4, "rank": "1,x"}, "'x' is not a rank"),
        ({"sampler": "distributed", "ranks": 4, "rank": ""}, "'' is not a rank"),
        ({"sampler": "distributed", "ranks": 1 << 30}, "too many"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        asked(given, None)


def test_options_become_a_sampler() -> None:
    assert asked({"drop_last": False, "rank": None}, 3) is None
    options = {"sampler": "distributed", "ranks": 8, "rank": "0-1, 5", "seed": 4, "batch": 9, "no_shuffle": True}
    assert asked(options, 3) == readings.SamplerAsked(
        "distributed", 4, 3, shuffle=False, replicas=8, ranks=(0, 1, 5), batch=9
    )  # fmt: skip
    assert asked({"sampler": "sequential"}, None) == readings.SamplerAsked("sequential")
    assert "over 8 ranks (here: 0-2)" in readings.SamplerAsked("distributed", replicas=8, ranks=(0, 1, 2)).text()


# ---- the command line


def plan(hpcstage: Any, root: Path, *arguments: str, as_json: bool = False) -> Any:
    result = hpcstage("plan", "--data", root, *arguments, *(["--json"] if as_json else []))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout) if as_json else result.stdout.decode()


@pytest.mark.torch
def test_a_shuffling_loader_of_an_image_folder(hpcstage: Any, make_tree: Callable[..., Path]) -> None:
    torch = pytest.importorskip("torch")
    root = make_tree(files=10)
    samples = sorted(f"{root.resolve()}/{p.parent.name}/{p.name}" for p in root.glob("*/*"))
    loader = torch.utils.data.DataLoader(
        samples, batch_size=4, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(11)
    )
    expected = [[path for batch in loader for path in batch] for _ in range(2)]
    options = ["--order", "sampler", "--sampler", "random", "--seed", "11", "--epochs", "2", "--batch", "4"]
    data = plan(hpcstage, root, *options, "--drop-last", "--limit", "100", as_json=True)
    found = [[entry["path"] for entry in epoch["entries"]] for epoch in data["readings"]["epochs"]]
    assert found == expected
    assert data["order"]["provenance"] == "sampler"
    needed = list(dict.fromkeys(path for epoch in expected for path in epoch))
    assert [entry["path"] for entry in data["entries"]][: len(needed)] == needed
    assert (len(data["entries"]), data["readings"]["samples_per_epoch"]) == (10, 8)


def test_ranks_in_the_text(hpcstage: Any, make_tree: Callable[..., Path]) -> None:
    root = make_tree(files=9)
    options = ["--sampler", "distributed", "--ranks", "4", "--rank", "0-1", "--no-shuffle", "--epochs", "5"]
    text = plan(hpcstage, root, *options)
    for words in (
        "order    sampler, 5 files, then 4 that it does not name", "distributed over 4 ranks (here: 0-1), not shuffled",
        "as ImageFolder does", "epoch 0 reads 6 samples on 2 ranks", "... and 2 more epochs",
    ):  # fmt: skip
        assert words in text
    assert "epoch 3" not in text
    rows = text.split("epoch 2 reads")[1].splitlines()[2:8]
    assert [row.split()[:3] for row in rows] == [
        [str(position + 1), str(position % 2), str(index)] for position, index in enumerate([0, 1, 4, 5, 8, 0])
    ]
    assert "epoch 4 reads" in plan(hpcstage, root, *options, "--limit", "1")
    assert "epoch" not in plan(hpcstage, root, *options, "--limit", "0").split("program")[0]
    assert "epochs" not in plan(hpcstage, root, *options, as_json=True)["readings"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "d", "--sampler", "random", "--order", "manifest"], "a sampler and the order manifest"),
        (["--data", "d", "--ranks", "3"], "--ranks needs --sampler distributed"),
        (["d", "--sampler", "random"], "both a run directory and --sampler"),
    ],
)
def test_bad_input_is_one_line(hpcstage: Any, arguments: list[str], words: str) -> None:
    (hpcstage.cwd / "d").mkdir()
    (hpcstage.cwd / "d" / "file").write_text("x")
    result = hpcstage("plan", *arguments)
    error = result.stderr.decode()
    assert (result.returncode, words in error, error.count("\n")) == (2, True, 1), error


def leave_trace(hpcstage: Any, root: Path, ids: list[int]) -> None:
    manifest = scan(resolve([os.fspath(root)], hpcstage.cwd)).manifest
    made = trace.TraceHeader(
        ("python", "my train.py"), (os.fspath(root.resolve()),), trace.digest(manifest), len(manifest), "run-7",
        "2026-01-01T00:00:00Z",
    )  # fmt: skip
    assert trace.save(hpcstage.cwd / "state/hpcstage/traces", trace.Trace(made, array("I", ids))) is None


@pytest.mark.parametrize("setting", [["--order", "trace"], []])
def test_the_trace_of_the_last_run(hpcstage: Any, make_tree: Callable[..., Path], setting: list[str]) -> None:
    root = make_tree(files=5)
    leave_trace(hpcstage, root, [4, 0, 2])
    text = plan(hpcstage, root, *setting)
    for words in ("order    trace, 3 files, then 2", "left by run run-7: python 'my train.py'"):
        assert words in text
    data = plan(hpcstage, root, *setting, "--limit", "9", as_json=True)
    names = sorted(f"{p.parent.name}/{p.name}" for p in root.glob("*/*"))
    assert [entry["path"][-len(names[0]) :] for entry in data["entries"]] == [names[i] for i in (4, 0, 2, 1, 3)]


def test_a_trace_of_other_files_is_said_and_not_taken(hpcstage: Any, make_tree: Callable[..., Path]) -> None:
    root = make_tree(files=5)
    assert "no earlier run on these datasets left a trace" in plan(hpcstage, root, "--order", "trace")
    leave_trace(hpcstage, root, [1])
    (root / "new").write_text("")
    for setting in (["--order", "trace"], []):
        assert "the dataset's files are not those of run run-7" in plan(hpcstage, root, *setting)
    assert "by path (as asked for)" in plan(hpcstage, root, "--order", "manifest")
    assert "name a --sampler" in plan(hpcstage, root, "--order", "sampler")
