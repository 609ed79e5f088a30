"""Finds a node's files for its copiers and its exchange: the manifest, and the names in the store that follow from an
id.

All names are relative to the node directory, which is the working directory of a copier and of an exchange.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from hpcstage.errors import UsageError
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import ManifestEntry
from hpcstage.protocol import nodedir
from hpcstage.store.copyfile import CopyJob

_STORE = os.fsencode(nodedir.STORE) + b"/"
_LINKS = os.fsencode(nodedir.LINKS) + b"/"
_HEAD_BYTES = 256


class Catalog:
    """Owns the manifest of a node directory."""

    def __init__(self, path: Path, incoming: bytes) -> None:
        """Raises UsageError if there is no manifest at `path`."""
        self.fingerprint = fingerprint(path)
        """The number by which a group knows the manifest that this node's ids belong to."""
        self._manifest = Manifest.open(path, verify=False)
        self._incoming = incoming

    def __contains__(self, id_: int) -> bool:
        return 0 <= id_ < len(self._manifest)

    def staged(self, id_: int) -> bytes:
        """Returns the name of a file's copy."""
        return _STORE + self._manifest.store_path(id_)

    def size(self, id_: int) -> int:
        """Returns the bytes of a file at the scan."""
        return self._manifest.size(id_)

    def entry(self, id_: int) -> ManifestEntry:
        """Returns what the manifest knows of a file."""
        return self._manifest.entry(id_)

    def names(self, id_: int) -> tuple[bytes, bytes, bytes | None]:
        """Returns the temporary, final and second name of a copy; copies of symbolic links have a second one."""
        link = _LINKS + b"%d" % id_ if self._manifest.is_link(id_) else None
        return self._incoming + b"%d" % id_, self.staged(id_), link

    def job(self, id_: int) -> CopyJob:
        """Returns the same names as a job for `copyfile`."""
        return CopyJob(b"", *self.names(id_))

    def source_job(self, id_: int, *, urgent: bool) -> CopyJob:
        """Returns a job that copies a file from the source."""
        is_link = self._manifest.is_link(id_)
        return CopyJob(self._manifest.source_path(id_), *self.names(id_), nofollow=not is_link, urgent=urgent)


class LateCatalog:
    """Owns a catalog that is there as soon as the manifest is. Files that are not whole are in `incoming`."""

    def __init__(self, incoming: str) -> None:
        self.incoming = incoming
        self._catalog: Catalog | None = None

    @property
    def catalog(self) -> Catalog | None:
        """Returns the catalog; None as long as there is no manifest."""
        if self._catalog is None:
            with contextlib.suppress(UsageError):
                self._catalog = Catalog(Path(nodedir.MANIFEST), os.fsencode(self.incoming) + b"/")
        return self._catalog


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
