"""Problems of a run: all programs tell them, and the record lists them."""

from __future__ import annotations

from dataclasses import dataclass

NOT_PYTHON = "not-python"
"""The command is a program that is not Python, and names none that is."""


@dataclass(frozen=True)
class Problem:
    """A problem's name, what happened, and what to do next."""

    id: str = "unknown"
    text: str = ""
    remedy: str = ""

    def to_line(self) -> str:
        """Returns one line for a pipe."""
        return "\t".join((self.id, self.text, self.remedy)).replace("\n", " ")

    @classmethod
    def from_line(cls, line: str) -> Problem:
        """Reads a line of `to_line`."""
        id_, text, remedy, *_ = [*line.split("\t"), "", ""]
        return cls(id_, text, remedy)
