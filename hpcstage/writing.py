"""Replaces files in one step: readers see the old content or all of the new one. Owns the names of temporary files.

No symbolic link that stands under a name is followed: others may write to a directory of results. What is written is
this user's alone, as commands and names of files may be secret.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Gives a file to write to, which takes the place of `path` at the end; after an error nothing has changed.

    The temporary name is random: processes of several nodes, containers or threads may write the same file, and have
    the same pid.
    """
    with new_file(path, mode) as (file, temporary):
        yield file
        file.close()
        temporary.replace(path)


def link_new(path: Path, content: bytes) -> bool:
    """Gives a name to a new file, which is whole and on the disk then, unless another has the name: of several nodes
    one gets it. Returns whether this one did. Raises OSError, as where a file has one name only."""
    with new_file(path) as (file, temporary):
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # an answer that was lost on the network: the number of names tells
            if os.stat(temporary).st_nlink != 2:
                raise
        return True


@contextmanager
def new_file(path: Path, mode: int = 0o600) -> Iterator[tuple[BinaryIO, Path]]:
    """Gives a new file to write to beside `path` and its temporary name, which it does not keep."""
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file, temporary
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Makes `text` the content of the file; surrogates of names that are not UTF-8 become the bytes that they were."""
    with replacing(path, mode) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def replace_copy(source: Path, path: Path) -> None:
    """Makes the content of another file that of the file."""
    with source.open("rb") as content, replacing(path) as file:
        shutil.copyfileobj(content, file)
