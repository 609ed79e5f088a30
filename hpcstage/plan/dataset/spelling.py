"""Turns paths as a program or a list spells them into those that the manifest knows: it follows symbolic links outside
of the datasets.

Owns what was learnt of directories, for one list; asks the file system a bounded number of times.
"""

from __future__ import annotations

import os

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.roots import Roots

MOST_DIRECTORIES = 50_000
MOST_FILES = 1_000
"""The most names that are checked for being links themselves."""


class Spelling:
    """Returns, when called, the path below a dataset that an absolute path leads to, or the path itself. Remembers the
    directories that it resolved."""

    def __init__(self, manifest: Manifest) -> None:
        self._roots = Roots(manifest.datasets)
        self._directories: dict[bytes, bytes] = {}
        self._files_left = MOST_FILES

    def __call__(self, path: bytes) -> bytes:
        if path[:1] != b"/" or self._roots.locate(path) is not None:
            return path
        found = self._by_directory(path)
        if self._roots.locate(found) is None and self._files_left > 0:
            self._files_left -= 1
            found = _real(path)
        return path if self._roots.locate(found) is None else found

    def _by_directory(self, path: bytes) -> bytes:
        head, _, tail = path.rpartition(b"/")
        real = self._directories.get(head)
        if real is None:
            if len(self._directories) >= MOST_DIRECTORIES:
                return path
            real = self._directories[head] = _real(head or b"/")
        return real.rstrip(b"/") + b"/" + tail


def _real(path: bytes) -> bytes:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return path
