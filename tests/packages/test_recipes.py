"""One version, one licence, one list of dependencies: conda, Spack and the citation agree with pyproject.toml."""

from __future__ import annotations

import ast
import re
import sys

import pytest
import yaml
from conftest import REPO, Hpcstage

import hpcstage as package

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="needs tomli below Python 3.11")

PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONDA = yaml.safe_load((REPO / "packaging" / "conda" / "recipe.yaml").read_text())
CONDA_NAMES = {"torch": "pytorch", "xxhash": "python-xxhash"}


def floors(requirements: list[str]) -> dict[str, str]:
    """The oldest version of each requirement that names one, as in `click>=8.1`."""
    return dict(re.fullmatch(r"([\w-]+) ?>=([\d.]+)", one).groups() for one in requirements if ">=" in one)


NEEDED = floors([f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]])
BUILT_WITH = floors(PYPROJECT["build-system"]["requires"])


def spack() -> list[tuple[str, list[str], dict[str, str]]]:
    """The directives of Spack's recipe: name, positional arguments, named ones."""
    (recipe,) = (
        node
        for node in ast.parse((REPO / "packaging" / "spack" / "package.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    calls = (node for node in ast.walk(recipe) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return [
        (
            call.func.id,
            [ast.literal_eval(one) for one in call.args],
            {one.arg: ast.literal_eval(one.value) for one in call.keywords},
        )
        for call in calls
    ]


def test_the_command_says_the_version(hpcstage: Hpcstage) -> None:
    assert hpcstage("--version").stdout.decode() == f"hpcstage, version {package.__version__}\n"


def test_the_version_stands_in_one_place_of_what_is_installed() -> None:
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hpcstage.__version__"}
    assert "version" in PROJECT["dynamic"]
    assert f"## {package.__version__} " in (REPO / "CHANGELOG.md").read_text()


def test_the_citation() -> None:
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert (citation["cff-version"], citation["type"], citation["title"]) == ("1.2.0", "software", PROJECT["name"])
    assert (citation["version"], citation["license"]) == (package.__version__, PROJECT["license"])
    assert citation["authors"] == PROJECT["authors"]
    assert citation["message"]


def test_conda() -> None:
    assert CONDA["context"]["version"] == package.__version__
    assert CONDA["about"]["license"] == PROJECT["license"]
    assert CONDA["about"]["license_file"] in PROJECT["license-files"]
    assert floors(CONDA["requirements"]["run"]) == NEEDED
    assert floors(CONDA["requirements"]["host"]) == BUILT_WITH
    optional = floors(EXTRAS["mpi"] + EXTRAS["torch"] + EXTRAS["checkpoint"])
    in_conda = {CONDA_NAMES.get(name, name): version for name, version in optional.items()}
    constrained = floors(CONDA["requirements"]["run_constraints"])
    assert constrained.items() <= in_conda.items()
    assert constrained


def test_spack() -> None:
    directives = spack()
    assert [words for name, words, _ in directives if name == "version"] == [[package.__version__]]
    assert [words for name, words, _ in directives if name == "license"] == [[PROJECT["license"]]]
    needs = [(words[0].removeprefix("py-"), named) for name, words, named in directives if name == "depends_on"]
    assert ("c", {"type": "build"}) in needs

    def oldest(**asked: str) -> dict[str, str]:
        specs = [spec.rstrip(":").replace("@", ">=") for spec, named in needs if named == asked]
        return floors(specs)

    assert oldest(type="build") == BUILT_WITH
    assert oldest() == NEEDED
    assert oldest(when="+mpi").items() <= floors(EXTRAS["mpi"]).items()
    assert oldest(when="+mpi")
