"""What processes tell of their saves, as the daemon puts it into its part of the record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcstage.daemon.reporting import Standstills
from hpcstage.protocol import saves
from hpcstage.record.parts.checkpoints import StandstillPart
from hpcstage.record.parts.part import NodePart

PART = NodePart("here", "runtime", 0.0)


def test_the_process_counts_that_was_held_up_for_longest(tmp_path: Path) -> None:
    service = Standstills(tmp_path)
    assert service.record(PART).standstill is None, "no process saves"
    (tmp_path / saves.DIRECTORY).mkdir()
    for name, many, ns in (("1", 4, 500_000_000), ("2", 3, 750_000_000), ("3", 9, 0)):
        (tmp_path / saves.DIRECTORY / name).write_bytes(saves.SAVES.pack(many, ns))
    (tmp_path / saves.DIRECTORY / "4").write_bytes(b"")
    part = service.record(PART)
    assert part.standstill == StandstillPart(saves=3, seconds=0.75)
    assert NodePart.from_json(part.to_json()).standstill == part.standstill


def test_a_process_tells_its_own_time_and_a_forked_one_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs the extra `torch`")
    from hpcstage.torch.checkpoints.saving import Standstill

    monkeypatch.setenv("HPCSTAGE_NODE_DIR", str(tmp_path))
    told = Standstill()
    for _ in range(3):
        with told.measured():
            pass
    pid = os.fork()
    if pid == 0:
        with told.measured():
            pass
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(KeyError), told.measured():
        raise KeyError
    found = {path.name.partition("-")[0]: path.read_bytes() for path in (tmp_path / saves.DIRECTORY).iterdir()}
    assert {int(name): saves.SAVES.unpack(data)[0] for name, data in found.items()} == {os.getpid(): 4, pid: 1}
    monkeypatch.setenv("HPCSTAGE_NODE_DIR", str(tmp_path / "gone"))
    with told.measured():
        pass
