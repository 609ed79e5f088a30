"""Finds a node's files for its exchange: the manifest, and the names below the node directory that follow from an id.

All names are relative to the node directory, which is the working directory of an exchange.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.store.copyfile import Job

_HEAD_BYTES = 256


class Catalog:
    """Owns the manifest of a node directory."""

    def __init__(self, path: Path, incoming: bytes) -> None:
        """Raises UsageError if it is no manifest."""
        self.fingerprint = fingerprint(path)
        """The number by which a group knows the manifest that this node's ids belong to."""
        self._manifest = Manifest.open(path, verify=False)
        self._incoming = incoming
        self._stores = [b"store/" + os.fsencode(dataset.name) + b"/" for dataset in self._manifest.datasets]

    def __contains__(self, id_: int) -> bool:
        return 0 <= id_ < len(self._manifest)

    def staged(self, id_: int) -> bytes:
        """Returns the name of a file's copy."""
        manifest = self._manifest
        return self._stores[manifest.dataset_of(id_)] + manifest.path(id_)

    def size(self, id_: int) -> int:
        """Returns the bytes of a file at the scan."""
        return self._manifest.size(id_)

    def names(self, id_: int) -> tuple[bytes, bytes, bytes | None]:
        """Returns the temporary, final and second name of a copy; only copies of symbolic links have a second one."""
        link = b"links/%d" % id_ if self._manifest.is_link(id_) else None
        return self._incoming + b"%d" % id_, self.staged(id_), link

    def job(self, id_: int) -> Job:
        """Returns the same names as a job for `copyfile`."""
        return Job(b"", *self.names(id_))


def fingerprint(path: Path) -> int:
    """Returns a number that is equal for equal manifests (their head holds counts and a checksum of the rest); 0 if
    there is no manifest."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return 0
    return int.from_bytes(hashlib.blake2b(head + b"%d" % size, digest_size=8).digest(), "little") | 1
