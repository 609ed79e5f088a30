"""Property tests of the parsers: any text gives a value in range or a ValueError, and what was meant comes back."""

from __future__ import annotations

from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.config import SETTINGS, parse
from hpcstage.config.parse import expand
from hpcstage.plan.budget import NO_LIMIT, BudgetAsked, BudgetFacts, decide

PIECES = st.text(alphabet="0123456789.-+%,kKMGTiBs/mhd auton e\0", max_size=15)
SCALARS = st.one_of(
    PIECES, st.text(max_size=8), st.integers(), st.floats(), st.booleans(), st.none(), st.dates(), st.binary(max_size=3)
)


@given(st.sampled_from(SETTINGS), st.one_of(SCALARS, st.lists(SCALARS, max_size=3)))
def test_any_value_parses_or_is_refused_with_half_a_sentence(setting: object, value: object) -> None:
    assert isinstance(setting, type(SETTINGS[0]))
    try:
        parsed = setting.parse(value)
    except ValueError as error:
        parsed = None if str(error) else -1
    if isinstance(parsed, (int, float)):
        assert parsed >= 0


@given(st.integers(1, 10**15), st.sampled_from(["", "B", "kB", "MiB", "GB", "TB"]))
def test_sizes(number: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "kB": 1000, "MiB": 1 << 20, "GB": 10**9, "TB": 10**12}[unit]
    assert abs(parse.positive_size(f"{number}{unit}") - number * factor) <= number * factor * 1e-12


@given(st.integers(1, 10**18), st.integers(1, 10**17), st.integers(1, 10**12), st.integers(1, 10**9))
def test_a_budget_in_numbers(size: int, inodes: int, free_bytes: int, free_inodes: int) -> None:
    asked = parse.budget(f"{size},{inodes}")
    found = decide(BudgetFacts(asked, free_bytes, free_inodes))
    assert found.inodes == inodes
    assert abs(found.size_bytes - size) <= size * 1e-12


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 10**12), st.integers(0, 10**9))
def test_a_budget_in_shares(share: int, inode_share: int, free_bytes: int, free_inodes: int) -> None:
    asked = parse.budget(f"{share}%, {inode_share}%")
    found = decide(BudgetFacts(asked, free_bytes, free_inodes))
    assert 0 <= found.size_bytes <= free_bytes
    assert 0 <= found.inodes <= free_inodes
    assert decide(BudgetFacts(asked, free_bytes, None)).inodes == NO_LIMIT


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("auto", BudgetAsked()),
        ("auto,5", BudgetAsked(inodes=5)),
        ("80%", BudgetAsked(size_share=0.8)),
        ("12.5%,auto", BudgetAsked(size_share=0.125)),
        ("1GiB, 50%", BudgetAsked(size_bytes=1 << 30, inodes_share=0.5)),
    ],
)
def test_forms_of_a_budget(text: str, asked: BudgetAsked) -> None:
    assert parse.budget(text) == asked


def test_yaml_truth_values_are_words_again_where_a_word_is_meant() -> None:
    assert parse.choice("auto", "off")(False) == "off"
    with pytest.raises(ValueError, match="'on' is not one of"):
        parse.choice("auto", "off")(True)
    with pytest.raises(ValueError, match="quote it"):
        parse.text()(date(2026, 1, 2))


@given(st.text(alphabet="ab/$~{}x_1", max_size=12))
def test_expansion_replaces_or_refuses(text: str) -> None:
    try:
        found = expand(text, {"a": "A", "x": "", "HOME": "/home/u"})
    except ValueError as error:
        found = text if "$" in str(error) and "not set" in str(error) else "unclear"
    if "$" not in text and not text.startswith("~"):
        assert found == text
    assert found != "unclear"


@pytest.mark.parametrize(
    ("text", "found"),
    [("$a/b", "A/b"), ("${a}b", "Ab"), ("$$a", "$a"), ("~", "/h"), ("~/x", "/h/x"), ("~a", "~a"), ("a~/$", "a~/$")],
)
def test_forms_of_expansion(text: str, found: str) -> None:
    assert expand(text, {"a": "A", "HOME": "/h"}) == found


def test_no_home_no_tilde() -> None:
    with pytest.raises(ValueError, match="HOME"):
        expand("~/x", {})
