"""Writes one checkpoint as a directory that has its name only when it is on the disk, and reads it back verified.

The module owns the form on the disk: `tensors`, the bytes one behind the other, and `state.json`: a line that says what
they are and has their checksums, and a line with its own. It knows no PyTorch. What writes and names passes through
`Files.call`, so that a test can end the process between any two calls.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import xxhash

from hpcstage.checkpoint.generations.files import Files
from hpcstage.errors import HpcstageError
from hpcstage.torch.checkpoints.entrynames import claimed, discard, give_name, hidden, left_behind, sync_name
from hpcstage.torch.checkpoints.hostmemory import TensorSlot, TensorSlots

FORMAT = 1
STATE, TENSORS = "state.json", "tensors"
_PIECE_BYTES = 8 << 20
"""A piece is long enough for the disk, and hashing one holds up other threads for a millisecond at most."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_NEVER_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""The errors of a file system whose files cannot be written past the page cache."""


class DamagedEntry(HpcstageError):
    """A checkpoint cannot be read as it was written; the message says which part is damaged."""


@dataclass(frozen=True)
class Piece:
    """A part of the file with its checksum."""

    offset: int
    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Description:
    """All of a checkpoint but the tensors' bytes."""

    step: int
    tree: Any
    """The state as plain JSON (`statetree`)."""
    names: tuple[str, ...]
    """The name of each tensor, for people."""
    slots: TensorSlots


@dataclass(frozen=True)
class FoundEntry:
    """A checkpoint on the disk; the bytes of its tensors are not read yet."""

    path: Path
    description: Description
    pieces: tuple[Piece, ...]


def write_entry(files: Files, path: Path, description: Description, image: memoryview) -> Path | None:
    """Writes a checkpoint, has it on the disk and gives it its name. Returns where the one is now that had the name, if
    one had: it goes when the new one was read back (`check_entry`).

    Raises OSError where the disk fails; the one of the same name is then as it was.
    """
    temporary = hidden(path)
    files.call(os.mkdir, temporary, 0o700)
    try:
        with claimed(temporary, TENSORS):
            pieces = _write_image(files, temporary / TENSORS, description.slots, image)
            files.write_new(temporary / STATE, _text(description, pieces))
            files.sync_directory(temporary)
            replaced = give_name(files, temporary, path)
    except BaseException:
        discard(files, temporary, STATE)
        raise
    sync_name(files, path)
    return replaced


def check_entry(files: Files, path: Path, replaced: Path | None) -> None:
    """Reads a checkpoint that was just written back from the disk, and removes the one that it replaced.

    Raises DamagedEntry if the disk returns other bytes; the one that it replaced has the name again then, and without
    one nothing has it.
    """
    with contextlib.nullcontext() if replaced is None else claimed(replaced, TENSORS):
        try:
            _check_written(files, path)
        except (OSError, DamagedEntry):
            _take_back(files, path, replaced)
            raise
    if replaced is not None:  # NFS removes no directory of which a file is open
        discard(files, replaced, STATE)


def find_entry(path: Path) -> FoundEntry:
    """Reads what a checkpoint holds. Raises DamagedEntry unless every byte is as it was written."""
    try:
        text, _, last = (path / STATE).read_bytes().rstrip(b"\n").rpartition(b"\n")
        if json.loads(last)["xxh3_128"] != xxhash.xxh3_128_hexdigest(text):
            raise DamagedEntry(f"its {STATE} differs from its checksum")
        return _parsed(path, json.loads(text))
    except OSError as error:
        raise DamagedEntry(f"its {STATE} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedEntry(f"its {STATE} is no description of a checkpoint") from error


def read_image(files: Files, entry: FoundEntry, image: memoryview) -> None:
    """Reads the tensors' bytes. Raises DamagedEntry that names a tensor of the first part that is damaged."""
    try:
        with _opened(files, entry.path / TENSORS, os.O_RDONLY) as fd:
            for piece in entry.pieces:
                _read_piece(files, fd, image[piece.offset : piece.offset + piece.size_bytes], piece, entry)
    except OSError as error:
        raise DamagedEntry(f"its {TENSORS} cannot be read: {error.strerror}") from error


def remove_entry(files: Files, path: Path) -> None:
    """Removes a checkpoint, which loses its name first."""
    temporary = hidden(path)
    files.call(os.rename, path, temporary)
    discard(files, temporary, STATE)


def named_or_left(path: Path) -> Path | None:
    """Returns where a checkpoint is: under its name, or, if none has the name, whole where a killed process left it."""
    if os.path.lexists(path):
        return path
    return next(filter(_has_description, left_behind(path)), None)


def settle(files: Files, path: Path) -> bool:
    """Ends what killed processes left of a checkpoint: one that is whole gets the name if none has it, and all else is
    removed. What a process that lives is writing stays. Returns whether one got the name."""
    has_named = False
    for left in left_behind(path):
        with contextlib.suppress(OSError):
            with claimed(left, TENSORS):
                if gets_name := not os.path.lexists(path) and _is_whole(files, left):
                    files.call(os.rename, left, path)
                    sync_name(files, path)
                    has_named = True
            if not gets_name:  # NFS removes no directory of which a file is open
                discard(files, left, STATE)
    return has_named


def _has_description(path: Path) -> bool:
    try:
        return bool(find_entry(path))
    except DamagedEntry:
        return False


def _is_whole(files: Files, path: Path) -> bool:
    try:
        _check_written(files, path)
    except (OSError, DamagedEntry):
        return False
    return True


def _take_back(files: Files, path: Path, replaced: Path | None) -> None:
    """Removes a checkpoint that is damaged; the one that it replaced gets the name."""
    if replaced is None:
        remove_entry(files, path)
    elif damaged := give_name(files, replaced, path):
        discard(files, damaged, STATE)
    sync_name(files, path)


def _write_image(files: Files, path: Path, slots: TensorSlots, image: memoryview) -> list[Piece]:
    """Writes the parts of the image that hold tensors, and has them on the disk."""
    made = []
    with _opened(files, path, os.O_WRONLY | os.O_CREAT) as fd:
        files.call(os.ftruncate, fd, slots.size_bytes)
        for begin, end in slots.runs():
            for offset in range(begin, end, _PIECE_BYTES):
                view = image[offset : min(offset + _PIECE_BYTES, end)]
                made.append(Piece(offset, len(view), xxhash.xxh3_128_hexdigest(view)))
                files.write(fd, view, offset)
        files.call(os.fsync, fd)
        files.call(os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_DONTNEED)  # so that reading back asks the disk
    return made


def _check_written(files: Files, path: Path) -> None:
    """Reads what was written back from the disk. Raises DamagedEntry if it differs."""
    entry = find_entry(path)
    with mmap.mmap(-1, _PIECE_BYTES) as pages, memoryview(pages) as buffer:
        with _opened(files, path / TENSORS, os.O_RDONLY) as fd:
            for piece in entry.pieces:
                with buffer[: piece.size_bytes] as view:
                    _read_piece(files, fd, view, piece, entry)


def _read_piece(files: Files, fd: int, view: memoryview, piece: Piece, entry: FoundEntry) -> None:
    if files.read_into(fd, view, piece.offset) < piece.size_bytes:
        raise DamagedEntry(f"its {TENSORS} is shorter than it was")
    if xxhash.xxh3_128_hexdigest(view) != piece.xxh3_128:
        raise DamagedEntry(f"{_names_in(entry.description, piece)} differs from its checksum")


def _names_in(description: Description, piece: Piece) -> str:
    """Names the tensors that have bytes in a piece: the first, and how many others."""
    begin, end = piece.offset, piece.offset + piece.size_bytes
    slots = zip(description.slots.slots, description.names, strict=True)
    inside = [name for slot, name in slots if slot.offset < end and slot.end > begin]
    beside = f" or one of the {len(inside) - 1} beside it" if len(inside) > 1 else ""
    return f"its tensor {inside[0] if inside else '?'}{beside}"


@contextlib.contextmanager
def _opened(files: Files, path: Path, flags: int) -> Iterator[int]:
    """Gives a descriptor that goes past the page cache where the file system can: a checkpoint is not read again soon,
    and would push out what the training reads."""
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(files.opened(path, flags | _DIRECT))
        except OSError as error:
            if error.errno not in _NEVER_DIRECT:
                raise
            fd = stack.enter_context(files.opened(path, flags))
        yield fd


def _text(description: Description, pieces: Sequence[Piece]) -> bytes:
    slots = [astuple(slot) for slot in description.slots.slots]
    body = {
        "format": FORMAT,
        "step": description.step,
        "size_bytes": description.slots.size_bytes,
        "tree": description.tree,
        "tensors": [[name, *slot] for name, slot in zip(description.names, slots, strict=True)],
        "pieces": [astuple(piece) for piece in pieces],
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    return b"%s\n%s\n" % (text, json.dumps({"xxh3_128": xxhash.xxh3_128_hexdigest(text)}).encode())


def _parsed(path: Path, body: dict[str, Any]) -> FoundEntry:
    if body["format"] != FORMAT:
        raise DamagedEntry(f"its {STATE} has a form that this version does not know")
    names = tuple(str(name) for name, *_ in body["tensors"])
    slots = tuple(TensorSlot(dtype, tuple(shape), size, offset) for _, dtype, shape, size, offset in body["tensors"])
    pieces = tuple(Piece(*piece) for piece in body["pieces"])
    described = Description(body["step"], body["tree"], names, TensorSlots(slots, body["size_bytes"]))
    return FoundEntry(path, described, pieces)
