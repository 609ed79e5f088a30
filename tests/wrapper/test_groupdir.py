"""Where the script lies that other nodes execute: only where nobody else can put another in its place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcstage.errors import NotStarted
from hpcstage.wrapper import grouping

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give directories to others")
OTHER = 61002


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody may enter, unlike tmp_path."""
    with tempfile.TemporaryDirectory(prefix="test-hpcstage-", dir="/dev/shm") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def made(place: Path, *modes: int, owner: int = 0, group: int = OTHER) -> Path:
    """A run directory below directories with these modes; the first belongs to `owner` and `group`."""
    path = place
    for mode in modes:
        path = path / "d"
        path.mkdir()
        path.chmod(mode)
    first = place / "d"
    os.chown(first, owner, group)
    first.chmod(modes[0])
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda place: made(place, 0o755, 0o755), None),
        (lambda place: made(place, 0o777, 0o755), "everybody may write to"),
        (lambda place: made(place, 0o775, 0o755), f"group {OTHER} may write to"),
        (lambda place: made(place, 0o2770, 0o755), f"group {OTHER} may write to"),
        (lambda place: made(place, 0o775, 0o755, group=0), None),
        (lambda place: made(place, 0o755, 0o777), "everybody may write to"),
        (lambda place: made(place, 0o1777, 0o755), None),
        (lambda place: made(place, 0o755, owner=OTHER), f"belongs to user {OTHER}"),
        (lambda place: made(place, 0o700, 0o777), None),
        (lambda place: made(place, 0o777, 0o700), "everybody may write to"),
    ],
)
def test_who_could_replace_the_script(place: Path, make: Callable[[Path], Path], said: str | None) -> None:
    why = grouping.exposed(make(place) / "group")
    assert (why is None) if said is None else (why is not None and said in why)


def test_the_state_directory_is_the_second_choice(place: Path) -> None:
    run_dir = made(place, 0o777, 0o755)
    state = place / "state"
    state.mkdir()
    env = {"XDG_STATE_HOME": os.fspath(state)}
    assert grouping.safe_directory(run_dir, "run", env) == state / "hpcstage" / "groups" / "run"
    state.chmod(0o777)
    with pytest.raises(NotStarted, match="would execute a script") as refused:
        grouping.safe_directory(run_dir, "run", env)
    assert "--run-dir" in refused.value.line()


def test_a_link_is_followed_to_where_it_leads(place: Path) -> None:
    run_dir = made(place, 0o755)
    link = made(place / "d", 0o755) / "link"
    link.symlink_to(run_dir)
    assert grouping.safe_directory(link, "run", {}) == run_dir / "group"
