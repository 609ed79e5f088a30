"""What loaders announce, told to a real daemon: followed, judged by what is opened, and kept for the next run."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import os
import random
import struct
import time
from array import array
from pathlib import Path

from daemon_process import DaemonProcess, SourceOpens, start_daemon, wait_until  # noqa: F401
from ringwriter import RingWriter

from hpcstage.plan.order import trace
from hpcstage.protocol import shim
from hpcstage.protocol.shim import Answer, Kind

SLOW = {"max_rate_bytes_per_s": 500_000.0, "transfers": 1}


def files_of(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


def place(daemon: DaemonProcess, name: str, data: bytes) -> None:
    temporary = daemon.node_dir / "orders" / f".{name}"
    temporary.write_bytes(data)
    temporary.rename(temporary.with_name(name))


class Program:
    """A process with loaders, as the daemon sees it: its requests, its slot and its ring."""

    def __init__(self, daemon: DaemonProcess, slot: int = 1) -> None:
        self.daemon = daemon
        self.epochs = 0
        opens = daemon.node_dir / "opens"
        opens.mkdir(exist_ok=True)
        self.ring = RingWriter(os.fsencode(opens / f"{slot}.ring"))
        with (daemon.node_dir / "page").open("r+b") as page:
            page.seek(shim.NEXT_NATIVE_OFFSET)
            page.write(struct.pack("<I", slot + 1))
            page.seek(shim.PAGE_HEADER_BYTES + slot * shim.SLOT_BYTES)
            page.write(shim.SLOT_HEAD.pack(os.getpid(), shim.Layer.NATIVE, 0, 0, 1))

    def announce(self, indices, table=(), *, columns=1, stream=1):
        name = f"epoch-{stream}-{self.epochs}"
        place(self.daemon, name, array("I", indices).tobytes())
        table_name = ""
        if table:
            table_name = f"table-{len(table) // columns}-{columns}-{hash(tuple(table)) & 0xFFFF:08x}"
            place(self.daemon, table_name, b"\0".join(os.fsencode(p) for p in table))
        head = shim.EPOCH.pack(stream, columns if table else 0, 0)
        self.epochs += 1
        names = f"{name}\0{table_name}".encode()
        assert self.daemon.ask(Kind.EPOCH, head + names)[0] is Answer.DONE

    def ended(self, stream=1):
        head = shim.EPOCH.pack(stream, 0, shim.EPOCH_ENDED)
        assert self.daemon.ask(Kind.EPOCH, head + b"\0")[0] is Answer.DONE

    def open(self, path: Path) -> None:
        below = os.fsencode(self.daemon.store(path).relative_to(self.daemon.node_dir / "store"))
        self.ring.put(time.monotonic_ns(), below)

    def read(self, indices, table) -> None:
        for index in indices:
            self.open(table[index])


def logging(daemon: DaemonProcess) -> int:
    with (daemon.node_dir / "page").open("rb") as page:
        page.seek(shim.LOGGING_OFFSET)
        return struct.unpack("<I", page.read(4))[0]


def begun(ids: list[int]) -> int:
    """So many were copied by path, before anything was announced."""
    return next((place for place, id_ in enumerate(ids) if place != id_), len(ids))


def shuffled(count: int, seed: int = 0) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def shuffling(start_daemon, make_tree) -> tuple[Program, list[Path], list[int], SourceOpens]:
    """A program that has yet to announce, its files, the order in which it will read them, and the copiers' opens."""
    root = make_tree(files=60, size_bytes=20_000)
    opens = SourceOpens(root)
    daemon = start_daemon(root, order="auto", **SLOW).attach()
    daemon.wait_for_scan()
    return Program(daemon), files_of(root), shuffled(60), opens


def test_a_samplers_order_is_followed(start_daemon, make_tree):
    program, files, order, opens = shuffling(start_daemon, make_tree)
    daemon = program.daemon
    program.announce(order, files)
    program.read(order, files)
    daemon.staged()
    part = daemon.end()
    ids = opens.ids()
    assert begun(ids) < 30
    assert ids[begun(ids) :] == [id_ for id_ in order if id_ not in ids[: begun(ids)]]
    found = part.order
    assert found.provenance == "sampler"
    assert found.announcements == 1


def test_a_long_epoch_with_repetitions(start_daemon, make_tree):
    """Mapped in a helper, while others that come meanwhile wait for it."""
    root = make_tree(files=60, size_bytes=20_000)
    files = files_of(root)
    opens = SourceOpens(root)
    daemon = start_daemon(root, order="auto", **SLOW).attach()
    daemon.wait_for_scan()
    program = Program(daemon)
    draws = random.Random(5).choices(range(40), k=20_000)
    program.announce(draws, files)
    program.announce(range(40, 60), stream=2)
    program.read(draws[:500], files)
    daemon.staged()
    part = daemon.end()
    order = list(dict.fromkeys(draws))
    ids = opens.ids()
    assert part.order.provenance == "sampler"
    assert part.order.announcements == 2
    assert [i for i in ids[begun(ids) :] if i < 40] == [i for i in order if i not in ids[: begun(ids)]]


def test_what_the_program_gives_is_followed_in_any_case(start_daemon, make_tree):
    root = make_tree(files=40, size_bytes=20_000)
    opens = SourceOpens(root)
    daemon = start_daemon(root, order="manifest", **SLOW).attach()
    daemon.wait_for_scan()
    place(daemon, "given-1", b"\0".join(os.fsencode(p) for p in reversed(files_of(root))))
    daemon.ask(Kind.ORDER, b"given-1")
    daemon.staged()
    part = daemon.end()
    ids = opens.ids()
    assert ids[begun(ids) :] == [id_ for id_ in range(39, -1, -1) if id_ not in ids[: begun(ids)]]
    assert part.order.provenance == "given"


def test_an_announcement_before_the_scan_is_done(start_daemon, make_tree):
    root = make_tree(files=30, size_bytes=20_000)
    daemon = start_daemon(root, order="auto", **SLOW)
    program = Program(daemon)
    daemon.connect().close()
    program.announce(shuffled(30), files_of(root))
    program.read(shuffled(30), files_of(root))
    daemon.attach().staged()
    part = daemon.end()
    assert part.order.provenance == "sampler"


def test_without_a_table_nothing_is_known(start_daemon, make_tree):
    root = make_tree(files=20)
    daemon = start_daemon(root, order="auto").attach()
    daemon.wait_for_scan()
    program = Program(daemon)
    program.announce(shuffled(20))
    program.read(range(20), files_of(root))
    daemon.staged()
    part = daemon.end()
    assert part.order.provenance == "manifest"


def test_a_wrong_table_is_dropped(start_daemon, make_tree):
    root = make_tree(files=60, size_bytes=20_000)
    files, order = files_of(root), shuffled(60)
    daemon = start_daemon(root, order="auto", max_rate_bytes_per_s=300_000.0, transfers=1).attach()
    daemon.wait_for_scan()
    program = Program(daemon)
    program.announce(order, files)
    program.read(order, [*files[30:], *files[:30]])
    daemon.staged()
    program.announce(order, files)
    part = daemon.end()
    assert part.order.provenance == "manifest"


def test_logging_ends_when_all_is_known(start_daemon, make_tree):
    root = make_tree(files=40)
    files = files_of(root)
    daemon = start_daemon(root, order="auto").attach()
    daemon.wait_for_scan()
    assert logging(daemon) == 1
    program = Program(daemon)
    program.read(range(39), files)
    daemon.staged()
    assert logging(daemon) == 1
    program.open(files[39])
    wait_until(lambda: logging(daemon) == 0)
    wait_until(lambda: not list((daemon.node_dir / "opens").iterdir()))
    daemon.end()


def test_nothing_is_logged_where_nothing_is_staged(start_daemon, make_tree):
    daemon = start_daemon(make_tree(), "direct", order="auto").attach()
    assert logging(daemon) == 0
    program = Program(daemon)
    program.announce(range(3))
    program.ended()
    assert daemon.end().order.announcements == 0


def test_ranks_of_one_node(start_daemon, make_tree):
    """Two ranks of four: what they read comes first, then the rest by path."""
    root = make_tree(files=80, size_bytes=20_000)
    files = files_of(root)
    opens = SourceOpens(root)
    daemon = start_daemon(root, order="auto", **SLOW).attach()
    daemon.wait_for_scan()
    program = Program(daemon)
    order = shuffled(80)
    for stream in (1, 2):
        program.announce(order[stream - 1 :: 4], files, stream=stream)
    daemon.staged()
    part = daemon.end()
    ids = opens.ids()
    early, later = ids[: begun(ids)], ids[begun(ids) :]
    read = {*order[::4], *order[1::4]}.difference(early)
    assert begun(ids) < 30
    assert set(later[: len(read)]) == read
    assert later[len(read) :] == sorted(later[len(read) :])
    assert part.order.announcements == 2


def test_strange_announcements(start_daemon, make_tree):
    daemon = start_daemon(make_tree(), order="auto").attach()
    daemon.wait_for_scan()
    head = shim.EPOCH.pack(1, 1, 0)
    strange = [
        b"",
        head,
        head + b"a\0b\0",
        head + b"../x\0",
        head + b"a\0../../etc/passwd",
        head + b"missing\0missing",
    ]
    place(daemon, "odd", b"abc")
    place(daemon, "large", array("I", [0xFFFFFFFF, 5]).tobytes())
    place(daemon, "bad", b"\xff\0\0not a path")
    strange += [head + b"missing\0missing", head + b"odd\0", head + b"large\0bad"]
    for payload in strange:
        assert daemon.ask(Kind.EPOCH, payload)[0] is Answer.DONE
    daemon.staged()
    part = daemon.end()
    assert part.complete
    assert part.order.provenance == "manifest"
    assert "Traceback" not in daemon.log_text()


# ---- the trace


def run_once(start_daemon, root, state, order, opened, **options):
    opens = SourceOpens(root)
    daemon = start_daemon(root, order=order, command=["train"], state_dir=os.fspath(state), **options).attach()
    daemon.wait_for_scan()
    program = Program(daemon)
    opened(program)
    daemon.staged()
    return daemon.end(), opens.ids()


def test_the_next_run_begins_with_the_trace(start_daemon, make_tree, tmp_path):
    root = make_tree(files=40)
    files, order = files_of(root), shuffled(40)
    state = tmp_path / "state"

    def in_order(program):
        program.announce(order)
        program.read(order, files)

    run_once(start_daemon, root, state, "auto", in_order)
    _, ids = run_once(start_daemon, root, state, "auto", in_order, transfers=1)
    assert ids == order
    part, ids = run_once(start_daemon, root, state, "auto", lambda _: None, transfers=1)
    assert (part.order.provenance, ids) == ("trace", order)
    left = trace.load(next((state / trace.DIRECTORY).iterdir()))
    assert list(left.order) == order


def test_a_run_that_was_broken_off_leaves_the_fuller_trace(start_daemon, make_tree, tmp_path):
    root = make_tree(files=40)
    files = files_of(root)
    state = tmp_path / "state"
    run_once(start_daemon, root, state, "auto", lambda program: program.read(range(40), files))
    run_once(start_daemon, root, state, "auto", lambda program: program.read(range(5), files))
    left = trace.load(next((state / trace.DIRECTORY).iterdir()))
    assert len(left.order) == 40


def test_a_trace_is_not_read_for_another_order(start_daemon, make_tree, tmp_path):
    root = make_tree(files=40)
    files = files_of(root)
    state = tmp_path / "state"
    run_once(start_daemon, root, state, "auto", lambda program: program.read(range(39, -1, -1), files))
    part, ids = run_once(start_daemon, root, state, "manifest", lambda _: None, transfers=1)
    assert part.order.provenance == "manifest"
    assert ids == list(range(40))


def test_a_state_directory_that_cannot_be_written(start_daemon, make_tree, tmp_path):
    root = make_tree(files=10)
    state = tmp_path / "state"
    state.write_text("a file")
    part, _ = run_once(start_daemon, root, state, "auto", lambda program: program.open(files_of(root)[0]))
    assert part.complete
