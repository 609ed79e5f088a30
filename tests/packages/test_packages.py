"""The source distribution holds all that a site needs, and one wheel serves every Python that is supported."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from conftest import REPO

import hpcstage as package

pytest.importorskip("setuptools", reason="needs setuptools to build packages")

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="needs tomli below Python 3.11")

NOT_PART = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "hpcstage-runs", "results", "slowfs"
)
BUILD = "import setuptools.build_meta as backend; print(backend.build_{what}({to!r}))"
FREE_THREADED = "import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1; "
OLDEST = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=3.")


def build(source: Path, what: str, to: Path, before: str = "") -> Path:
    """Without an index: the tools are those of this environment."""
    to.mkdir(exist_ok=True)
    code = before + BUILD.format(what=what, to=os.fspath(to))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env={**os.environ, "CFLAGS": "-O0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return to / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("packages")
    shutil.copytree(REPO, top / "clone", ignore=NOT_PART)
    archive = build(top / "clone", "sdist", top / "dist")
    (top / "unpacked").mkdir()
    subprocess.run(["tar", "xzf", archive, "-C", top / "unpacked"], check=True, timeout=300)
    (unpacked,) = (top / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From the source distribution, as an installer makes it."""
    return build(sdist, "wheel", tmp_path_factory.mktemp("wheel"))


def below(top: Path, *patterns: str) -> set[str]:
    return {os.fspath(path.relative_to(top)) for pattern in patterns for path in top.glob(pattern) if path.is_file()}


def test_the_source_distribution_holds_scripts_configurations_and_documents(sdist: Path) -> None:
    wanted = below(REPO, "*.md", "LICENSE", "constraints.txt", "jobscripts/*", "configs/*", "docs/*", "scripts/*")
    wanted |= below(REPO, "CITATION.cff", "packaging/**/*")
    wanted |= below(REPO, "hpcstage/**/*.py", "hpcstage/**/*.[ch]", "hpcstage/**/*.json", "tests/**/*.py")
    assert wanted - below(sdist, "**/*") == set()
    assert below(sdist, "**/*.so", "**/*.pyc") == set()
    assert os.access(sdist / "scripts" / "test", os.X_OK)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_one_wheel_for_all_that_are_supported(wheel: Path, tmp_path: Path) -> None:
    assert re.fullmatch(rf"hpcstage-[0-9.]+-cp3{OLDEST}-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path)
    built = ("shim/native/_hpcstage_native", "store/_copy", "store/_files")
    assert below(tmp_path, "hpcstage/**/*.so") == {f"hpcstage/{name}.abi3.so" for name in built}
    wanted = below(
        REPO, "hpcstage/**/*.py", "hpcstage/**/*.json", "hpcstage/emulator/*.c", "hpcstage/**/*.j2", "hpcstage/py.typed"
    )
    wanted |= {"hpcstage/report/report.md", "hpcstage/report/notes.md"}
    wanted |= {f"hpcstage/{name}" for name in below(REPO, "jobscripts/*")}
    assert below(tmp_path, "hpcstage/**/*") - below(tmp_path, "hpcstage/**/*.so") == wanted, "and no other C"
    metadata = next(tmp_path.glob("*.dist-info/METADATA")).read_text()
    said = ("License-Expression: Apache-2.0", f"Requires-Python: >=3.{OLDEST}", f"Version: {package.__version__}")
    assert set(said) <= set(metadata.splitlines())
    code = "import hpcstage; from hpcstage.node.shimdir import native_available as n; print(hpcstage.__file__, n())"
    env = {**os.environ, "PYTHONPATH": os.fspath(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [os.fspath(tmp_path / "hpcstage" / "__init__.py"), "True"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_wheel_needs_the_c_library_only(wheel: Path) -> None:
    pytest.importorskip("auditwheel", reason="needs auditwheel")
    words = [sys.executable, "-m", "auditwheel", "show", wheel]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    said = " ".join(done.stdout.split())
    tag = re.search(rf'following platform tag: "manylinux_2_(\d+)_{platform.machine()}"', said)
    assert tag, said
    assert int(tag[1]) <= int(platform.libc_ver()[1].split(".")[1]), "what it was built with"
    assert set(re.findall(r"\blib[\w+-]+\.so[.\d]*", said)) == {"libc.so.6"}


def test_an_installed_hpcstage_explains_its_report(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path)
    env = {**os.environ, "PYTHONPATH": os.fspath(tmp_path)}
    words = [sys.executable, "-m", "hpcstage", "explain"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == (REPO / "docs" / "report.md").read_text()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("required", [True, False])
def test_c_code_that_does_not_compile_is_seen_where_the_extensions_are_required(tmp_path: Path, required: bool) -> None:
    shutil.copy(REPO / "setup.py", tmp_path)
    for name in ("shim/native/_hpcstage_native", "store/_copy", "store/_files"):
        source = tmp_path / "hpcstage" / f"{name}.c"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("int broken(\n")
    env = {name: value for name, value in os.environ.items() if name != "HPCSTAGE_REQUIRE_NATIVE"}
    env |= {"HPCSTAGE_REQUIRE_NATIVE": "1"} if required else {}
    words = [sys.executable, "setup.py", "-q", "build_ext"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, timeout=300, check=False)
    assert (done.returncode != 0) is required, done.stderr


def test_free_threaded_pythons_get_no_extension(sdist: Path, tmp_path: Path) -> None:
    shutil.copytree(sdist, tmp_path / "source")
    wheel = build(tmp_path / "source", "wheel", tmp_path / "dist", FREE_THREADED)
    assert "abi3" not in wheel.name
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_c_code_keeps_to_the_api_of_the_oldest_python() -> None:
    asked = {}
    for source in (REPO / "hpcstage").glob("**/*.c"):
        if found := re.search(r"#define Py_LIMITED_API 0x03([0-9a-f]{2})0000", source.read_text()):
            asked[source.name] = int(found[1], 16)
    assert asked.keys() == {"_hpcstage_native.c", "_copy.c", "_files.c"}
    assert max(asked.values()) <= int(OLDEST)
    assert asked["_hpcstage_native.c"] == 8, "the shim runs in the program's Python"


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Pytest imports them by their last name alone: a second one of the same name ends the whole run."""
    names = Counter(path.name for path in (REPO / "tests").rglob("*.py") if path.parent != REPO / "tests")
    assert [name for name, times in names.items() if times > 1] == []
