"""Node lists: the full syntax, damaged lists, and a round trip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.job import schedulers


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("a,b,a", ["a", "b", "a"]),
        ("a[001-003,7],b", ["a001", "a002", "a003", "a7", "b"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]node[01-02]", ["rack1node01", "rack1node02", "rack2node01", "rack2node02"]),
        ("c[1,3]-x[8-9]s,login", ["c1-x8s", "c1-x9s", "c3-x8s", "c3-x9s", "login"]),
        ("n[3]", ["n3"]),
        ("gpu-07.cluster.example.org", ["gpu-07.cluster.example.org"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_the_full_syntax(text: str, names: list[str]) -> None:
    assert list(schedulers.expand_nodes(text)) == names


@pytest.mark.parametrize(
    "text",
    [
        "a[1-2",
        "a]1[",
        "a[1[2]]",
        "a[]",
        "a[x]",
        "a[3-1]",
        "a[1-]",
        "",
        "a,,b",
        "a[1-99999999999]",
        "a[1--2]",
        "a[1-2],",
    ],
)
def test_a_damaged_list_is_refused_and_named(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        schedulers.expand_nodes(text)


@pytest.mark.parametrize("text", ["n[0-999999]x[0-999999]", "n[" + "9" * 30 + "]", "n[0-1000000]"])
def test_a_list_that_would_fill_the_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        schedulers.expand_nodes(text)


NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,6}[0-9]{0,20}", fullmatch=True)


@given(st.lists(NAMES, min_size=1, max_size=30))
def test_fold_and_expand_are_inverse(names: list[str]) -> None:
    assert list(schedulers.expand_nodes(schedulers.fold_nodes(names))) == names


@given(st.integers(0, 10**6), st.integers(1, 300), st.integers(1, 8))
def test_a_run_of_numbers_folds_to_one_range(start: int, count: int, width: int) -> None:
    names = [f"n{number:0{width}d}" for number in range(start, start + count)]
    folded = schedulers.fold_nodes(names)
    assert folded.count("[") <= 1
    assert folded.count(",") <= 7
    assert list(schedulers.expand_nodes(folded)) == names


@given(st.text(alphabet="ab01[],-", max_size=25))
def test_any_text_gives_names_or_a_value_error(text: str) -> None:
    try:
        names = schedulers.expand_nodes(text)
    except ValueError:
        return
    assert names
    assert not any(set(name) & set("[],") for name in names)
