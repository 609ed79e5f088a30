"""Problems of a run: all programs tell them, and the record lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A problem's name, what happened, and what to do next. Only the record fills `nodes` and `count`."""

    id: str = "unknown"
    text: str = ""
    remedy: str = ""
    nodes: tuple[str, ...] = ()
    """The first of the nodes that told it."""
    count: int | None = None
    """The number of these nodes, or of the texts that became one problem."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, without what is not known."""
        known = {"nodes": list(self.nodes), "count": self.count}
        told = {"id": self.id, "text": self.text, "remedy": self.remedy}
        return {**told, **{name: value for name, value in known.items() if value}}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Problem:
        """Reads what a program told; keys that are missing stay empty."""
        return cls(data.get("id", "unknown"), data.get("text", ""), data.get("remedy", ""))

    def to_line(self) -> str:
        """Returns one line for a pipe."""
        return "\t".join((self.id, self.text, self.remedy)).replace("\n", " ")

    @classmethod
    def from_line(cls, line: str) -> Problem:
        """Reads a line of `to_line`."""
        id_, text, remedy, *_ = [*line.split("\t"), "", ""]
        return cls(id_, text, remedy)
