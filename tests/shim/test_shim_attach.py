"""Getting into the interpreter: versions, flags, environments, the program's own sitecustomize, and failing open."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from shimlab import Lab

from hpcstage.node import shimdir
from hpcstage.protocol import shim

pytest_plugins = ("shimfixtures",)
READ = "import _hpcstage_attach as a; say([a.layer, open(src('file')).read()])"
VERSIONS = sorted(p.parent.parent.name for p in Path.home().glob(".pyenv/versions/*/bin/python"))
SUPPORTED = ["system", *(f"3.{minor}" for minor in range(8, 15))]
"""A minor version that this machine does not have is skipped by name: the summary says that it was not tried."""


def interpreter(version: str) -> str:
    """The path of an interpreter, or a skip."""
    own = [f"{Path.home()}/.pyenv/versions/{v}/bin/python" for v in VERSIONS if f"{v}.".startswith(f"{version}.")]
    found = "/usr/bin/python3" if version == "system" else shutil.which(f"python{version}")
    path = next((path for path in [*own, found] if path and os.access(path, os.X_OK)), None)
    if path is None:
        pytest.skip(f"Python {version} is not on this machine: the shim was not tried with it")
    return path


@pytest.mark.parametrize("path", shimdir.modules(), ids=lambda path: path.stem)
def test_the_shim_is_written_in_the_language_of_the_oldest_python(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 8))


def plain(lab: Lab, code: str, python: str = sys.executable, **popen: object) -> subprocess.CompletedProcess[bytes]:
    """Runs code that knows nothing of the shim."""
    env = popen.pop("env", None) or lab.environment()
    command = [python, *popen.pop("flags", ()), "-c", code, os.fspath(lab.source)]
    return subprocess.run(command, env=env, capture_output=True, timeout=300, check=False, **popen)


@pytest.mark.parametrize("version", SUPPORTED)
def test_versions(lab: Lab, version: str) -> None:
    lab.put("file", b"source", b"copy..")
    lab.put("remote", b"source")
    lab.install()
    code = """
import _hpcstage_attach as a, gzip, bz2, zipfile, tarfile, shutil, pathlib, tempfile, io
p = pathlib.Path(src("file"))
out = [a.layer, open(p).read(), p.read_text(), p.open("rb").read().decode(), p.exists(),
       p.stat().st_ino == os.stat(p).st_ino,
       sorted(x.name for x in pathlib.Path(SOURCE).iterdir()), len(list(pathlib.Path(SOURCE).rglob("*"))),
       os.path.getsize(p), open(src("remote")).read(), p.is_file(), p.resolve() == p]
p.write_text("new"); out.append(p.read_text())
import inspect, pickle
out += [all(map(inspect.isbuiltin, (open, os.open, os.stat, os.remove, sys.addaudithook))), open is io.open, repr(open),
        all(pickle.loads(pickle.dumps(f)) is f for f in (open, os.open, os.stat, os.remove, sys.addaudithook))]
p.chmod(0o600); p.rename(src("moved")); pathlib.Path(src("moved")).unlink()
with tempfile.NamedTemporaryFile() as f: f.write(b"x")
say(out)
"""
    assert lab.run(code, python=interpreter(version)) == [
        lab.layer, "copy..", "copy..", "copy..", True, True, ["file", "remote"], 2, 6, "source", True, True, "new",
        True, True, "<built-in function open>", True,
    ]  # fmt: skip
    assert lab.slots()[0]["layer"] == shim.Layer[lab.layer.upper()]
    assert lab.slots()[0]["counters"]["exit_ns"] > lab.slots()[0]["attach_ns"] > 0


@pytest.mark.parametrize("version", [v for v in VERSIONS if tuple(map(int, v.split(".")[:2])) < (3, 8)])
def test_old_pythons_are_left_alone(lab: Lab, version: str, tmp_path: Path) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.own = 1\n")
    env = lab.environment()
    env["PYTHONPATH"] += os.pathsep + os.fspath(own)
    code = "import sys; print(open(sys.argv[1] + '/file').read(), sys.own)"
    done = plain(lab, code, interpreter(version), env=env)
    assert (done.returncode, done.stdout.strip()) in [(0, b"source 1"), (0, b"('source', 1)")]
    assert done.stderr == b""


@pytest.mark.parametrize("flags", [["-I"], ["-S"], ["-E"]])
def test_not_attached_and_no_harm(lab: Lab, flags: list[str]) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    done = plain(lab, "import sys; print(open(sys.argv[1] + '/file').read())", flags=flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"source\n", b"")
    assert lab.slots() == []


@pytest.mark.parametrize(
    "flags", [["-s"], ["-B", "-u"], ["-W", "error"], ["-O"], ["-X", "dev"], ["-bb"], ["-X", "utf8=0"]]
)
def test_flags(lab: Lab, flags: list[str]) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    code = "with open(src('file')) as f: say([attach.layer, f.read(), os.environ['HPCSTAGE_SOCKET']])"
    env = lab.environment(HPCSTAGE_SOCKET=os.fspath(lab.sock))
    assert lab.run(code, flags=flags, env=env) == [lab.layer, "copy..", os.fspath(lab.sock)]


def test_what_early_modules_hold_is_replaced(lab: Lab, tmp_path: Path) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    (tmp_path / "early.py").write_text(
        "from builtins import open as taken\nimport os\n"
        "def positional(name, opens=open): return opens(name)\n"
        "def keyword(name, *, opens=open): return opens(name)\n"
        "class Holder:\n    opens = open\n    def method(self, name, opens=open): return opens(name)\n"
    )
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "early.pth").write_text(
        f"import sys; sys.path.append({os.fspath(tmp_path)!r}); import early\n"
    )
    code = """
import early
name = src("file")
ways = (early.taken, early.positional, early.keyword, early.Holder.opens, early.Holder().method, early.Holder().opens)
out = []
for way in ways:
    with way(name) as f: out.append(f.read())
say(out)
"""
    start = tmp_path / "start.py"
    start.write_text(f"import site; site.addsitedir({os.fspath(tmp_path / 'site')!r})\n")
    (lab.node / "shim" / "sitecustomize.py").write_text(
        start.read_text() + (lab.node / "shim" / "sitecustomize.py").read_text()
    )
    in_defaults = "copy.." if lab.layer == "native" else "source"
    assert lab.run(code) == ["copy..", in_defaults, in_defaults, "copy..", in_defaults, "copy.."]


SUBINTERPRETER = """
import importlib
name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
interpreters = importlib.import_module(name)
read, write = os.pipe()
inner = '''
import _hpcstage_attach as attach, os
found = [attach.layer, open(%r).read(), type(open).__name__, os.stat(%r).st_size]
os.write(%d, repr(found).encode())
'''
for _ in range(2):
    interpreters.run_string(interpreters.create(), inner % (src("file"), src("file"), write))
said = os.read(read, 4096).decode()
say([said, attach.layer, open(src("file")).read()])
"""


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_subinterpreter_has_the_same_layer(lab: Lab, version: str) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install(intercept="auto" if lab.layer == "native" else "python")
    kind = "builtin_function_or_method" if lab.layer == "native" else "Open"
    inner = repr([lab.layer, "copy..", kind, 6])
    assert lab.run(SUBINTERPRETER, python=interpreter(version)) == [inner * 2, lab.layer, "copy.."]
    slots = lab.slots()
    assert len({slot["pid"] for slot in slots}) == 1
    assert {slot["layer"] for slot in slots} == {shim.Layer[lab.layer.upper()]}
    assert lab.counters()["hit_opens"] == 3
    assert len(slots) - lab.counters().get("is_again", 0) == 1, "it counts as one process"


def test_switched_off(lab: Lab, tmp_path: Path) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.own = 1\n")
    env = lab.environment(HPCSTAGE_DISABLE="1")
    env["PYTHONPATH"] += os.pathsep + os.fspath(tmp_path)
    code = "import sys; print(open(sys.argv[1] + '/file').read(), sys.own, '_hpcstage_attach' in sys.modules)"
    assert plain(lab, code, env=env).stdout == b"source 1 False\n"
    assert lab.slots() == []


def test_off_only_counts_the_process(lab: Lab) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install(intercept="off")
    assert lab.run(READ) == ["direct", "source"]
    assert [slot["layer"] for slot in lab.slots()] == [shim.Layer.DIRECT]


def test_the_own_sitecustomize_runs(lab: Lab, tmp_path: Path) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.own = (__name__, __file__, __spec__.name)\n")
    env = lab.environment()
    env["PYTHONPATH"] += os.pathsep + os.fspath(tmp_path)
    code = "import sitecustomize; say([sys.own, sitecustomize.__file__, open(src('file')).read()])"
    path = os.fspath(tmp_path / "sitecustomize.py")
    assert lab.run(code, env=env) == [["sitecustomize", path, "sitecustomize"], path, "copy.."]


def test_an_own_sitecustomize_that_fails_fails_as_before(lab: Lab, tmp_path: Path) -> None:
    lab.install()
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('mine')\n")
    env = lab.environment()
    env["PYTHONPATH"] += os.pathsep + os.fspath(tmp_path)
    done = plain(lab, "print(1)", env=env)
    alone = plain(lab, "print(1)", env={**env, "PYTHONPATH": os.fspath(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    assert b"mine" in done.stderr


def test_only_private_names_are_on_the_path(lab: Lab) -> None:
    lab.install()
    names = {p.name for p in (lab.node / "shim").iterdir()} - {"__pycache__"}
    assert all(name.startswith("_hpcstage_") or name in ("sitecustomize.py", "config") for name in names)
    assert (lab.node / "shim").stat().st_mode & 0o777 == 0o700


def test_bytecode_of_the_package_is_used(lab: Lab) -> None:
    import py_compile

    source = shimdir.SHIM / "python" / "_hpcstage_attach.py"
    compiled = py_compile.compile(os.fspath(source))
    assert compiled is not None
    lab.install()
    copy = lab.node / "shim" / "__pycache__" / Path(compiled).name
    before = copy.stat().st_mtime_ns
    assert lab.run("say(attach.__cached__)") == os.fspath(copy)
    assert copy.stat().st_mtime_ns == before


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda config: b"",
    "garbage": lambda config: bytes(range(256)),
    "version": lambda config: b"version 2\n",
    "no uid": lambda config: b"version 1\nintercept auto\nmode stage\n",
    "another user": lambda config: config.replace(b"uid %d\n" % os.geteuid(), b"uid 12345\n"),
}
MISSING = {"no config": "shim/config", "no page": "page", "no selftest": "selftest", "nothing": "."}


@pytest.mark.parametrize("what", [*BROKEN, *MISSING])
def test_missing_and_broken_parts_fail_open(lab: Lab, what: str) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    path = lab.node / MISSING.get(what, "shim/config")
    if what in BROKEN:
        path.write_bytes(BROKEN[what](path.read_bytes()))
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    done = plain(lab, "import sys; print(open(sys.argv[1] + '/file').read())")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"source\n", b"")


@pytest.mark.parametrize("damage", ["short", "foreign"])
def test_a_damaged_page_fails_open(lab: Lab, damage: str) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    if damage == "short":
        os.truncate(lab.node / "page", 5000)
    else:
        (lab.node / "page").write_bytes(b"x" * shim.PAGE_BYTES)
    done = plain(lab, "import sys; print(open(sys.argv[1] + '/file').read())")
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_node_directory_vanishes_while_running(lab: Lab) -> None:
    lab.put("file", b"source", b"copy..")
    lab.install()
    code = """
import shutil, subprocess
out = [open(src("file")).read()]
shutil.rmtree(sys.argv[2])
out += [open(src("file")).read(), os.stat(src("file")).st_size]
with open(src("file"), "w") as f: f.write("new")
out.append(open(src("file")).read())
out.append(subprocess.run([sys.executable, "-c", "print(open(%r).read())" % src("file")], stdout=-1).stdout.decode())
if os.fork() == 0: os._exit(open(src("file")).read() != "new")
out.append(os.wait()[1])
say(out)
"""
    assert lab.run(code, lab.node) == ["copy..", "source", 6, "new", "new\n", 0]


def test_native_falls_back_to_python(python_lab: Lab) -> None:
    lab = python_lab
    lab.put("file", b"source", b"copy..")
    lab.install(intercept="auto")
    for path in (lab.node / "shim").glob("*.so"):
        path.write_bytes(b"not a library")
    assert lab.run(READ) == ["python", "copy.."]


def test_imports_leave_no_trace(lab: Lab, tmp_path: Path) -> None:
    package = tmp_path / "torch" / "utils" / "data"
    package.mkdir(parents=True)
    for path in (package, package.parent, package.parent.parent):
        (path / "__init__.py").touch()
    (package / "dataloader.py").write_text("class _BaseDataLoaderIter:\n    pass\n")
    lab.install()
    env = lab.environment()
    env["PYTHONPATH"] += os.pathsep + os.fspath(tmp_path)
    code = """
before = [type(f).__name__ for f in sys.meta_path]
import torch.utils.data.dataloader as m
import importlib
say([before[0], [type(f).__name__ for f in sys.meta_path].count("_Finder"), type(m.__loader__).__name__,
     type(m.__spec__.loader).__name__, importlib.reload(m) is m])
"""
    assert lab.run(code, env=env) == ["_Finder", 0, "SourceFileLoader", "SourceFileLoader", True]


def test_an_import_that_fails_fails_as_before(lab: Lab) -> None:
    lab.install()
    code = """
try: import torch.utils.data.dataloader
except ModuleNotFoundError as e: say([e.name, type(e).__name__])
else: say("there")
"""
    env = lab.environment()
    assert lab.run(code, env=env) in (["torch", "ModuleNotFoundError"], "there")
