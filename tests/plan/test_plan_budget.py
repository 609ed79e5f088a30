"""What fits: whole blocks, inodes of files and directories, in the order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcstage.plan.blocks import BLOCK_BYTES, blocks, blocks_bytes, blocks_of
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.placement.fitting import fit
from hpcstage.plan.types import Budget, Dataset, DatasetKind, ManifestEntry

DATASETS = [Dataset(f"{i}-d", DatasetKind.DIRECTORY, b"/d%d" % i, (), ()) for i in range(2)]


def manifest_of(*files: tuple[int, bytes, int]) -> Manifest:
    return Manifest.build(DATASETS, [ManifestEntry(d, n, s, 0, 0o100644, 1, 1, False) for d, n, s in files])


def test_blocks():
    sizes = (0, 1, 4096, 4097)
    assert [blocks_bytes(s) for s in sizes] == [0, 4096, 4096, 8192]
    assert [blocks(s) for s in sizes] == list(blocks_of(sizes)) == [0, 1, 1, 2]


def test_needs_count_directories_once_per_dataset():
    manifest = manifest_of((0, b"a/b/1", 1), (0, b"a/b/2", 0), (1, b"a/3", 5000))
    found = fit(manifest, range(3), Budget(10**9, 10**9))
    assert found.fits
    assert (found.files, found.share) == (3, 1.0)
    # Three files; of the first dataset its own directory, a and a/b; of the second its own and a.
    assert found.needed_inodes == found.inodes == 3 + 3 + 2
    assert found.needed_bytes == found.size_bytes == (1 + 0 + 2 + 5) * BLOCK_BYTES


def test_order_decides_what_is_left_out():
    manifest = manifest_of((0, b"1", 4096), (0, b"2", 4096), (0, b"3", 8192))
    room = Budget(3 * BLOCK_BYTES, 100)
    assert fit(manifest, [0, 1, 2], room).files == 2
    found = fit(manifest, [2, 0, 1], room)
    assert (found.files, found.share, found.fits) == (1, 0.5, False)
    assert found.size_bytes == 3 * BLOCK_BYTES
    assert found.needed_bytes == 5 * BLOCK_BYTES


def test_inodes_run_out_first():
    manifest = manifest_of(*((0, b"%d" % i, 0) for i in range(10)))
    found = fit(manifest, range(10), Budget(10**9, 5))
    assert (found.files, found.inodes, found.share) == (4, 5, 0.4)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([b"", b"a/", b"a/b/", b"c/"]), st.integers(0, 20_000))),
    st.integers(0, 200_000),
    st.integers(0, 30),
)
def test_never_over_budget_and_monotonous(files: list[tuple[int, bytes, int]], size: int, inodes: int):
    manifest = manifest_of(*((d, p + b"%d" % i, s) for i, (d, p, s) in enumerate(files)))
    found = fit(manifest, range(len(manifest)), Budget(size, inodes))
    assert found.fits == (found.needed_bytes <= size and found.needed_inodes <= inodes) or not files
    if not found.fits:
        assert found.size_bytes <= size
        assert found.inodes <= inodes
        assert not fit(manifest, range(found.files + 1), Budget(size, inodes)).fits, "one more is too much"
    more = fit(manifest, range(len(manifest)), Budget(size + 50_000, inodes + 10))
    assert more.files >= found.files
