"""Reads from a command's words which Python it starts, and whether hpcstage can serve it at all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence

_MOST_WORDS = 50
_SHORT_OPTIONS = re.compile(r"-[bBdEiIOPqRsSuvx]*")


def unserved(command: Sequence[str]) -> str | None:
    """Returns what to say of a command that is not Python and names no other program: it is not served. None for
    others."""
    path = shutil.which(command[0])
    names_others = any(map(_may_be_program, command[1 : 1 + _MOST_WORDS]))
    if path is None or names_others or _is_python(os.path.realpath(path)):
        return None
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read(4) == b"\x7fELF":
            name, served = os.path.basename(path), "hpcstage serves the Python programs that it starts"
            return f"{name} is not Python: {served}, and what others read comes from the source"
    return None


def _may_be_program(word: str) -> bool:
    """Tells whether a word may name a program. Paths are not looked at: their file system may hang."""
    return (
        ".py" in word
        or ".sh" in word
        or "python" in word
        or word.startswith("./")
        or ("/" not in word and bool(shutil.which(word)))
    )


def python_of(command: Sequence[str]) -> list[str] | None:
    """Returns the Python of a command with its options; None if no word of the command is one."""
    for index, path in _programs(command):
        if _is_python(path) or _is_python(os.path.realpath(path)):
            return [os.path.abspath(path), *_options(command[index + 1 :])]
        with contextlib.suppress(OSError), open(path, "rb") as file:
            words = os.fsdecode(file.readline(1024)).split() if file.read(2) == b"#!" else []
            words = [word for word in words if os.path.basename(word) not in ("env", "-S")]
            if words and _is_python(words[0]) and (program := shutil.which(words[0])):
                return [program, *_options(words[1:])]
    return None


def _programs(command: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yields position and path of the words that may be programs. Other paths are not looked at."""
    for index, word in enumerate(command[:_MOST_WORDS]):
        if (index == 0 or "/" not in word or _is_python(word)) and (path := shutil.which(word)):
            yield index, path


def _is_python(path: str) -> bool:
    return os.path.basename(path).startswith(("python", "pypy"))


def _options(words: Sequence[str]) -> list[str]:
    """Returns the options of an interpreter, up to its program."""
    kept, rest = list[str](), iter(words)
    for word in rest:
        flags = _SHORT_OPTIONS.match(word)
        if flags is None or word == "-":
            break
        more = word[flags.end() :]
        kept += [flags[0]] * (flags[0] != "-")
        if more[:1] in ("W", "X"):
            kept.append(f"-{more}" if more[1:] else f"-{more}{next(rest, '')}")
        elif more:
            break
    return kept
