"""The process that uploads: it may be killed, and nothing is removed in DIR that nobody saw removed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import small_tmpfs, wait_for

from hpcstage.owner import OWNER, Owner, let_go, take
from hpcstage.upload.drain import NICE, NO_TIME, Drain, upload_late
from hpcstage.upload.ending import UNSEEN
from hpcstage.upload.facts import Place
from hpcstage.upload.freeing import free
from hpcstage.upload.manifest import UploadManifest
from hpcstage.upload.start import start
from hpcstage.upload.uploading import Uploader


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path / "local")
    start(made, os.fspath(tmp_path / "DIR"), "run").close()
    return made


def ended(drain: Drain, *, is_normal: bool = True) -> dict[str, Any]:
    """Ends the command, and returns what became of the files."""
    drain.end(is_normal=is_normal)

    def is_over() -> bool:
        drain.work(time.monotonic())
        return drain.is_over

    wait_for(is_over)
    result = drain.result()
    drain.close()
    assert result is not None
    return result


def write_and_wait(place: Place, target: Path, *names: str) -> None:
    for name in names:
        Path(place.tree, name).write_text(name)
    wait_for(lambda: all((target / name).exists() for name in names))


def test_a_link_to_what_lies_beside_it_leads_there_though_a_killed_runs_directory_was_moved(
    place: Place, tmp_path: Path
) -> None:
    Path(place.tree, "goal").write_text("goal")
    Path(place.tree, "link").symlink_to(f"{place.tree}/goal")
    upload_late(Place(place.base.rename(tmp_path / "moved")))
    assert os.readlink(tmp_path / "DIR/link") == "goal"


def test_half_a_line_of_a_full_disk_takes_no_other_with_it(place: Place) -> None:
    with open(place.manifest, "ab") as file:
        file.write(b'12345678 ["try","half')
    manifest = UploadManifest(place.manifest)
    manifest.trying(["whole"])
    manifest.close()
    manifest = UploadManifest(place.manifest)
    manifest.close()
    assert manifest.tried == {"whole"}


def test_what_the_command_removed_is_removed_at_the_end(place: Place, tmp_path: Path) -> None:
    drain = Drain(place)
    write_and_wait(place, tmp_path / "DIR", "stays", "goes")
    Path(place.tree, "goes").unlink()
    assert ended(drain)["undrained"] == []
    assert os.listdir(tmp_path / "DIR") == ["stays"]


def test_uploads_leave_the_processors_to_programs_while_these_run(place: Place, tmp_path: Path) -> None:
    drain = Drain(place)
    write_and_wait(place, tmp_path / "DIR", "file")
    (process,) = psutil.Process().children()
    nice = sorted(os.getpriority(os.PRIO_PROCESS, thread.id) - os.nice(0) for thread in process.threads())
    assert nice[1:] == [NICE] * len(nice[1:])
    assert len(nice) > 2
    assert nice[0] == 0, "the user waits for the end"
    ended(drain)


@pytest.mark.parametrize("how", ["killed", "failed", "cleaned"])
def test_what_nobody_saw_removed_stays(place: Place, tmp_path: Path, how: str) -> None:
    drain = Drain(place)
    write_and_wait(place, tmp_path / "DIR", "stays", "goes")
    if how == "killed":
        (process,) = psutil.Process().children()
        process.kill()
        process.wait()
    if how == "cleaned":
        os.unlink(place.marker)
    Path(place.tree, "goes").unlink()
    result = ended(drain, is_normal=how != "failed")
    assert list(result["findings"]["kept"]) == ["goes"]
    assert sorted(os.listdir(tmp_path / "DIR")) == ["goes", "stays"]


def test_files_are_counted_however_often_they_grow(place: Place, tmp_path: Path) -> None:
    drain = Drain(place)
    write_and_wait(place, tmp_path / "DIR", "log", "goes")
    for line in range(1, 4):
        with open(f"{place.tree}/log", "a") as log:
            log.write(f"line {line}\n")
        wait_for(lambda line=line: f"line {line}\n" in (tmp_path / "DIR" / "log").read_text())
    os.unlink(f"{place.tree}/goes")
    Path(place.tree, "empty").touch()
    assert ended(drain)["files"] == 2, "log and empty"


def test_a_file_that_is_one_piece_keeps_to_the_rate(place: Place) -> None:
    began_s, drain = time.monotonic(), Drain(place, rate=20_000.0)
    Path(place.tree, "file").write_bytes(bytes(20_000))
    assert ended(drain)["undrained"] == []
    assert time.monotonic() - began_s >= 1.0


def test_what_there_was_no_time_for_is_named_and_comes_later(place: Place, tmp_path: Path) -> None:
    drain = Drain(place, rate=1.0)
    Path(place.tree, "file").write_text("content")
    drain.end(is_normal=True)
    result = drain.result()
    drain.close()
    assert result is not None
    assert result["undrained"] == [{"name": "file", "why": NO_TIME}]
    assert upload_late(place)["undrained"] == []
    assert (tmp_path / "DIR" / "file").read_text() == "content"


def test_a_late_pass_removes_nothing(place: Place, tmp_path: Path) -> None:
    drain = Drain(place)
    write_and_wait(place, tmp_path / "DIR", "stays", "goes")
    drain.close()
    Path(place.tree, "goes").unlink()
    assert upload_late(place)["findings"]["kept"] == {"goes": UNSEEN}
    assert sorted(os.listdir(tmp_path / "DIR")) == ["goes", "stays"]


def test_a_stopped_process_does_not_hold_up_the_daemon(place: Place) -> None:
    drain = Drain(place)
    (process,) = psutil.Process().children()
    process.send_signal(signal.SIGSTOP)
    Path(place.tree, "file").write_text("content")
    drain.end(is_normal=True)
    assert drain.work(time.monotonic()) is None
    result = drain.result()
    drain.close()
    assert result is not None
    assert [one["name"] for one in result["undrained"]] == ["file"]


# ---- freeing


@pytest.fixture
def uploaded(place: Place) -> Uploader:
    made = Uploader(place, UploadManifest(place.manifest))
    Path(place.tree, "file").write_bytes(b"x" * 100_000)
    made.bring("file")
    made.settle()
    return made


def test_a_link_takes_the_place_of_a_file(place: Place, uploaded: Uploader, tmp_path: Path) -> None:
    manifest = UploadManifest(place.manifest)
    assert free(place, manifest, uploaded.target, "file") == 100_000
    assert os.readlink(f"{place.tree}/file") == os.fspath(tmp_path / "DIR" / "file")
    manifest.close()
    Path(place.tree, "file").rename(Path(place.tree, "other"))
    assert upload_late(place)["undrained"] == []
    assert (tmp_path / "DIR" / "other").read_bytes() == b"x" * 100_000, "a rename of the link is one of the file"


def test_a_file_that_is_open_stays(place: Place, uploaded: Uploader) -> None:
    manifest = UploadManifest(place.manifest)
    with Path(place.tree, "file").open("rb"):
        assert free(place, manifest, uploaded.target, "file") == 0
    assert not Path(place.tree, "file").is_symlink()
    Path(place.tree, "file").write_bytes(b"y" * 100_000)
    assert free(place, manifest, uploaded.target, "file") == 0
    manifest.close()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount an overlay")
def test_a_file_stays_where_leases_may_not_count_maps(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", "size=8m") as disk:
        for name in ("lower", "upper", "work", "merged"):
            (disk / name).mkdir()
        layers = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", disk / "merged"], check=True)
        try:
            place = Place(disk / "merged" / "local")
            manifest = start(place, os.fspath(tmp_path / "DIR"), "run")
            uploader = Uploader(place, manifest)
            Path(place.tree, "file").write_bytes(b"x" * 100_000)
            uploader.bring("file")
            uploader.settle()
            assert free(place, manifest, uploader.target, "file") == 0
            manifest.close()
        finally:
            subprocess.run(["umount", "-l", disk / "merged"], check=True)


# ---- two owners


def test_a_run_that_was_taken_for_dead_stops_and_its_files_come_later(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcstage.upload.target.OWNER_S", 0.0)  # it stands still for a moment only
    target = tmp_path / "DIR"
    fd = take(os.fspath(target), "run run on this node")
    drain = Drain(place)
    write_and_wait(place, target, "stays", "goes")
    (process,) = [one for one in psutil.Process().children() if one.pid == drain._pid]
    process.suspend()
    (target / OWNER).write_bytes(Owner("run 8 on another node", "another boot", "8").data())
    for name in ("late", "goes", "stays"):
        Path(place.tree, name).write_text("by the first")
    Path(place.tree, "goes").unlink()
    (target / "stays").write_text("by the other")
    process.resume()
    result = ended(drain)
    assert {one["name"]: one["why"] for one in result["undrained"]} == dict.fromkeys(
        ["late", "stays"], f"{target}: it is in use by run 8 on another node"
    )
    assert {path.name for path in target.iterdir()} == {OWNER, "stays", "goes"}
    (target / OWNER).unlink()
    let_go(fd)
    result = upload_late(place)
    assert result["undrained"] == []
    assert result["findings"]["beside"] == {"stays": "stays.run"}
    assert (target / "stays").read_text() == "by the other"
    assert (target / "late").read_text() == "by the first"
