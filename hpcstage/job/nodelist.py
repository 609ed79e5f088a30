"""Turns node lists as schedulers write them, such as `a[001-003,7],b`, into names and back. Pure; asks no scheduler."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

MAX_NODES = 1_000_000
"""A list that would give more names than this is damaged, not large."""
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(text: str) -> tuple[str, ...]:
    """Returns all names in the order of the list; knows brackets with ranges, several per name, and a suffix behind
    them.

    Raises ValueError if the list is damaged.
    """
    names: list[str] = []
    for word in _words(text):
        names.extend(_expand_word(word, MAX_NODES - len(names)))
    return tuple(names)


def fold(names: Iterable[str]) -> str:
    """Returns the short form of a list of names, from which `expand` gives the same names in the same order."""
    parts: list[str] = []
    prefix, numbers = "", list[str]()
    for name in names:
        digits = re.search(r"[0-9]{1,18}$", name)
        if not digits:
            parts += [*_folded(prefix, numbers), name]
            prefix, numbers = "", []
            continue
        head = name[: digits.start()]
        if numbers and head != prefix:
            parts += _folded(prefix, numbers)
            numbers = []
        prefix = head
        numbers.append(digits[0])
    return ",".join([*parts, *_folded(prefix, numbers)])


def _words(text: str) -> Iterator[str]:
    depth = start = 0
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"node list {_short(text)}: unbalanced brackets")
        if char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if depth:
        raise ValueError(f"node list {_short(text)}: unbalanced brackets")
    yield text[start:]


def _expand_word(word: str, most: int) -> list[str]:
    pieces = [[piece] if at % 2 == 0 else _ranges(piece, most) for at, piece in enumerate(re.split(r"[\[\]]", word))]
    count = 1
    for piece in pieces:
        count *= len(piece)
    if not word.strip() or count > most:
        raise ValueError(f"node list: {_short(word)} gives {count if word.strip() else 'no'} names")
    return ["".join(parts) for parts in product(*pieces)]


def _ranges(text: str, most: int) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise ValueError(f"node list: {_short(part)} is no range")
        low, high = match[1], match[2] or match[1]
        if len(low) > 18 or len(high) > 18 or not 0 <= int(high) - int(low) < most:
            raise ValueError(f"node list: {_short(part)} is no range")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found


def _folded(prefix: str, numbers: list[str]) -> list[str]:
    if not numbers:
        return []
    runs: list[list[str]] = []
    for number in numbers:
        if runs and number == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][0])):
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    if len(numbers) == 1:
        return [prefix + numbers[0]]
    return [f"{prefix}[{','.join('-'.join(run) for run in runs)}]"]


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
