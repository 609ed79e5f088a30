"""What programs say that read with h5py, LMDB, PyArrow and Pillow while their file arrives is what they say anyhow."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from shimlab import Action, Coming, Lab, stepped

from hpcstage.protocol import shim
from hpcstage.protocol.arriving import LEAST_STRIPE_BYTES as MB

pytest_plugins = ("shimfixtures",)
TOOLS = """
import hashlib, random
path, found = src("file"), hashlib.sha256()
def take(*data):
    for one in data: found.update(one if isinstance(one, (bytes, bytearray, memoryview)) else repr(one).encode())
"""
END = "\nsay(found.hexdigest())\n"
HDF5 = """
import h5py
file = h5py.File(path, "r", driver=sys.argv[2])
rows = list(range(1500))
random.Random(3).shuffle(rows)
for phase in range(4):
    for row in rows[375 * phase:][:375]:
        take(file["contiguous"][row].tobytes())
        if row % 7 == 0: take(file["packed"][row].tobytes(), file["texts"][row % 500])
    take(file["packed"][phase::40, 3:50].tobytes(), dict(file.attrs), sorted(file))
    if phase == 2: file.close(); file = h5py.File(path, "r", driver=sys.argv[2])
    if phase < 3: step()
"""
LMDB = """
import lmdb
def opened(): return lmdb.open(path, subdir=False, readonly=True, lock=False)
keys = [b"%06d" % number for number in range(5000)]
random.Random(3).shuffle(keys)
kept = opened()
for phase in range(4):
    if phase == 2: kept.close(); kept = opened()
    with kept.begin() as one, kept.begin(buffers=True) as two:
        for key in keys[1250 * phase:][:1250]: take(one.get(key), two.get(key))
        take(one.stat(), sum(len(value) for _, value in one.cursor()))
    if phase < 3: step()
"""
PARQUET = """
import pyarrow, pyarrow.parquet as parquet, pyarrow.dataset as dataset
how = sys.argv[2]
file = parquet.ParquetFile(path, memory_map=how == "mapped")
groups = list(range(file.num_row_groups))
random.Random(3).shuffle(groups)
def told(table):
    for column in table.columns: take(column.to_pylist()[::37])
for phase in range(4):
    for group in groups[phase::4]: told(file.read_row_group(group))
    told(parquet.read_table(path, columns=["number"], memory_map=how == "mapped"))
    told(dataset.dataset(path, format="parquet").to_table(filter=dataset.field("number") < 9000 * phase))
    with pyarrow.OSFile(path) as plain, pyarrow.memory_map(path) as mapped:
        for at in range(0, plain.size() - 5000, 300_007):
            plain.seek(at); mapped.seek(at)
            take(plain.read(5000), mapped.read(5000))
    if phase < 3: step()
"""
IMAGES = """
from PIL import Image, ImageSequence
kept = Image.open(path)
frames = list(range(kept.n_frames))
random.Random(3).shuffle(frames)
for phase in range(4):
    for frame in frames[phase::4]:
        kept.seek(frame)
        take(kept.size, kept.crop((3, 5, 60, 50)).tobytes(), kept.getpixel((9, 9)))
    with Image.open(path) as again:
        take([image.convert("L").resize((9, 9)).tobytes() for image in ImageSequence.Iterator(again)])
    if phase < 3: step()
"""


def make_hdf5(path: Path) -> None:
    h5py, numpy = pytest.importorskip("h5py"), pytest.importorskip("numpy")
    rng = numpy.random.default_rng(1)
    with h5py.File(path, "w") as file:
        file["contiguous"] = rng.integers(0, 255, (1500, 2800), "u1")
        file.create_dataset("packed", data=rng.integers(0, 9, (2000, 600), "u2"), chunks=(50, 100), compression="gzip")
        file["texts"] = ["text" * (number % 50) for number in range(500)]
        file.attrs["what"] = "a test"


def make_lmdb(path: Path) -> None:
    lmdb, rng = pytest.importorskip("lmdb"), random.Random(1)
    with lmdb.open(os.fspath(path), subdir=False, map_size=20 * MB, lock=False) as made, made.begin(write=True) as one:
        for number in range(5000):
            one.put(b"%06d" % number, rng.randbytes(100 + number % 1500))


def make_parquet(path: Path) -> None:
    pyarrow, rng = pytest.importorskip("pyarrow"), random.Random(1)
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "number": range(40_000), "real": [rng.random() for _ in range(40_000)],
        "bytes": [rng.randbytes(rng.randrange(200)) for _ in range(40_000)],
    }  # fmt: skip
    parquet.write_table(
        pyarrow.table({name: list(values) for name, values in columns.items()}), path, row_group_size=2000
    )


def make_images(path: Path) -> None:
    image, rng = pytest.importorskip("PIL.Image"), random.Random(1)
    frames = [image.frombytes("RGB", (200, 150), rng.randbytes(90_000)) for _ in range(60)]
    frames[0].save(path, format="TIFF", save_all=True, append_images=frames[1:])


LIBRARIES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "h5py": (make_hdf5, HDF5, "sec2"),
    "h5py by streams of C": (make_hdf5, HDF5, "stdio"),
    "LMDB": (make_lmdb, LMDB, ""),
    "PyArrow": (make_parquet, PARQUET, "plain"),
    "PyArrow mapped": (make_parquet, PARQUET, "mapped"),
    "Pillow": (make_images, IMAGES, ""),
}
READS = {"h5py", "PyArrow", "Pillow"}
"""Those of which some reads are served while the file arrives."""


class GrantedRows:
    """The incoming file, which has other bytes until its stripes arrive."""

    def __init__(self, lab: Lab) -> None:
        self.content = (lab.source / "file").read_bytes()
        self.coming = Coming(lab, incoming=b"x" * len(self.content))
        self.stripes = -(-len(self.content) // MB)
        lab.install().state(shim.State.SETTLED)
        self.coming.begin()
        self.arrive(0, self.stripes - 1)

    def arrive(self, *stripes: int) -> None:
        with self.coming.incoming.open("r+b") as file:
            for stripe in stripes:
                file.seek(stripe * MB)
                file.write(self.content[stripe * MB : (stripe + 1) * MB])
        self.coming.arrive(*stripes)

    def voided(self) -> None:
        """As the daemon and the copier do."""
        self.coming.void()
        os.truncate(self.coming.incoming, 0)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_program_says_what_it_says_without_hpcstage(native_lab: Lab, tmp_path: Path, library: str) -> None:
    lab = native_lab
    make, code, word = LIBRARIES[library]
    make(lab.source / "file")
    assert (lab.source / "file").stat().st_size > 4 * MB

    def told(path: Path, actions: Sequence[Action]) -> str:
        lab.environment = lambda **more: {**environment, "PYTHONPATH": str(path), **more}  # type: ignore[method-assign]
        return str(stepped(lab, TOOLS + code + END, word, actions=actions))

    environment = lab.environment()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "_hpcstage_attach.py").touch()
    plain = told(tmp_path / "plain", [lambda: None] * 3)
    arriving = GrantedRows(lab)
    half, rest = range(0, arriving.stripes, 2), range(1, arriving.stripes, 2)
    actions = [lambda: arriving.arrive(*half), lambda: arriving.arrive(*rest), arriving.voided]
    assert told(lab.node / "shim", actions) == plain
    if library in READS:
        assert lab.counters()["arrived_read_bytes"] > MB
