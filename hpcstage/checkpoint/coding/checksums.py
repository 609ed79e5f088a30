"""Checksums of blocks: xxh3-128, faster than memory is read, and long enough that no two blocks ever meet by chance."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from hpcstage.checkpoint.coding.blocks import Block, seen

CHECKSUM_BYTES = 16


def checksum(block: Block) -> bytes:
    """Returns a block's checksum."""
    return xxhash.xxh3_128_digest(seen(block).data)


def damaged(blocks: Mapping[int, Block], checksums: Mapping[int, bytes]) -> frozenset[int]:
    """Returns the numbers of the blocks that are not those whose checksums were kept.

    A block that was kept without a checksum counts as damaged, and so does one that was cut short.
    """
    return frozenset(number for number, block in blocks.items() if checksum(block) != checksums.get(number))
