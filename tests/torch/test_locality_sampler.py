"""LocalityAwareSampler against PyTorch's DistributedSampler: the same samples in each step of all ranks together."""

from __future__ import annotations

import doctest
import json
import os
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import locality_ranks  # noqa: E402
from locality_ranks import NODE_DIR, ROOT, Files, make_node, run_ranks  # noqa: E402
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, DistributedSampler, Subset  # noqa: E402

from hpcstage.protocol.shim import Holding  # noqa: E402
from hpcstage.torch.samplers import agreement as agreement_module  # noqa: E402
from hpcstage.torch.samplers import locality as locality_module  # noqa: E402
from hpcstage.torch.samplers.agreement import NodeHoldings, claims, owners_of, paths_of, place_in  # noqa: E402
from hpcstage.torch.samplers.balance import NOBODY  # noqa: E402
from hpcstage.torch.samplers.locality import LocalityAwareSampler  # noqa: E402

pytestmark = pytest.mark.torch
quick = settings(deadline=None, max_examples=100)
WORLD = 4
CASES = 60


def pytorchs(case: dict[str, Any], rank: int, epoch: int) -> list[list[int]]:
    """What PyTorch's own samplers give a rank."""
    options = case["options"]
    sampler = DistributedSampler(
        range(len(case["names"])),
        case["world"],
        rank,
        shuffle=options["shuffle"],
        seed=options["seed"],
        drop_last=options["drop_last"],
    )
    sampler.set_epoch(epoch)
    return list(BatchSampler(sampler, options["batch_size"], options["drop_last_batch"]))


def together(rows: list[list[list[int]]], step: int) -> Counter[int]:
    return Counter(sample for row in rows for sample in row[step])


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    flags = {name: draw(st.booleans()) for name in ("shuffle", "drop_last", "drop_last_batch")}
    numbers = {"batch_size": draw(st.integers(1, 9)), "seed": draw(st.integers(0, 99))}
    return {
        "world": draw(st.integers(1, 9)),
        "names": [str(n) for n in range(draw(st.integers(0, 70)))],
        "options": {**flags, **numbers},
    }


@quick
@given(cases(), st.integers(0, 5))
def test_without_a_daemon_it_is_pytorchs(case: dict[str, Any], epoch: int) -> None:
    for rank in range(case["world"]):
        sampler = LocalityAwareSampler(case["names"], num_replicas=case["world"], rank=rank, **case["options"])
        sampler.set_epoch(epoch)
        assert list(sampler) == pytorchs(case, rank, epoch)
        assert len(sampler) == len(pytorchs(case, rank, epoch))


@st.composite
def held(draw: st.DrawFn, nodes: int, samples: int) -> tuple[Any, Any]:
    """What nodes hold of samples, and the lowest claims."""
    one = st.lists(st.sampled_from([*Holding]), min_size=samples, max_size=samples)
    seen = [torch.tensor(draw(one), dtype=torch.uint8) for _ in range(nodes)]
    return seen, torch.stack([claims(one, node) for node, one in enumerate(seen)]).amin(0)


@settings(deadline=None, max_examples=200)
@given(cases(), st.data())
def test_whatever_nodes_hold_a_step_has_what_pytorchs_has(case: dict[str, Any], data: st.DataObject) -> None:
    """Without processes, so that there may be many worlds; with real ones below."""
    world, samples = case["world"], len(case["names"])
    on_node = data.draw(st.lists(st.integers(0, 3), min_size=world, max_size=world), label="node of each rank")
    cards = [[node, 7, rank, 1] for rank, node in enumerate(on_node)]
    rows = []
    owners = owners_of(data.draw(held(len(set(on_node)), samples))[1])
    for rank in range(world):
        sampler = LocalityAwareSampler(range(samples), num_replicas=world, rank=rank, **case["options"])
        sampler._nodes._place, sampler._nodes._owners = place_in(cards, rank), owners
        sampler._nodes.epoch = 0
        rows.append(list(sampler))
    theirs = [pytorchs(case, rank, 0) for rank in range(world)]
    assert [len(row) for row in rows] == [len(row) for row in theirs]
    for step in range(len(theirs[0])):
        assert together(rows, step) == together(theirs, step)
        assert all(row[step] for row in rows)
        assert len({len(row[step]) for row in rows}) == 1


@quick
@given(cases(), st.integers(0, 5), st.data())
def test_a_resumed_epoch_goes_on(case: dict[str, Any], epoch: int, data: st.DataObject) -> None:
    def make() -> LocalityAwareSampler:
        return LocalityAwareSampler(case["names"], num_replicas=case["world"], rank=0, **case["options"])

    whole = make()
    whole.set_epoch(epoch)
    batches = list(whole)
    done = data.draw(st.integers(0, len(batches)))
    stopped = make()
    stopped.set_epoch(epoch)
    drawn = iter(stopped)
    assert [next(drawn) for _ in range(done)] == batches[:done]
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    resumed.set_epoch(epoch)
    assert list(resumed) == batches[done:]
    assert list(resumed) == batches, "the next time it is a whole epoch"
    resumed.load_state_dict(whole.state_dict(used=done))
    resumed.set_epoch(epoch + 1)
    assert len(list(resumed)) == len(batches), "another epoch begins at its beginning"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 1])
def test_torchdatas_loader_goes_on(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        sampler = LocalityAwareSampler(range(40), 4, seed=3)
        sampler.set_epoch(1)
        return stateful.StatefulDataLoader(torch.arange(40), batch_sampler=sampler, num_workers=workers)

    whole = [batch.tolist() for batch in make()]
    stopped = make()
    begun = iter(stopped)
    assert [next(begun).tolist() for _ in range(3)] == whole[:3]
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert [batch.tolist() for batch in resumed] == whole[3:]


def test_a_state_of_another_seed_is_refused() -> None:
    state = LocalityAwareSampler(range(9), 2, seed=1).state_dict()
    with pytest.raises(ValueError, match="seed"):
        LocalityAwareSampler(range(9), 2, seed=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_replicas": 2, "rank": 2}, "rank 2 of 2"),
        ({"num_replicas": 0}, "rank 0 of 0"),
        ({"paths": ["a"]}, "1 paths for 9"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LocalityAwareSampler(range(9), **{"batch_size": 2, **options})


def test_lightning_finds_the_epoch() -> None:
    data = pytest.importorskip("lightning.fabric.utilities.data")
    sampler = LocalityAwareSampler(range(10), 4)
    data._set_sampler_epoch(DataLoader(torch.arange(10), batch_sampler=sampler), 5)
    assert sampler.epoch == 5


# ---- who holds what


@quick
@given(st.integers(1, 5), st.integers(1, 50), st.data())
def test_one_holder_is_chosen_for_each_sample(nodes: int, samples: int, data: st.DataObject) -> None:
    seen, lowest = data.draw(held(nodes, samples))
    for sample, owner in enumerate(owners_of(lowest)):
        having = [node for node in range(nodes) if seen[node][sample] == Holding.KEPT]
        coming = [node for node in range(nodes) if seen[node][sample] == Holding.DUE]
        assert owner in (having or coming or [NOBODY])


def test_where_all_nodes_hold_all_each_gets_about_as_many() -> None:
    full = torch.full((4000,), Holding.KEPT, dtype=torch.uint8)
    counts = Counter(owners_of(torch.stack([claims(full, node) for node in range(4)]).amin(0)))
    assert set(counts) == {0, 1, 2, 3}
    assert all(850 < count < 1150 for count in counts.values())


def test_the_last_of_many_nodes_has_a_claim() -> None:
    for holding in (Holding.KEPT, Holding.DUE):
        assert owners_of(claims(torch.full((9,), holding, dtype=torch.uint8), 65534)) == [65534] * 9


def test_paths_of_datasets() -> None:
    files = Files(["a", "b", "c"])
    assert paths_of(files) == [f"{ROOT}/{name}" for name in "abc"]
    assert paths_of(Subset(files, [2, 0])) == [f"{ROOT}/c", f"{ROOT}/a"]
    assert paths_of([Path("/x/1"), "/x/2"]) == ["/x/1", "/x/2"]
    named = SimpleNamespace(labels=["x", "y"], images=[("/x/1", 0), ("/x/2", 1)])
    assert paths_of(type("Named", (SimpleNamespace,), {"__len__": lambda _: 2})(**vars(named))) == ["/x/1", "/x/2"]
    assert paths_of(torch.arange(3)) is None
    assert paths_of(range(3)) is None
    assert paths_of(ConcatDataset([files, Subset(files, [1])])) == [f"{ROOT}/{name}" for name in "abcb"]
    assert paths_of(ConcatDataset([files, Subset(range(3), [1])])) is None
    files.samples.append(("/one/too/many", 0))
    assert paths_of(Subset(["/a", 7], [0])) is None


def test_paths_in_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    rows = {"label": [1, 0], "note": ["/x/1", "no path"], "image": ["/x/1", "/x/2"]}

    class Framed(SimpleNamespace):
        def __len__(self) -> int:
            return 2

    assert paths_of(Framed(frame=pandas.DataFrame(rows))) == ["/x/1", "/x/2"]
    assert paths_of(Framed(frame=pandas.DataFrame([[1, 2, "/x/1"], [3, 4, "/x/2"]], columns=["a", "a", "b"]))) == [
        "/x/1",
        "/x/2",
    ]
    assert paths_of(Framed(column=pandas.Series(rows["image"], index=[7, 9]))) == ["/x/1", "/x/2"]
    assert paths_of(Framed(paths=pandas.Series(["1", "2"]).to_numpy())) == ["1", "2"]
    assert paths_of(Framed(names=pandas.Series(["1", "2"]))) is None, "below a directory that nobody names"
    assert paths_of(Framed(frame=pandas.DataFrame({"label": [1, 0]}))) is None


def test_a_look_at_what_the_node_holds(tmp_path: Path) -> None:
    names = [f"{n:03}" for n in range(20)]
    node_dir = make_node(tmp_path / "node", names, kept=["003", "007"], due=["007", "009"])
    listed = [f"{ROOT}/{name}" for name in ("009", "003", "elsewhere", "007", "000", "001")]
    found = NodeHoldings(listed, {NODE_DIR: os.fspath(node_dir)}).look()
    expected = [Holding.DUE, Holding.KEPT, Holding.NONE, Holding.KEPT, Holding.NONE, Holding.NONE]
    assert found is not None
    assert found.tolist() == expected
    unusual = NodeHoldings([f"{ROOT}//003", f"{ROOT}/./007"], {NODE_DIR: os.fspath(node_dir)}).look()
    assert unusual is not None
    assert unusual.tolist() == [Holding.KEPT] * 2


@pytest.mark.parametrize("what", ["nothing", "foreign", "short", "manifest"])
def test_a_node_that_says_nothing_usable(tmp_path: Path, what: str) -> None:
    node_dir = make_node(tmp_path / "node", ["a"], kept=["a"], due=[])
    if what == "nothing":
        (node_dir / "holdings").unlink()
    elif what == "foreign":
        (node_dir / "holdings").write_bytes(bytes(17))
    elif what == "short":
        (node_dir / "holdings").write_bytes(b"")
    else:
        (node_dir / "manifest.bin").write_bytes(b"hpcstage")
    asked = NodeHoldings([f"{ROOT}/a"], {NODE_DIR: os.fspath(node_dir)})
    assert asked.look() is None
    assert NodeHoldings([f"{ROOT}/a"], {}).look() is None
    assert NodeHoldings(None, {NODE_DIR: os.fspath(node_dir)}).look() is None


# ---- real ranks


def make_case(rng: random.Random, directory: Path) -> dict[str, Any]:
    """Ranks on nodes, and what these hold; some samples nobody, some several."""
    world = WORLD
    names = [f"{n:04}" for n in range(rng.randint(0, 60))]
    rng.shuffle(names)
    staged = sorted(name for name in names if rng.random() < 0.9) or ["other"]
    likely = rng.choice([0.0, 0.3, 1.0])
    nodes = []
    for node in range(rng.randint(1, world)):
        kept = [name for name in staged if rng.random() < likely]
        due = [name for name in staged if rng.random() < 0.3]
        nodes.append(os.fspath(make_node(directory / f"node{node}", staged, kept, due)))
    flags = {name: rng.random() < 0.5 for name in ("shuffle", "drop_last", "drop_last_batch")}
    return {
        "world": world,
        "names": names,
        "node_dirs": [*nodes, *rng.choices(nodes, k=world - len(nodes))],
        "options": {**flags, "batch_size": rng.randint(1, 9), "seed": rng.randint(0, 9), "epochs": [0, 3]},
        "other": {},
    }


def special_cases(directory: Path) -> dict[str, dict[str, Any]]:
    """Two nodes of two ranks that hold half each; and what must send all of them back to the even split."""
    names = [f"{n:03}" for n in range(64)]
    nodes = [os.fspath(make_node(directory / str(node), names, kept=names[node::2], due=[])) for node in range(2)]
    flags = {"shuffle": True, "drop_last": False, "drop_last_batch": False}
    plain = {
        "world": 4,
        "names": names,
        "node_dirs": [nodes[0], nodes[1], nodes[0], nodes[1]],
        "options": {**flags, "batch_size": 4, "seed": 5, "epochs": [2]},
        "other": {},
    }
    lame = os.fspath(directory / "nothing there")
    return {
        "plain": plain,
        "no daemon": {**plain, "node_dirs": [*nodes, nodes[0], None]},
        "no files": {**plain, "node_dirs": [*nodes, nodes[0], lame]},
        "another seed": {**plain, "other": {"seed": 6}},
        "another epoch": {**plain, "other": {"epochs": [3]}},
        "another length": {**plain, "other": {"batch_size": 5}},
    }


@pytest.fixture(scope="module")
def given_cases(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], list[Any]]]:
    """All cases, and what each rank was given in them."""
    directory = tmp_path_factory.mktemp("ranks")
    rng = random.Random(4)
    made = [make_case(rng, directory / f"case{number}") for number in range(CASES)]
    made += special_cases(directory / "special").values()
    (directory / "cases.json").write_text(json.dumps(made))
    run_ranks(Path(locality_ranks.__file__), directory, WORLD)
    rows = [json.loads((directory / f"given.{rank}.json").read_text()) for rank in range(WORLD)]
    return [(case, [rows[rank][at] for rank in range(case["world"])]) for at, case in enumerate(made)]


def test_each_step_has_what_pytorchs_samplers_have(given_cases: list[tuple[dict[str, Any], list[Any]]]) -> None:
    differ = 0
    for case, ranks in given_cases[:CASES]:
        for at, epoch in enumerate(case["options"]["epochs"]):
            rows = [rank[at] for rank in ranks]
            theirs = [pytorchs(case, rank, epoch) for rank in range(case["world"])]
            assert [len(row) for row in rows] == [len(row) for row in theirs], "as many steps on each rank"
            for step in range(len(theirs[0])):
                assert together(rows, step) == together(theirs, step)
                assert all(row[step] for row in rows)
                assert len({len(row[step]) for row in rows}) == 1
            differ += rows != theirs
    assert differ > CASES / 2, "in most cases ranks get other samples than PyTorch gives them"


def test_ranks_get_what_their_node_holds(given_cases: list[tuple[dict[str, Any], list[Any]]]) -> None:
    case, ranks = given_cases[CASES]
    local = [
        sum(int(case["names"][sample]) % 2 == int(Path(case["node_dirs"][rank]).name) for sample in batch)
        for rank, epochs in enumerate(ranks)
        for batch in epochs[0]
    ]
    theirs = [
        sum(int(case["names"][sample]) % 2 == rank % 2 for sample in batch)
        for rank in range(4)
        for batch in pytorchs(case, rank, 2)
    ]
    assert sum(local) >= 0.85 * 64
    assert sum(theirs) < 0.7 * 64


@pytest.mark.parametrize("at", range(1, 6))
def test_all_ranks_do_without_together(given_cases: list[tuple[dict[str, Any], list[Any]]], at: int) -> None:
    case, ranks = given_cases[CASES + at]
    for rank, epochs in enumerate(ranks):
        options = {**case["options"], **(case["other"] if rank == 3 else {})}
        assert epochs[0] == pytorchs({**case, "options": options}, rank, options["epochs"][0])


def test_the_examples_run() -> None:
    for module in (locality_module, agreement_module):
        result = doctest.testmod(module)
        assert result.attempted
        assert not result.failed
