"""Finds the dataset that an absolute path belongs to, by comparing it as text with roots and aliases.

This module owns the textual rules for paths (bytes). It touches no file system: `datasets` resolves symlinks once.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcstage.plan.types import Dataset


def tidy(path: bytes) -> bytes:
    """Collapses `//` and `/./` and drops a trailing slash; leaves `..` alone (it depends on symlinks)."""
    if b"//" not in path and b"/." not in path and path[-1:] != b"/":
        return path
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    return b"/" + b"/".join(parts) if path[:1] == b"/" else b"/".join(parts)


def is_below(path: bytes, root: bytes) -> bool:
    """Returns whether `path` is the root or lies in it. Both must be tidy."""
    return path == root or path.startswith(with_slash(root))


def with_slash(root: bytes) -> bytes:
    """Returns the prefix of all paths in a directory."""
    return root if root.endswith(b"/") else root + b"/"


def join(root: bytes, path: bytes) -> bytes:
    """Returns the absolute path of a path below a root; the root itself for an empty path."""
    return with_slash(root) + path if path else root


def printable(path: bytes) -> str:
    r"""Returns a path on one line, with bytes that are not text, newlines and other controls as \xNN."""
    text = path.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))


class Roots:
    """Finds the dataset of a path among roots and aliases, of which there are few."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._prefixes = [(with_slash(r), i) for i, d in enumerate(datasets) for r in (d.root, *d.aliases)]
        # An alias may lie in another dataset's root: the longest spelling wins.
        self._prefixes.sort(key=lambda item: -len(item[0]))

    def locate(self, path: bytes) -> tuple[int, bytes] | None:
        """Returns the dataset's index and the path below its root (empty for the root) of an absolute path, or None."""
        path = tidy(path)
        for prefix, index in self._prefixes:
            if path.startswith(prefix):
                return index, path[len(prefix) :]
            if len(path) == len(prefix) - 1 and prefix.startswith(path):
                return index, b""
        return None
