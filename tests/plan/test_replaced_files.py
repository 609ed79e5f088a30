"""Files that are replaced in one step, whoever else writes them."""

from __future__ import annotations

import os
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcstage.plan.order import orders
from hpcstage.plan.types import Order
from hpcstage.writing import replace_text, replacing

WRITES = 200


def test_writers_with_one_pid(tmp_path: Path) -> None:
    """Threads here; processes on two nodes, or in two containers, may have one pid as well."""
    path = tmp_path / "order"

    def write(first: int) -> None:
        for _ in range(WRITES):
            orders.save(Order(orders.GIVEN, array("I", range(first, first + 500))), path)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write, first) for first in range(4)]:
            done.result()
    assert orders.load(path).ids[0] in range(4)
    assert [found.name for found in tmp_path.iterdir()] == ["order"]


def test_an_error_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_text(path, os.fsdecode(b"old \xff"), 0o600)
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half", None])
    assert path.read_bytes() == b"old \xff"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
