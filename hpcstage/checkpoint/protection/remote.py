"""The generations of another node, over the link to the exchange of this one.

Owns what was read and is kept for a moment: a rebuild reads block after block, and asking for each costs more than the
bytes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import TypeVar

from hpcstage.checkpoint.generations.files import GenerationPart
from hpcstage.checkpoint.protection.link import ANSWER_S, GroupLink
from hpcstage.protocol.coding import MAX_PIECE_BYTES

_T = TypeVar("_T")
_KEPT_PIECES = 8
_ASKED_AHEAD = 3
"""The pieces that are asked for before they are needed, where a file is read from its beginning to its end."""


class RemoteSource:
    """The generations of a node as its exchange gives them: a `BlockSource`, so that what works on a local directory
    works on another node's.

    Files of a generation never change, so what was read is kept for a while; a source serves one restore or rebuild.
    Raises OSError where the node cannot be asked, which counts as damage there, and LinkLost if the exchange of this
    node has gone, which ends the work.
    """

    def __init__(self, link: GroupLink, node: int, key: str, timeout_s: float = ANSWER_S) -> None:
        self._link = link
        self._node = node
        self._key = key
        self._timeout_s = timeout_s
        self._sizes: dict[tuple[int, GenerationPart], int] = {}
        self._pieces: dict[tuple[int, GenerationPart, int], bytes] = {}
        self._coming: dict[tuple[int, GenerationPart, int], int] = {}
        """Questions that were asked ahead."""
        self._missing: dict[tuple[int, GenerationPart], OSError] = {}
        """Files that the node does not have; a rebuild asks for each of their blocks."""
        self._unreachable: OSError | None = None

    def __enter__(self) -> RemoteSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives up what was asked ahead and not needed: a few pieces of each file that was read in part."""
        self._link.forget(self._coming.values())
        self._coming.clear()
        self._pieces.clear()

    def numbers(self) -> Sequence[int]:
        """Returns the committed generations, oldest first."""
        return self._asked(lambda: self._link.list(self._node, self._key, self._timeout_s))

    def size_bytes(self, number: int, part: GenerationPart) -> int:
        """Returns the size of a file of a generation."""
        return self._asked_of(number, part, lambda: self._size(number, part))

    def read_into(self, number: int, part: GenerationPart, view: memoryview, offset: int) -> int:
        """Fills the buffer from a place of a file of a generation; returns how much there was."""
        if len(view) >= MAX_PIECE_BYTES:
            where = self._node, self._key, number, part, offset, len(view)
            content = self._asked_of(number, part, lambda: self._link.read(*where, self._timeout_s))
            view[: len(content)] = content
            return len(content)
        done = 0
        while done < len(view):
            piece, within = divmod(offset + done, MAX_PIECE_BYTES)
            found = self._piece(number, part, piece)[within : within + len(view) - done]
            view[done : done + len(found)] = found
            done += len(found)
            if not found:
                break
        return done

    def _piece(self, number: int, part: GenerationPart, piece: int) -> bytes:
        key = number, part, piece
        found = self._pieces.pop(key, None)
        if found is None:
            found = self._asked_of(number, part, lambda: self._fetched(number, part, piece))
            if len(self._pieces) >= _KEPT_PIECES:
                del self._pieces[next(iter(self._pieces))]
        self._pieces[key] = found
        return found

    def _fetched(self, number: int, part: GenerationPart, piece: int) -> bytes:
        """Returns a piece; asks for the next ones first if the one before was read, too."""
        asked = self._coming.pop((number, part, piece), None)
        if asked is None:
            asked = self._ask(number, part, piece)
        if piece == 0 or (number, part, piece - 1) in self._pieces:
            for ahead in range(piece + 1, piece + 1 + _ASKED_AHEAD):
                if (number, part, ahead) not in self._coming and ahead * MAX_PIECE_BYTES < self._size(number, part):
                    self._coming[number, part, ahead] = self._ask(number, part, ahead)
        return self._link.answer(asked, self._node, self._timeout_s)

    def _ask(self, number: int, part: GenerationPart, piece: int) -> int:
        return self._link.ask(self._node, self._key, number, part, piece * MAX_PIECE_BYTES, MAX_PIECE_BYTES)

    def _size(self, number: int, part: GenerationPart) -> int:
        if (number, part) not in self._sizes:
            where = self._node, self._key, number, part
            self._sizes[number, part] = self._link.size_bytes(*where, self._timeout_s)
        return self._sizes[number, part]

    def _asked_of(self, number: int, part: GenerationPart, ask: Callable[[], _T]) -> _T:
        """Asks about a file, unless the node does not have it."""
        if (missing := self._missing.get((number, part))) is not None:
            raise OSError(missing.errno, missing.strerror)
        try:
            return self._asked(ask)
        except OSError as error:
            if error.errno == errno.ENOENT:
                self._missing[number, part] = error
            raise

    def _asked(self, ask: Callable[[], _T]) -> _T:
        """Asks, unless the node did not answer before: a node that is lost is waited for once."""
        if self._unreachable is not None:
            raise OSError(self._unreachable.errno, self._unreachable.strerror)
        try:
            return ask()
        except OSError as error:
            if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH):
                self._unreachable = error
            raise
