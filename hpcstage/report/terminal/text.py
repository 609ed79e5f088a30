"""Makes text for terminals: escaping, display width, meters, sparklines, numbers with units. It knows no records."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpcstage.units import format_duration, format_rate, format_size

UNKNOWN = "not measured"
BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = ".:-=+*%#"


@dataclass(frozen=True)
class Style:
    """The width of the text, and whether it may have colour and other characters than ASCII."""

    width: int = 80
    color: bool = False
    unicode: bool = True

    def bold(self, text: str) -> str:
        """Returns text as a heading."""
        return self._paint("1", text)

    def red(self, text: str) -> str:
        """Returns text in the colour of errors."""
        return self._paint("31", text)

    def yellow(self, text: str) -> str:
        """Returns text in the colour of warnings."""
        return self._paint("33", text)

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and text else text


def clean(text: str) -> str:
    """Returns one line without control characters: escapes what is not printable; bytes that are no text as \\xNN."""
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    known = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if char in known:
        return known[char]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def plain(text: str) -> str:
    """Returns text in ASCII, for terminals that show nothing else."""
    return text.encode("ascii", "backslashreplace").decode()


def display_width(text: str) -> int:
    """Returns the number of columns that text takes on a terminal."""
    return sum(_columns(char) for char in text)


def _columns(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def clip(text: str, width: int) -> str:
    """Cleans text and cuts it to a width; `...` says that something was cut off."""
    text = clean(text)
    if display_width(text) <= width:
        return text
    return _cut(text, width - 3) + "..." if width > 3 else _cut(text, width)


def _cut(text: str, width: int) -> str:
    used = 0
    for index, char in enumerate(text):
        used += _columns(char)
        if used > width:
            return text[:index]
    return text


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Fills text with blanks to a width."""
    blanks = " " * max(0, width - display_width(text))
    return blanks + text if right else text + blanks


def wrap(text: str, width: int, *, lines: int) -> list[str]:
    """Cleans text and breaks it at blanks; cuts what does not fit into `lines`."""
    result: list[str] = []
    rest = clean(text)
    while rest and len(result) < lines - 1 and display_width(rest) > width:
        head = _cut(rest, width + 1)
        at = head.rfind(" ")
        if at <= 0:
            head = _cut(rest, width)
            at = len(head)
        result.append(rest[:at].rstrip())
        rest = rest[at:].lstrip()
    return [*result, clip(rest, width)] if rest else result


def meter(share: float | None, width: int) -> str:
    """Returns a bar such as `[|||||      42 %]`, as in job statistics."""
    inner = width - 2
    if share is None:
        return f"[{pad(UNKNOWN, inner, right=True)}]"
    label = f" {percent(share)}"
    room = inner - len(label)
    bars = min(max(round(share * room), 1 if share > 0 else 0), room)
    return f"[{pad('|' * bars, room)}{label}]"


def sparkline(values: Sequence[float | None], width: int, *, unicode: bool = True) -> str:
    """Returns a row of bars, scaled to the largest value; a blank stands for 0 or an unknown value."""
    merged = _merged(values, width)
    top = max((v for v in merged if v is not None), default=0.0)
    bars = BARS if unicode else PLAIN_BARS
    return "".join(" " if not v else bars[min(int(v / top * len(bars)), len(bars) - 1)] for v in merged)


def _merged(values: Sequence[float | None], width: int) -> list[float | None]:
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [_mean(values[a:b]) for a, b in pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def percent(share: float | None) -> str:
    """Formats a share; a small one is not shown as 0 %, and a nearly whole one not as 100 %."""
    if share is None:
        return UNKNOWN
    value = 100 * share
    if 0 < value < 1:
        return "<1 %"
    if 99 < value < 100:
        return f"{min(value, 99.9):.1f} %"
    return f"{value:.0f} %"


def seconds(value: float | None) -> str:
    """Formats a duration, or says that it is not known."""
    if value is None:
        return UNKNOWN
    text = format_duration(abs(value)) if abs(value) >= 0.1 else f"{abs(value) * 1000:.3g} ms"
    text = text if abs(value) >= 1e-6 else "0 s"
    return f"-{text}" if value < 0 and text != "0 s" else text


def size(value: float | None) -> str:
    """Formats bytes, or says that they are not known."""
    return UNKNOWN if value is None else format_size(value)


def rate(value: float | None) -> str:
    """Formats bytes per second, or says that they are not known."""
    return UNKNOWN if value is None else format_rate(value)


def count(value: float | None) -> str:
    """Formats a number of things, or says that it is not known."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def milliseconds(value: float | None) -> str:
    """Formats a latency, or says that it is not known."""
    if value is None:
        return UNKNOWN
    if value < 0.1:
        return f"{value * 1000:.0f} us"
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"
