"""Names that lead below a dataset through symbolic links, for both layers: served, written, and never stale."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shimlab import Lab, Responder, each, ready, wait_until

from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)

LINKS = {
    "directory": "link -> {source}",
    "inner directory": "link/d -> {source}/d",
    "relative": "link -> ../the source",
    "relative above": "up -> ..; link -> up/the source",
    "chain": "one -> {source}; two -> one; link -> {here}/two",
    "in the middle": "mid -> real; real/link -> {source}; link -> mid/link",
    "up again": "link -> {source}/d/..",
    "slashes": "link -> {source}//./",
    "parent is a link": "outer -> inner; inner/x -> {source}; link -> {here}/outer/x/../the source",
    "file": "link/d/file -> {source}/d/file",
    "relative file": "link/d/file -> ../../../the source/d/file",
    "file by a directory": "by -> {source}/d; link/d/file -> {here}/by/file",
}
"""What makes `link/d/file` in a directory of its own another name of the dataset's `d/file`."""


def make_links(here: Path, links: str, source: Path) -> None:
    """Makes symbolic links, relative to a directory."""
    for one in links.format(source=source, here=here).split("; "):
        name, _, target = one.partition(" -> ")
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).symlink_to(target)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory beside the dataset."""
    path = tmp_path / "here"
    path.mkdir()
    return path


def test_a_name_through_links_is_served(lab: Lab, tmp_path: Path) -> None:
    lab.put("d/file", b"source", b"copy..")
    for way, links in LINKS.items():
        (tmp_path / way).mkdir()
        make_links(tmp_path / way, links, lab.source)
        assert (tmp_path / way / "link/d/file").read_bytes() == b"source"
    lab.install()
    code = """
os.chdir(os.path.join(sys.argv[3], way))
name = os.path.abspath("link/d/file")
out = [open(name).read(), open("link/d/file").read(), open("./link//d/file").read(), os.stat(name).st_size]
say(out + [open(name).name == name])
"""
    said = each(lab, dict.fromkeys(LINKS, code), tmp_path, apart=False)
    assert said == {key: ["copy..", "copy..", "copy..", 6, True] for key in LINKS}
    assert lab.counters()["hit_opens"] == 4 * len(LINKS)
    assert lab.counters().get("source_opens", 0) == 0


WAYS = {
    "pathlib": "__import__('pathlib').Path(name).read_bytes()",
    "bytes": "open(os.fsencode(name), 'rb').read()",
    "os": "os.read(os.open(name, os.O_RDONLY), 99)",
    "scandir": "[open(e.path, 'rb').read() for e in os.scandir(os.path.dirname(name))][0]",
    "walk": "[open(os.path.join(p, f), 'rb').read() for p, _, fs in os.walk(os.path.dirname(name)) for f in fs][0]",
    "relative": "[os.chdir(os.path.dirname(name)), open('file', 'rb').read()][1]",
    "relative up": "[os.chdir(os.path.dirname(name)), open('../d/file', 'rb').read()][1]",
    "dir_fd": "os.read(os.open('file', os.O_RDONLY, dir_fd=os.open(os.path.dirname(name), os.O_RDONLY)), 99)",
    "dir_fd above": "os.read(os.open('link/d/file', os.O_RDONLY, dir_fd=os.open(HERE, os.O_RDONLY)), 99)",
    "inner up": "open(HERE + '/link/d/../d/file', 'rb').read()",
    "up behind": "open(HERE + '/../here/link/d/file', 'rb').read()",
}


def test_each_way_to_open(lab: Lab, here: Path) -> None:
    lab.put("d/file", b"source", b"copy..")
    (here / "link").symlink_to(lab.source)
    lab.install()
    ways = {
        way: f"HERE = sys.argv[3]; name = HERE + '/link/d/file'; say(({code}).decode())" for way, code in WAYS.items()
    }
    assert each(lab, ways, here, apart=False) == dict.fromkeys(WAYS, "copy..")
    assert lab.counters()["hit_opens"] == len(WAYS)


def test_the_daemon_is_asked_by_the_names_it_knows(lab: Lab, here: Path) -> None:
    lab.put("d/file", b"source")
    (here / "link").symlink_to(lab.source)
    lab.install()
    with Responder(lab.sock, ready) as daemon:
        lab.run("open(sys.argv[2]).read(); open(sys.argv[2], 'a').close()", here / "link/d/file")
        canonical = os.fsencode(lab.source / "d/file")
        assert set(daemon.paths(shim.Kind.REQUEST)) == {canonical}
        assert set(daemon.paths(shim.Kind.WROTE)) == {canonical}


CHANGES = {
    "w": "open(name, 'w').write('new')",
    "r+": "open(name, 'r+').write('new')",
    "O_RDWR": "os.write(os.open(name, os.O_RDWR), b'new')",
    "relative": "[os.chdir(os.path.dirname(name)), open('file', 'r+').write('new')]",
    "truncate": "os.truncate(name, 2)",
    "unlink": "os.unlink(name)",
    "rename": "os.rename(name, os.path.join(os.path.dirname(name), 'moved'))",
    "replace": "[open('new', 'w').close(), os.replace('new', name)]",
    "chmod": "os.chmod(name, 0o600)",
    "utime": "os.utime(name, (1, 1))",
    "rename dir": "os.rename(os.path.dirname(name), os.path.dirname(name) + '2')",
}


FILE_CHANGES = {name: CHANGES[name] for name in ("w", "r+", "O_RDWR", "truncate", "chmod", "utime")}


@pytest.mark.parametrize(
    ("name", "known"),
    [("link/d/file", True), ("link/d/file", False), ("file", False)],
    ids=["known", "unknown", "file"],
)
def test_a_change_through_a_link_drops_the_copy(lab: Lab, tmp_path: Path, name: str, known: bool) -> None:
    changes = FILE_CHANGES if name == "file" else CHANGES
    for way in changes:
        lab.put(f"{way}/d/file", b"source", b"copy..")
        (tmp_path / way).mkdir()
        (tmp_path / way / "link").symlink_to(lab.source / way)
        (tmp_path / way / "file").symlink_to(lab.source / way / "d/file")
    lab.install()
    first = f"os.chdir(os.path.join(sys.argv[3], way)); name = os.path.abspath({name!r}); {known} and open(name).read()"
    with Responder(lab.sock, ready) as daemon:
        assert each(lab, {way: f"{first}; {code}" for way, code in changes.items()}, tmp_path) == {}

        def is_told(way: str) -> bool:
            file = os.fsencode(lab.source / way / "d/file")
            return any(file.startswith(path) for path in daemon.paths(shim.Kind.WROTE))

        for way in changes:
            wait_until(lambda way=way: is_told(way))


def test_what_acts_on_a_link_itself_drops_nothing(lab: Lab, here: Path) -> None:
    lab.put("d/file", b"source", b"copy..")
    (here / "file").symlink_to(lab.source / "d/file")
    (here / "link").symlink_to(lab.source)
    lab.install()
    code = """
os.chdir(sys.argv[2])
before = [open("file").read(), open("link/d/file").read(), os.lstat("file").st_mode == os.lstat("link").st_mode]
os.rename("link", "other"); os.unlink("file")
say(before + [open("other/d/file").read(), os.path.exists("file"), os.path.exists("link/d/file")])
"""
    with Responder(lab.sock, ready) as daemon:
        assert lab.run(code, here) == ["copy..", "copy..", True, "copy..", False, False]
        assert daemon.paths(shim.Kind.WROTE) == []


SWITCHES = {
    "symlink": "os.unlink('link'); os.symlink(OTHER, 'link')",
    "rename": "os.symlink(OTHER, 'new'); os.rename('new', 'link')",
    "shell": "subprocess.run(['ln', '-sfn', OTHER, 'link'], check=True)",
    "directory": "os.unlink('link'); shutil.copytree(OTHER, 'link')",
    "shell directory": "subprocess.run(['sh', '-c', 'rm link; cp -r \"$0\" link', OTHER], check=True)",
    "above": "os.rename('up', 'gone'); os.mkdir('up'); os.symlink(OTHER, 'up/link')",
    "shell above": "subprocess.run(['sh', '-c', 'mv up gone; mkdir up; ln -s \"$0\" up/link', OTHER], check=True)",
}


def test_a_link_that_changes_leads_elsewhere_at_once(lab: Lab, tmp_path: Path) -> None:
    """Whoever changes it. The other directory has a file of the same name."""
    lab.put("d/file", b"source", b"copy..")
    other = tmp_path / "other"
    (other / "d").mkdir(parents=True)
    (other / "d/file").write_bytes(b"other")
    for way in SWITCHES:
        (tmp_path / way / "up").mkdir(parents=True)
        (tmp_path / way / "up/link").symlink_to(lab.source)
        (tmp_path / way / "link").symlink_to("up/link" if "above" in way else lab.source)
    lab.install()
    code = """
import shutil, subprocess
OTHER = sys.argv[4]
os.chdir(os.path.join(sys.argv[3], way))
out = [open("link/d/file").read() for _ in range(3)]
{}
say(out + [open("link/d/file").read(), open(os.path.abspath("link/d/file")).read(), os.stat("link/d/file").st_size])
"""
    ways = {way: code.format(switch) for way, switch in SWITCHES.items()}
    said = each(lab, ways, tmp_path, other, apart=False)
    assert said == {key: ["copy..", "copy..", "copy..", "other", "other", 5] for key in SWITCHES}


@pytest.mark.parametrize("ours", [True, False], ids=["by this process", "by another"])
def test_a_directory_with_a_relative_link_is_replaced(lab: Lab, here: Path, ours: bool) -> None:
    """The link reads the same as before and leads elsewhere, since what it stands in has moved."""
    lab.put("d/file", b"source", b"copy..")
    deep = here / "deep"
    (deep / "the source/d").mkdir(parents=True)
    (deep / "the source/d/file").write_bytes(b"other")
    (here / "a").mkdir()
    (here / "a/link").symlink_to("../../the source")
    (deep / "x").mkdir()
    (deep / "x/link").symlink_to("../../the source")
    move = "os.rename('a', 'gone'); os.symlink('deep/x', 'a')"
    if not ours:
        move = "subprocess.run('mv a gone; ln -s deep/x a', shell=True, check=True)"
    (here / "the source/d").mkdir(parents=True)
    (here / "the source/d/file").write_bytes(b"other")
    lab.install()
    code = f"""
import subprocess, time
os.chdir(sys.argv[2])
out = [open("a/link/d/file").read() for _ in range(3)]
{move}
end = time.monotonic() + {0 if ours else 3}
while open("a/link/d/file").read() != "other" and time.monotonic() < end: time.sleep(0.01)
say(out + [open("a/link/d/file").read()])
"""
    assert lab.run(code, here) == ["copy.."] * 3 + ["other"]


def test_a_link_that_was_not_there_yet(lab: Lab, here: Path) -> None:
    lab.put("d/file", b"source", b"copy..")
    lab.install()
    code = """
os.chdir(sys.argv[2])
before = [os.path.exists("link/d/file"), os.path.exists("link/d/file")]
os.symlink(SOURCE, "link")
say(before + [open("link/d/file").read()])
"""
    assert lab.run(code, here) == [False, False, "copy.."]


def test_links_that_lead_nowhere_are_left_alone(lab: Lab, here: Path) -> None:
    lab.put("d/file", b"source", b"copy..")
    make_links(here, "loop -> loop; a -> b; b -> a; none -> /nonexistent/x; out -> /usr", lab.source)
    long = here / ("x" * 200) / ("y" * 200)
    long.mkdir(parents=True)
    (long / "link").symlink_to(lab.source)
    lab.install()
    code = """
os.chdir(sys.argv[2])
def error(name):
    try: open(name)
    except OSError as e: return type(e).__name__ + str(e.errno)
deep = "/".join(["x" * 200, "y" * 200, "link", "d", "file"])
say([error("loop/x"), error("a/x"), error("none/x"), error("out/nonexistent"), open(deep).read(), error("/loop/x"),
     error("link/" * 1000), error("a" * 5000)])
"""
    with Responder(lab.sock, ready) as daemon:
        assert lab.run(code, here) == [
            "OSError40", "OSError40", "FileNotFoundError2", "FileNotFoundError2", "copy..", "FileNotFoundError2",
            "OSError36", "OSError36",
        ]  # fmt: skip
        assert daemon.asked == []


def test_many_links_do_not_grow_memory_and_stay_right(lab: Lab, here: Path) -> None:
    """More spellings than are remembered, many directories outside, and threads that open through all of them."""
    for i in range(4):
        lab.put(f"d{i}/file", b"source", b"copy %d" % i)
    for i in range(200):
        (here / f"link{i}").symlink_to(lab.source / f"d{i % 4}")
        (here / f"out{i}").mkdir()
        (here / f"out{i}/file").write_text(f"out {i}")
    lab.install()
    code = """
import threading, random
os.chdir(sys.argv[2])
wrong = []
def work(seed):
    choose = random.Random(seed)
    for _ in range(1500):
        i = choose.randrange(200)
        if open(f"link{i}/file").read() != f"copy {i % 4}": wrong.append(i)
        if open(f"out{i}/file").read() != f"out {i}": wrong.append(-i)
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
say(len(wrong))
"""
    assert lab.run(code, here) == 0
    assert lab.counters()["hit_opens"] == 4 * 1500


def test_a_link_that_is_switched_while_threads_open(lab: Lab, here: Path) -> None:
    """An open begun after the switch never gets what the link led to before."""
    lab.put("d/file", b"source", b"A")
    other = here.parent / "other/d"
    other.mkdir(parents=True)
    (other / "file").write_bytes(b"B")
    (here / "link").symlink_to(lab.source)
    lab.install()
    code = """
import threading
os.chdir(sys.argv[2])
targets = {"A": SOURCE, "B": sys.argv[3]}
stop = []
def noise():
    while not stop: open("link/d/file").read()
threads = [threading.Thread(target=noise) for _ in range(3)]
[t.start() for t in threads]
wrong = 0
for turn in range(300):
    for letter, target in targets.items():
        os.symlink(target, "new"); os.rename("new", "link")
        wrong += open("link/d/file").read() != letter
stop.append(1); [t.join() for t in threads]
say(wrong)
"""
    assert lab.run(code, here, other.parent) == 0


def test_forked_children_and_children_of_threads(lab: Lab, here: Path) -> None:
    lab.put("d/file", b"source", b"copy..")
    (here / "link").symlink_to(lab.source)
    lab.install()
    code = """
import threading
os.chdir(sys.argv[2])
open("link/d/file").read()
stop = []
def noise():
    while not stop: open("link/d/file").read()
thread = threading.Thread(target=noise); thread.start()
codes = []
for _ in range(30):
    pid = os.fork()
    if not pid: os._exit(open("link/d/file").read() != "copy..")
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
stop.append(1); thread.join()
say(codes)
"""
    assert lab.run(code, here) == [0] * 30


def test_an_open_file_by_its_number_is_that_file(lab: Lab, here: Path) -> None:
    """Whatever has its name by now; a write through it drops the copy all the same."""
    lab.put("d/file", b"source")
    lab.put("d/other", b"source")
    lab.install()
    code = """
f = open(src("d/file"))
os.rename(src("d/file"), src("d/gone"))
os.makedirs(sys.argv[2] + "/d", exist_ok=True); open(sys.argv[2] + "/d/file", "w").write("new copy")
name = "/dev/fd/%d" % f.fileno()
g = open(src("d/other"))
open("/proc/self/fd/%d" % g.fileno(), "a").close()
say([open(name).read(), os.stat(name).st_size])
"""
    with Responder(lab.sock, ready) as daemon:
        assert lab.run(code, lab.store) == ["source", 6]
        assert os.fsencode(lab.source / "d/other") in daemon.paths(shim.Kind.WROTE)
