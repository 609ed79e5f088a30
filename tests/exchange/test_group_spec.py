"""What an exchange is told."""

import os

from hpcstage.protocol.exchangespec import GroupSpec, Member


def test_it_comes_back_as_it_was_saved(tmp_path):
    strange = os.fsdecode(b"/tmp/caf\xe9")
    spec = GroupSpec(3, [Member("n1", "/l/x", "/l/x/sock"), Member("n2", strange, strange + "/sock")], goodbye_s=2.5)
    spec.save(tmp_path / "group.json")
    found = GroupSpec.load(tmp_path / "group.json")
    assert found == spec
    assert found.own(1).node_dir == strange
    assert (tmp_path / "group.json").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["group.json"]
