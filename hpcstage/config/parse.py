"""Turns what people write into values, with one small parser per kind of setting. Pure; knows no key and no origin.

Every parser takes what an option, a variable or a YAML scalar gave and raises ValueError with half a sentence that
can follow `key (origin): `.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from hpcstage.plan.budget import BudgetAsked
from hpcstage.units import parse_duration, parse_size

Parser = Callable[[object], object]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_YAML_MINUTE = 60
"""YAML takes 2:4 for a time and makes 124 of it."""
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


def scalar(value: object) -> str:
    """Returns one text or number, as text."""
    if isinstance(value, str):
        text = value.strip()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        text = str(value)
    else:
        raise ValueError(f"{_spelt(value)} is not a single text or number")  # noqa: TRY004 - one error for callers
    if not text or "\0" in text:
        raise ValueError("an empty value" if not text else "a NUL byte in the value")
    return text


def _or(word: str | None, parse: Callable[[str], object]) -> Parser:
    """Parses one text; `word` stands for None."""

    def read(value: object) -> object:
        found = scalar(value)
        return None if found == word else parse(found)

    return read


def text(word: str | None = None) -> Parser:
    """Parses any text; `word` stands for None."""
    return _or(word, str)


def name(word: str) -> Parser:
    """Parses what can be a part of a file's name; `word` stands for None."""

    def parse(found: str) -> str:
        if not _NAME.fullmatch(found):
            raise ValueError(f"{found!r} is no name: up to 64 letters, digits, points, dashes and underscores")
        return found

    return _or(word, parse)


def choice(*choices: str) -> Parser:
    """Parses one of the words. YAML turns a bare `on` or `off` into a truth value; that is undone here."""

    def parse(value: object) -> str:
        found = scalar(("off", "on")[value] if isinstance(value, bool) else value).lower()
        if found not in choices:
            raise ValueError(f"{found!r} is not one of {', '.join(choices)}")
        return found

    return parse


def flag(value: object) -> bool:
    """Parses yes or no."""
    if isinstance(value, bool):
        return value
    found = scalar(value).lower()
    if found not in _TRUE | _FALSE:
        raise ValueError(f"{found!r} is neither true nor false")
    return found in _TRUE


def protection(word: str) -> Parser:
    """Parses K+M, a number of nodes and a number of parities; `word` stands for None."""

    def parse(found: str) -> tuple[int, int]:
        nodes, _, parities = found.partition("+")
        data_count, parity_count = _integer(nodes) or 0, _integer(parities) or 0
        if data_count < 1 or parity_count < 1:
            raise ValueError(f"{found!r} is not K+M, two whole numbers from 1, such as 8+2, or {word}")
        return data_count, parity_count

    return _or(word, parse)


def count_range(word: str) -> Parser:
    """Parses MIN:MAX, or one number for both; `word` stands for None."""

    def parse(value: object) -> object:
        if isinstance(value, int) and value >= _YAML_MINUTE:
            raise ValueError(f"{value} may be what YAML makes of MIN:MAX: put quotes around it")
        return parsed(value)

    def numbers(found: str) -> tuple[int, int]:
        least, colon, most = found.partition(":")
        first = _integer(least) or 0
        last = (_integer(most) or 0) if colon else first
        if not 1 <= first <= last:
            raise ValueError(f"{found!r} is not MIN:MAX, two whole numbers from 1, such as 2:4, or {word}")
        return first, last

    parsed = _or(word, numbers)
    return parse


def whole(minimum: int, maximum: int, word: str | None = None) -> Parser:
    """Parses a whole number between two bounds; `word` stands for None."""

    def parse(found: str) -> int:
        number = _integer(found)
        if number is None or not minimum <= number <= maximum:
            also = f" or {word}" if word else ""
            raise ValueError(f"{found!r} is not a whole number from {minimum} to {maximum}{also}")
        return number

    return _or(word, parse)


def rate(word: str | None = None) -> Parser:
    """Parses bytes per second, more than 0: `500MB`, `2GiB/s`; `word` stands for None."""
    return _or(word, lambda found: float(positive_size(found.removesuffix("/s"))))


def duration(minimum_s: float, word: str | None = None) -> Parser:
    """Parses seconds; `word` stands for None."""

    def parse(found: str) -> float:
        seconds = parse_duration(found)
        if not minimum_s <= seconds <= 1e9:
            raise ValueError(f"{found!r} is not between {minimum_s:g}s and 1e9s")
        return seconds

    return _or(word, parse)


def texts(value: object) -> tuple[str, ...]:
    """Parses one text or a list of texts."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return tuple(scalar(item) for item in items)


def positive_size(found: str) -> int:
    """Parses a size of more than 0 bytes."""
    try:
        size_bytes = parse_size(found)
    except OverflowError:
        raise ValueError(f"{found[:20]!r}... is too large for a size") from None
    if size_bytes <= 0:
        raise ValueError(f"{found!r} is not more than 0 bytes")
    return size_bytes


def budget(value: object) -> BudgetAsked:
    """Parses `800GiB`, `80%`, `500GB,2000000`, `80%,50%`; `auto` leaves both to hpcstage."""
    parts = [p.strip() for p in scalar(value).split(",")]
    if len(parts) > 2:
        raise ValueError(f"{scalar(value)!r} is not BYTES or BYTES,INODES (such as 800GiB, 80% or 500GB,2000000)")
    share = _share(parts[0])
    size = None if share is not None or parts[0] == "auto" else positive_size(parts[0])
    inodes, inodes_share = _inodes(parts[1]) if len(parts) == 2 else (None, None)
    return BudgetAsked(size, share, inodes, inodes_share)


def budget_text(value: object) -> str | None:
    """Checks a budget and leaves it as text: shares are taken of the free space once the disk is known."""
    found = scalar(value)
    budget(found)
    return None if found == "auto" else found


def _inodes(found: str) -> tuple[int | None, float | None]:
    share = _share(found)
    if share is not None or found == "auto":
        return None, share
    number = _integer(found)
    if number is None or number <= 0:
        raise ValueError(f"{found!r} is not a number of inodes above 0")
    return number, None


def _share(found: str) -> float | None:
    if not found.endswith("%"):
        return None
    try:
        share = float(found[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ValueError(f"{found!r} is not a share between 0% and 100%")
    return share


def _integer(found: str) -> int | None:
    # int() takes "1_000" and digits of other scripts as well; those are more often mistakes than meant.
    digits = found[1:] if found[:1] in ("-", "+") else found
    return int(found) if digits.isascii() and digits.isdigit() and len(digits) < 19 else None


def _spelt(value: object) -> str:
    if value is None:
        return "an empty value"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return repr(value).lower() if isinstance(value, bool) else f"{value!s} ({type(value).__name__}, quote it)"


def nearest(word: str, known: Iterable[str], cutoff: float) -> str | None:
    """Returns the one of the known words that was probably meant; None if none is near."""
    import difflib

    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def expand(text: str, env: Mapping[str, str]) -> str:
    """Returns the path with its variables replaced; `$$` is a dollar sign.

    Raises ValueError for a variable that is not set or empty: a path with a hole in it would name another place.
    """

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name = match[2] or match[3]
        found = env.get(name)
        if not found:
            raise ValueError(f"${name} is not set")
        return found

    if text == "~" or text.startswith("~/"):
        home = env.get("HOME")
        if not home:
            raise ValueError("~ needs $HOME, which is not set")
        return home + _VARIABLE.sub(value, text[1:])
    return _VARIABLE.sub(value, text)
