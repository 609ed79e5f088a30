"""A plain directory and one that is uploaded, in which programs do the same, and what must be equal in the end."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from killsteps import killed_before

from hpcstage.upload.ending import Ended, end
from hpcstage.upload.facts import Here, Place
from hpcstage.upload.manifest import UploadManifest
from hpcstage.upload.scan import scan
from hpcstage.upload.start import start
from hpcstage.upload.target import TEMPORARY
from hpcstage.upload.uploading import Uploader

NAMES = ["a", "b", "d/a", "d/b", "e/a", "e", "d"]
names = st.sampled_from(NAMES)
texts = st.sampled_from([b"", b"one", b"two", b"three, longer"])
operations = st.one_of(
    st.tuples(st.just("write"), names, texts),
    st.tuples(st.just("append"), names, texts),
    st.tuples(st.just("save"), names, texts),
    st.tuples(st.just("rename"), names, names),
    st.tuples(st.just("exchange"), names, names),
    st.tuples(st.just("remove"), names),
    st.tuples(st.just("clear"), names),
    st.tuples(st.just("mkdir"), names),
    st.tuples(st.just("chmod"), names, st.sampled_from([0o600, 0o640, 0o755])),
    st.tuples(st.just("link"), names, st.sampled_from(["a", "../b", "nowhere"])),
    st.tuples(st.just("upload"), names),
)
histories = st.lists(operations, max_size=14)
helds = st.dictionaries(st.sampled_from(["a", "b", "d/a", "e/a"]), texts, max_size=3)


def act(root: Path, kind: str, name: str, *more: object) -> None:
    """Does one operation of a program, or raises OSError as it would get it."""
    path = root / name
    if kind in {"write", "append"}:
        with path.open("wb" if kind == "write" else "ab") as file:
            file.write(more[0])  # type: ignore[arg-type]
    elif kind == "save":
        temporary = path.with_name("new")
        temporary.write_bytes(more[0])  # type: ignore[arg-type]
        try:
            temporary.rename(path)
        except OSError:
            temporary.unlink()
            raise
    elif kind == "rename":
        path.rename(root / str(more[0]))
    elif kind == "exchange":
        other, between = root / str(more[0]), root / "between"
        if (
            path == other
            or not os.path.lexists(path)
            or not os.path.lexists(other)
            or path in other.parents
            or other in path.parents
        ):
            raise FileNotFoundError
        path.rename(between)
        other.rename(path)
        between.rename(other)
    elif kind == "remove":
        path.unlink()
    elif kind == "clear":
        if path.is_symlink():
            raise NotADirectoryError
        shutil.rmtree(path)
    elif kind == "mkdir":
        path.mkdir()
    elif kind == "chmod":
        path.chmod(more[0])  # type: ignore[arg-type]
    elif kind == "link":
        path.symlink_to(str(more[0]))


@dataclass
class World:
    """A plain directory, and a local one that is uploaded to DIR."""

    base: Path
    held: dict[str, bytes]
    kills: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plain, self.target = self.base / "plain", self.base / "DIR"
        for root in (self.plain, self.target):
            for name, data in self.held.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(data)
            root.mkdir(exist_ok=True)
        self.place = Place(self.base / "local")
        self.manifest = start(self.place, os.fspath(self.target), "run")
        self.uploader = Uploader(self.place, self.manifest)
        self.was_killed = False

    def do(self, history: list[tuple[object, ...]]) -> None:
        """Lets a program do the same in both, and the uploader what it is told."""
        for kind, name, *more in history:
            if kind == "upload":
                self.step(lambda name=name: self.upload(str(name)))
                continue
            try:
                act(self.plain, str(kind), str(name), *more)
            except OSError:
                continue
            with suppress(OSError):  # a link to what DIR held is no file, where that makes a difference
                act(Path(self.place.tree), str(kind), str(name), *more)

    def upload(self, name: str) -> None:
        """Uploads one name as the living part does: a file that nobody writes to is due."""
        found = scan(self.place.tree, self.manifest)
        if name in found.changed:
            self.manifest.note(["due", name, *Here.of(os.lstat(f"{self.place.tree}/{name}"))])
            with suppress(BlockingIOError):  # it comes at the end
                self.uploader.bring(name)
            self.uploader.settle()

    def step(self, work: Callable[[], object]) -> None:
        """Lets the uploader work, or be killed and begun again."""
        if self.was_killed or not self.kills:
            work()
            return
        if killed_before(self.kills.pop(0), work):
            self.was_killed = True
            self.manifest = UploadManifest(self.place.manifest)
            self.uploader = Uploader(self.place, self.manifest)

    def end(self, *, is_normal: bool = True) -> Ended:
        """Ends the run; what was killed is gone on with by a late pass."""
        report: list[Ended] = []

        def work() -> None:
            report.append(end(self.place.tree, self.uploader, self.manifest, is_normal=is_normal, wait=lambda _: None))

        self.step(work)
        if not report:
            report.append(self.late())
        return report[0]

    def late(self) -> Ended:
        """Does what the next start does."""
        self.manifest = UploadManifest(self.place.manifest)
        uploader = Uploader(self.place, self.manifest, is_late=True)
        return end(self.place.tree, uploader, self.manifest, is_late=True, wait=lambda _: None)


@contextmanager
def world(held: dict[str, bytes], kills: list[int]) -> Iterator[World]:
    with tempfile.TemporaryDirectory() as base:
        made = World(Path(base), held, kills)
        yield made
        made.manifest.close()


def entries(root: Path) -> dict[str, object]:
    """Returns all that a directory holds."""
    found: dict[str, object] = {}
    for directory, below, files in os.walk(root):
        for name in (*below, *files):
            path = Path(directory) / name
            status, key = path.lstat(), os.fspath(path.relative_to(root))
            if stat.S_ISLNK(status.st_mode):
                found[key] = ("link", os.readlink(path))
            elif stat.S_ISDIR(status.st_mode):
                found[key] = "directory"
            else:
                found[key] = (stat.S_IMODE(status.st_mode), path.read_bytes())
    return found


def check(made: World, report: Ended, *, is_late: bool, is_swept: bool = True) -> None:
    """DIR is the plain directory, or each difference is named. `is_swept`: no temporary file is left."""
    plain, there = entries(made.plain), entries(made.target)
    if not is_swept:
        there = {name: entry for name, entry in there.items() if TEMPORARY not in name}
    left = {one.name for one in report.left}
    for name, entry in plain.items():
        place = report.beside.get(name, name)
        assert there.get(place) == entry or name in left, (name, place, entry, there, report)
    more = {name for name in there if name not in plain} - set(report.beside.values())
    more_files = {name for name in more if there[name] != "directory"}
    assert more_files <= {*report.kept, *made.held}, (more_files, plain, there, report)
    if not is_late:
        kept = {*report.kept, *(os.path.dirname(name) for name in report.kept)}
        kept |= set(made.held) if report.left else set()  # what could not be renamed has its name still
        assert more <= kept, (more, plain, there, report)
    assert not any(TEMPORARY in name for name in there), (there, report)


SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
