"""What an exchange knows of a node's files: the manifest and the names below the node directory that follow from an id.

All names are relative to the node directory, which is the working directory of an exchange.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.store.copyfile import Job

MANIFEST_NAME = "manifest.bin"
ORDER_NAME = "order.bin"
_HEAD_BYTES = 256


class Catalog:
    """The manifest of a node directory."""

    def __init__(self, path: Path, incoming: bytes) -> None:
        """Raises UsageError if it is no manifest."""
        self.fingerprint = fingerprint(path)
        """What this node's ids are known by in the group."""
        self._manifest = Manifest.open(path, verify=False)
        self._incoming = incoming
        self._stores = [b"store/" + os.fsencode(dataset.name) + b"/" for dataset in self._manifest.datasets]

    def __contains__(self, id_: int) -> bool:
        return 0 <= id_ < len(self._manifest)

    def staged(self, id_: int) -> bytes:
        """The name of its copy."""
        manifest = self._manifest
        return self._stores[manifest.dataset_of(id_)] + manifest.path(id_)

    def size(self, id_: int) -> int:
        """At the scan, in bytes."""
        return self._manifest.size(id_)

    def names(self, id_: int) -> tuple[bytes, bytes, bytes | None]:
        """Temporary, final and second name of what is published: copies of symbolic links have a second one."""
        link = b"links/%d" % id_ if self._manifest.is_link(id_) else None
        return self._incoming + b"%d" % id_, self.staged(id_), link

    def job(self, id_: int) -> Job:
        """The same, for `copyfile`."""
        return Job(b"", *self.names(id_))


def fingerprint(path: Path) -> int:
    """Equal for equal manifests (their head holds counts and a checksum of the rest); 0: there is none."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return 0
    return int.from_bytes(hashlib.blake2b(head + b"%d" % size, digest_size=8).digest(), "little") | 1
