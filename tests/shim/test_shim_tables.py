"""Index -> path: found by the shape of the dataset, believed only where the files exist below a dataset of the job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from conftest import shim_modules
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
with shim_modules():
    import _hpcstage_columns as columns
    import _hpcstage_epochs as epochs
    import _hpcstage_tables as tables
from torch.utils.data import ConcatDataset, Dataset, Subset

pytestmark = pytest.mark.torch
N = 9


class Data(Dataset[Any]):
    """A dataset with these attributes. It has code of its own, which must not be called."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("called")

    @property
    def files(self) -> Any:
        raise AssertionError("called")


class Reader:
    """An object that holds the list in the dataset's place, as timm's datasets have it."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("called")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Images and masks."""
    for directory, suffix in (("images", ".jpg"), ("masks", ".png")):
        (tmp_path / "data" / directory).mkdir(parents=True)
        for index in range(N):
            (tmp_path / "data" / directory / f"{index}{suffix}").touch()
    (tmp_path / "elsewhere").touch()
    return tmp_path / "data"


def found(dataset: Any, root: Path) -> list[list[str]] | None:
    """The table, one list per sample, relative to the root."""
    table = tables.table_of(dataset, [os.fspath(root)])
    if table is None:
        return None
    names = [name and os.path.relpath(name, root) for name in table.take(range(table.rows))]
    spread = table.take(list(range(table.rows))[::-1])
    assert sorted(spread) == sorted(table.take(range(table.rows)))
    return [names[i : i + table.columns] for i in range(0, len(names), table.columns)]


IMAGES = [[f"images/{i}.jpg"] for i in range(N)]
PAIRS = [[f"images/{i}.jpg", f"masks/{i}.png"] for i in range(N)]


def images(root: Path) -> list[str]:
    return [os.fspath(root / name) for (name,) in IMAGES]


FORMS: dict[str, Any] = {
    "samples": lambda r: (s := [(p, 0) for p in images(r)]) and Data(classes=["a"], samples=s, imgs=s, targets=[0] * N),
    "list": lambda r: Data(labels=["cat"] * N, files_=images(r)),
    "tuple of bytes": lambda r: Data(x=tuple(map(os.fsencode, images(r)))),
    "pathlib": lambda r: Data(x=[Path(p) for p in images(r)]),
    "dictionaries": lambda r: Data(x=[{"label": "a", "path": p} for p in images(r)]),
    "dictionary of lists": lambda r: Data(x={"label": [1] * N, "path": images(r)}),
    "relative to root": lambda r: Data(root=os.fspath(r), x=[name for (name,) in IMAGES]),
    "relative to path root": lambda r: Data(base=r, x=[name for (name,) in IMAGES]),
    "relative to a directory": lambda r: Data(root=os.fspath(r), sub="images", x=[f"{i}.jpg" for i in range(N)]),
    "without suffix": lambda r: Data(root=os.fspath(r / "images"), x=[str(i) for i in range(N)]),
    "with dots": lambda r: Data(x=[os.fspath(r / "masks/../images" / f"{i}.jpg") for i in range(N)]),
    "in a reader": lambda r: Data(
        reader=Reader(root=os.fspath(r), samples=[(p, 0) for p in images(r)]), transform=Reader()
    ),
    "in a reader, relative": lambda r: Data(reader=Reader(names=[f"{i}.jpg" for i in range(N)]), root=r / "images"),
    "labels too": lambda r: Data(root=os.fspath(r), labels=["images"] * N, x=images(r)),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_file_per_sample(root: Path, form: str) -> None:
    assert found(FORMS[form](root), root) == IMAGES


def masks(root: Path) -> list[str]:
    return [os.fspath(root / f"masks/{i}.png") for i in range(N)]


TWO: dict[str, Any] = {
    "two lists": lambda r: Data(images=images(r), masks=masks(r)),
    "rows": lambda r: Data(rows=list(zip(images(r), ["label"] * N, masks(r), strict=True))),
    "lists of lists": lambda r: Data(rows=[list(row) for row in zip(images(r), masks(r), strict=True)]),
    "suffixes": lambda r: Data(
        a=os.fspath(r / "images"),
        b=os.fspath(r / "masks"),
        ids=[str(i) for i in range(N)],
        images=images(r),
        masks=masks(r),
    ),
}


@pytest.mark.parametrize("form", TWO)
def test_two_files_per_sample(root: Path, form: str) -> None:
    assert found(TWO[form](root), root) == PAIRS


def test_a_sample_without_a_mask(root: Path) -> None:
    some = masks(root)
    some[1] = some[N - 1] = None  # type: ignore[call-overload]
    expected = [row if i not in (1, N - 1) else [row[0], ""] for i, row in enumerate(PAIRS)]
    assert found(Data(images=images(root), masks=some), root) == expected


def test_numpy(root: Path) -> None:
    numpy = pytest.importorskip("numpy")
    pairs = numpy.array(list(zip(images(root), masks(root), strict=True)))
    assert found(Data(x=numpy.arange(N), y=pairs), root) == PAIRS
    assert found(Data(x=numpy.array(images(root))), root) == IMAGES
    assert found(Data(x=numpy.array(images(root), dtype=object)), root) == IMAGES
    assert found(Data(x=numpy.array(images(root)).astype("S")), root) == IMAGES


def test_pandas(root: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"label": range(N), "name": [f"{i}.jpg" for i in range(N)]}, index=range(100, 100 + N))
    assert found(Data(df=frame, img_dir=os.fspath(root / "images")), root) == IMAGES
    assert found(Data(names=frame["name"], img_dir=os.fspath(root / "images")), root) == IMAGES


class Arrow:
    """Shaped like a column of Arrow's."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def slice(self, start: int, length: int) -> Arrow:
        return Arrow(self.values[start : start + length])

    def take(self, indices: list[int]) -> Arrow:
        return Arrow([self.values[i] for i in indices])

    def to_pylist(self) -> list[Any]:
        return self.values


class ArrowStructures(Arrow):
    """Pictures: the name is beside what may be the whole file, which is not to be read."""

    type = "struct<bytes: binary, path: string>"

    def flatten(self) -> list[Arrow]:
        return [Arrow([b"\0" * 5000] * len(self)), Arrow([value["path"] for value in self.values])]

    def to_pylist(self) -> list[Any]:
        raise AssertionError("called")


class ArrowTable:
    """Shaped like a table of Arrow's."""

    def __init__(self, **columns: Any) -> None:
        self._columns = columns
        self.num_rows = len(next(iter(columns.values())))

    @property
    def column_names(self) -> list[str]:
        return list(self._columns)

    def column(self, which: Any) -> Arrow:
        values = self._columns[which] if isinstance(which, str) else list(self._columns.values())[which]
        return values if isinstance(values, Arrow) else Arrow(values)


class Frame:
    """Shaped like a data set of Hugging Face's."""

    def __init__(self, data: ArrowTable, indices: ArrowTable | None = None) -> None:
        self._data, self._indices = data, indices

    def __len__(self) -> int:
        return (self._indices or self._data).num_rows


def test_hugging_face(root: Path) -> None:
    data = ArrowTable(label=[0] * N, image=[{"bytes": None, "path": path} for path in images(root)])
    assert found(Frame(data), root) == IMAGES
    assert found(Frame(data, ArrowTable(indices=[3, 1, 8])), root) == [IMAGES[3], IMAGES[1], IMAGES[8]]
    assert found(Data(hf=Frame(data)), root) == IMAGES
    pictures = ArrowStructures([{"bytes": b"", "path": path} for path in images(root)])
    assert found(Frame(ArrowTable(image=pictures)), root) == IMAGES


def test_subset_concat_and_wrappers(root: Path) -> None:
    one, two = Data(x=images(root)), Data(images=images(root), masks=masks(root))
    assert found(Subset(one, [4, 2, 2]), root) == [IMAGES[4], IMAGES[2], IMAGES[2]]
    torch = pytest.importorskip("torch")
    assert found(Subset(Subset(one, [4, 2, 7]), torch.tensor([2, 0])), root) == [IMAGES[7], IMAGES[4]]
    wide = [[name, ""] for (name,) in IMAGES]
    assert found(ConcatDataset([one, two]), root) == [*wide, *PAIRS]
    assert found(Subset(ConcatDataset([one, two]), [10, 0, 17]), root) == [PAIRS[1], wide[0], PAIRS[8]]
    assert found(Data(transform=None, ds=one), root) == IMAGES
    assert found(Data(ds=Subset(one, range(N))), root) == IMAGES
    assert found(ConcatDataset([one, Data()]), root) is None


def test_names_through_links(root: Path, tmp_path: Path) -> None:
    """The daemon gets them as they are, and follows the links itself."""
    (tmp_path / "link").symlink_to(root)
    names = [os.fspath(tmp_path / "link" / name) for (name,) in IMAGES]
    table = tables.table_of(Data(x=names), [os.fspath(root)])
    assert table is not None
    assert list(table.take(range(N))) == names
    (tmp_path / "farm").mkdir()
    for index, name in enumerate(images(root)):
        (tmp_path / "farm" / f"{index}.jpg").symlink_to(name)
    farm = [os.fspath(tmp_path / "farm" / f"{index}.jpg") for index in range(N)]
    assert tables.table_of(Data(x=farm), [os.fspath(root)]) is not None


def test_a_list_is_a_dataset(root: Path) -> None:
    assert found(images(root), root) == IMAGES


class Looks(list):  # type: ignore[type-arg]
    """A list with code of its own."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("called")


NOT: dict[str, Any] = {
    "nothing": lambda r: Data(),
    "another length": lambda r: Data(x=images(r)[1:]),
    "directories": lambda r: Data(x=[os.fspath(r / "images")] * N),
    "missing": lambda r: Data(x=[*images(r)[:-1], os.fspath(r / "none")]),
    "elsewhere": lambda r: Data(x=[os.fspath(r.parent / "elsewhere")] * N),
    "numbers": lambda r: Data(x=list(range(N)), y=[(0, 1)] * N),
    "code": lambda r: Data(x=Looks(images(r))),
    "long text": lambda r: Data(root=os.fspath(r), x=["x" * 5000] * N),
    "NUL": lambda r: Data(root=os.fspath(r), x=["a\0b"] * N),
}


@pytest.mark.parametrize("form", NOT)
def test_not_found(root: Path, form: str) -> None:
    assert found(NOT[form](root), root) is None


def test_the_working_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert found(Data(x=[name for (name,) in IMAGES]), root) == IMAGES
    assert found(Data(root="./images/", x=[f"{i}.jpg" for i in range(N)]), root) == IMAGES
    monkeypatch.chdir(root / "masks")
    assert found(Data(x=[f"../images/{i}.jpg" for i in range(N)]), root) == IMAGES


def test_few_questions_to_the_file_system(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    true = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: asked.append(path) or true(path))
    dirs = {f"d{i}": os.fspath(root / f"d{i}") for i in range(30)}
    assert found(Data(**dirs, **{f"x{i}": [f"no{i}"] * N for i in range(30)}), root) is None
    assert len(asked) <= 2 * tables.MAX_LSTATS


TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=9)


@given(st.lists(st.lists(TEXTS | st.none(), min_size=2, max_size=2), min_size=1), st.integers(1, 2))
def test_what_is_written_is_what_is_there(rows: list[list[str | None]], wide: int) -> None:
    found = [columns.Column(lambda wanted: [rows[i] for i in wanted], place) for place in range(wide)]
    written = b"".join(epochs.pieces(tables.FileTable(len(rows), found))).split(b"\0")
    assert written == [b"" if not name or "\0" in name else os.fsencode(name) for row in rows for name in row[:wide]]


def test_rows_that_are_picked_and_joined(root: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    one, two = Data(x=images(root)), Data(images=images(root), masks=masks(root))
    wide = [[name, ""] for (name,) in IMAGES]
    forms: list[tuple[Any, list[list[str]]]] = [
        (one, IMAGES),
        (Subset(one, [4, 2, 2]), [IMAGES[i] for i in (4, 2, 2)]),
        (Subset(one, [2, -1, 3]), [IMAGES[2], IMAGES[8], IMAGES[3]]),
        (Subset(Subset(two, [4, 2, 7]), torch.tensor([2, 0, 2])), [PAIRS[i] for i in (7, 4, 7)]),
        (ConcatDataset([Subset(one, range(3, 6)), Subset(one, [1, 0])]), [IMAGES[i] for i in (3, 4, 5, 1, 0)]),
        (Subset(ConcatDataset([one, one]), [10, 0, 17, 5, 9]), [IMAGES[i] for i in (1, 0, 8, 5, 0)]),
        (ConcatDataset([one, two]), [*wide, *PAIRS]),
        (ConcatDataset([two, one]), [*PAIRS, *wide]),
    ]
    for dataset, expected in forms:
        table = tables.table_of(dataset, [os.fspath(root)])
        name = epochs.write_table(os.fsencode(tmp_path) + b"/", table, lambda: None)
        names = [
            text and os.path.relpath(text, root) for text in (tmp_path / os.fsdecode(name)).read_text().split("\0")
        ]
        assert [names[i : i + table.columns] for i in range(0, len(names), table.columns)] == expected


def test_what_costs_too_much_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, texts = Data(x=[Path(name) for name in images(root)]), Data(x=images(root))
    for dataset in (paths, texts, Subset(paths, [1]), ConcatDataset([texts, paths])):
        assert not tables.table_of(dataset, [os.fspath(root)]).costly
    monkeypatch.setattr(tables, "MOST_COSTLY_ROWS", N - 1)
    for dataset in (paths, Subset(paths, [1]), ConcatDataset([texts, paths])):
        assert tables.table_of(dataset, [os.fspath(root)]).costly
    assert not tables.table_of(texts, [os.fspath(root)]).costly


SPELT = st.sampled_from(["./", "../data/", "a/../", ".//", "", "a./", "/", "//", "/a/./", "b/./c/"])


@given(SPELT, st.lists(st.sampled_from(["x", "a/y.z", "..x", "é", "w./v", "u//t"]), min_size=1, max_size=5), SPELT)
def test_names_are_spelt_alike_whichever_way(head: str, rest: list[str], other: str) -> None:
    """The quick way gives what the slow way gives."""
    names = [head + name for name in rest]
    for some in (names, [*names, other + "x"], [*names, None], list(map(os.fsencode, names))):
        column = columns.Column(lambda wanted, some=some: [some[i] for i in wanted], None)  # type: ignore[misc]
        for column.prefix, column.suffix in (("", ""), ("/base/of", ""), ("/base/", ".jpg")):
            column.prefix = column.prefix and column.prefix.rstrip("/") + "/"
            for column.tidy in (True, False):
                if column.tidy or column.prefix:
                    assert column.take(range(len(some))) == [column.whole(name) for name in some]


def test_samples_are_spread() -> None:
    assert epochs.spread(0) == []
    assert epochs.spread(3) == [0, 1, 2]
    for rows in (64, 65, 1000, 1_281_167):
        places = epochs.spread(rows)
        assert places[0] == 0
        assert places[-1] == rows - 1
        assert len(places) <= 2 * epochs.MAX_PROBES + 1
