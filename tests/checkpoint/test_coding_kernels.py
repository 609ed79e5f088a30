"""ISA-L gives the bytes of the field's definition, for any size, address and kind of buffer."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.checkpoint.coding import kernels as coding_kernels
from hpcstage.checkpoint.coding.erasurecode import ErasureCode, Rows, multiply
from hpcstage.checkpoint.coding.kernels import Kernel, NoKernel, best_kernel, kernels, operands

KERNELS = list(kernels())
PRODUCTS = np.array([[multiply(a, b) for b in range(256)] for a in range(256)], np.uint8)
SIZES = [0, 1, 2, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 1000, 4095, 65536, 65537, 200_001]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.name for kernel in KERNELS])


def expected(rows: Rows, sources: list[np.ndarray]) -> list[bytes]:
    made = []
    for row in rows:
        total = np.zeros_like(sources[0])
        for c, source in zip(row, sources, strict=True):
            total ^= PRODUCTS[c][source]
        made.append(total.tobytes())
    return made


def at(offset: int, size: int, seed: int = 0) -> np.ndarray:
    """Random bytes at an address that is `offset` beyond a multiple of 64, between bytes that must stay as they are."""
    whole = np.full(size + 256, 0xA5, np.uint8)
    start = -whole.ctypes.data % 64 + offset
    block = whole[start : start + size]
    block[:] = np.frombuffer(random.Random(seed).randbytes(size), np.uint8)
    return block


def untouched_around(block: np.ndarray) -> bool:
    whole = block.base
    start = block.ctypes.data - whole.ctypes.data
    return bool((whole[:start] == 0xA5).all() and (whole[start + len(block) :] == 0xA5).all())


def test_the_best_kernel_is_the_first() -> None:
    assert best_kernel().name == KERNELS[0].name


@pytest.mark.skipif(importlib.util.find_spec("pyeclib") is None, reason="needs pyeclib")
def test_the_library_in_the_wheel_is_found_without_an_import() -> None:
    assert any("libisal-pyeclib" in kernel.name for kernel in KERNELS)
    assert "pyeclib" not in sys.modules


def test_the_systems_library_comes_first() -> None:
    try:
        ctypes.CDLL(coding_kernels.SYSTEM)
    except OSError:
        pytest.skip("needs ISA-L (package libisal2)")
    assert KERNELS[0].name == "ISA-L (libisal.so.2)"


@each_kernel
@pytest.mark.parametrize("size", SIZES)
def test_products_and_additions(kernel: Kernel, size: int) -> None:
    rows = ((1, 1, 1), (1, 2, 255), (0, 0x8E, 29), (0, 0, 0))
    sources = [at(offset, size, offset) for offset in (0, 1, 13)]
    targets = [at(offset, size) for offset in (0, 3, 7, 31)]
    kernel.product(rows, sources, targets)
    assert [target.tobytes() for target in targets] == expected(rows, sources)
    before = [target.copy() for target in targets]
    column = (1, 2, 200, 0)
    kernel.addition(column, sources[2], targets)
    added = [old ^ PRODUCTS[c][sources[2]] for c, old in zip(column, before, strict=True)]
    assert [target.tobytes() for target in targets] == [block.tobytes() for block in added]
    kernel.addition(column, sources[2], targets)
    assert [target.tobytes() for target in targets] == [block.tobytes() for block in before], "twice is never"
    assert all(map(untouched_around, [*sources, *targets]))


@given(st.data())
def test_kernels_agree(data: st.DataObject) -> None:
    k, m = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    size = data.draw(st.integers(0, 3000))
    rows = tuple(tuple(data.draw(st.integers(0, 255)) for _ in range(k)) for _ in range(m))
    sources = [at(data.draw(st.integers(0, 63)), size, seed) for seed in range(k)]
    offset = data.draw(st.integers(0, 63))
    for kernel in KERNELS:
        targets = [at(offset, size) for _ in range(m)]
        kernel.product(rows, sources, targets)
        assert [target.tobytes() for target in targets] == expected(rows, sources), kernel.name


@each_kernel
def test_every_pair_of_numbers(kernel: Kernel) -> None:
    source = bytes(range(256))
    for start in range(0, 256, 64):
        column = tuple(range(start, start + 64))
        targets = [bytearray(256) for _ in column]
        kernel.product(tuple((c,) for c in column), (source,), targets)
        assert [bytes(target) for target in targets] == [PRODUCTS[c].tobytes() for c in column]
        kernel.addition(column, source, targets)
        assert not any(map(any, targets))


@each_kernel
def test_many_blocks(kernel: Kernel) -> None:
    rows = ErasureCode.cauchy(224, 32).rows
    sources = [at(1, 300, seed) for seed in range(224)]
    targets = [at(0, 300) for _ in range(32)]
    kernel.product(rows, sources, targets)
    assert [target.tobytes() for target in targets] == expected(rows, sources)


@each_kernel
def test_any_buffer_without_a_copy(kernel: Kernel, tmp_path: Path) -> None:
    content = random.Random(1).randbytes(3 * 4096)
    (tmp_path / "blocks").write_bytes(content)
    with (
        open(tmp_path / "blocks", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        sources = [view[1:4001], content[5000:9000], bytearray(content[:4000])]
        targets = [bytearray(4000), np.zeros(2000, np.uint16)]
        kernel.product(((1, 2, 3), (4, 5, 6)), sources, targets)
        arrays = [np.frombuffer(bytes(source), np.uint8) for source in sources]
        assert [bytes(targets[0]), targets[1].tobytes()] == expected(((1, 2, 3), (4, 5, 6)), arrays)
        sources[0].release()


@each_kernel
def test_blocks_that_do_not_fit_are_refused(kernel: Kernel) -> None:
    with pytest.raises(ValueError, match=r"one size of at most .*, not \[3, 4\]"):
        kernel.product(((1,),), (bytes(3),), (bytearray(4),))
    with pytest.raises(ValueError, match="is no target"):
        kernel.product(((1,),), (bytes(3),), (bytes(3),))
    with pytest.raises(ValueError, match="is no target"):
        kernel.addition((1,), bytes(3), (bytes(3),))
    for rows in (((1, 2),), ((1,), (2,)), ((),), ()):
        with pytest.raises(ValueError, match="coefficients"):
            kernel.product(rows, (bytes(3),), (bytearray(3),))
    with pytest.raises(ValueError, match="coefficients"):
        kernel.addition((1, 2), bytes(3), (bytearray(3),))
    with pytest.raises(ValueError, match="coefficients"):
        kernel.product(((),), (), (bytearray(3),))
    with pytest.raises(ValueError, match="contiguous"):
        kernel.addition((1,), np.zeros(8, np.uint8)[::2], (bytearray(4),))


def test_a_block_beyond_an_int_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcstage.checkpoint.coding.kernels.MOST_BYTES", 10)
    with pytest.raises(ValueError, match="at most 10 bytes"):
        operands(((1,),), (bytes(11),), (bytearray(11),))


@each_kernel
def test_other_threads_run_meanwhile(kernel: Kernel) -> None:
    """Python takes its lock from nobody in this test: the other thread counts only while an operation has let it go."""
    source, target = np.ones(4 << 20, np.uint8), np.zeros(4 << 20, np.uint8)
    counted, stop, interval_s = [0], threading.Event(), sys.getswitchinterval()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            os.sched_yield()

    def counted_meanwhile() -> bool:
        before = counted[0]
        kernel.addition((2,), source, [target])
        return counted[0] > before

    thread = threading.Thread(target=count)
    sys.setswitchinterval(100)
    try:
        thread.start()
        assert any(counted_meanwhile() for _ in range(300))
    finally:
        sys.setswitchinterval(interval_s)
        stop.set()
        thread.join()


def library(tmp_path: Path, source: str) -> str:
    (tmp_path / "lib.c").write_text(source)
    made = tmp_path / "lib.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, tmp_path / "lib.c"], check=True, timeout=300)
    return str(made)


@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_library_that_computes_wrongly_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ec_init_tables", "ec_encode_data", "ec_encode_data_update")
    wrong = library(tmp_path, "".join(f"void {name}(void) {{}}\n" for name in names))
    with pytest.raises(ValueError, match="computes wrongly"):
        Kernel(wrong)
    monkeypatch.setattr(coding_kernels, "SYSTEM", wrong)
    monkeypatch.setattr(coding_kernels, "IN_WHEEL", "nothing")
    assert not list(kernels())
    best_kernel.cache_clear()
    with pytest.raises(NoKernel):
        best_kernel()


MULTIPLYING = """
static unsigned char times(unsigned char a, unsigned char b) {
    unsigned char sum = 0;
    for (; b; b >>= 1, a = a << 1 ^ (a & 128 ? 0x1d : 0)) if (b & 1) sum ^= a;
    return sum;
}
void ec_init_tables(int k, int rows, unsigned char *from, unsigned char *to) {
    for (int i = 0; i < k * rows; i++) to[i] = from[i];
}
void ec_encode_data(int size, int k, int rows, unsigned char *c, unsigned char **in, unsigned char **out) {
    for (int i = 0; i < rows; i++) for (int at = 0; at < size; at++) {
        out[i][at] = 0;
        for (int j = 0; j < MOST(k); j++) out[i][at] ^= times(c[i * k + j], in[j][at]);
    }
}
void ec_encode_data_update(int size, int k, int rows, int j, unsigned char *c, unsigned char *in, unsigned char **out) {
    for (int i = 0; i < rows; i++) for (int at = 0; at < SIZE(size); at++) out[i][at] ^= times(c[i * k + j], in[at]);
}
"""


@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("most", "size", "is_right"),
    [("k", "size", True), ("(k < 3 ? k : 2)", "size", False), ("k", "(size & ~15)", False), ("k", "size & ~31", False)],
)
def test_a_library_is_tried_with_three_sources_and_odd_sizes(
    tmp_path: Path, most: str, size: str, is_right: bool
) -> None:
    path = library(tmp_path, f"#define MOST(k) {most}\n#define SIZE(size) ({size})\n{MULTIPLYING}")
    if is_right:
        assert Kernel(path).name == "ISA-L (lib.so)"
        return
    with pytest.raises(ValueError, match="computes wrongly"):
        Kernel(path)


def test_other_files_of_that_name_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libisal.so.2").write_bytes(b"no library")
    for path in (tmp_path / "libisal.so.2", tmp_path / "missing.so", Path("libc.so.6")):
        monkeypatch.setattr(coding_kernels, "SYSTEM", str(path))
        assert all(path.name not in kernel.name for kernel in kernels())
        assert best_kernel().name
