"""Problems of a run: all programs tell them, and the record lists them."""

from __future__ import annotations

from dataclasses import dataclass

NO_PYTHON = "hpcstage serves Python programs, and saw none in the command: what others read comes from the source"
"""What is said at the end of such a run, unless the wrapper said as much at its start."""


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
