"""The generations of another node, over the link to the exchange of this one.

Owns what was read and is kept for a moment: a rebuild reads block after block, and asking for each costs more than the
bytes.
"""

from __future__ import annotations

import errno

from hpcstage.checkpoint.generations.files import GenerationPart
from hpcstage.checkpoint.protection.link import ANSWER_S, GroupLink
from hpcstage.protocol.coding import MAX_PIECE_BYTES, Read, StoreAnswer

_File = tuple[int, GenerationPart]
_KEPT_PIECES = 8
_ASKED_AHEAD = 3
"""The pieces that are asked for before they are needed, where a file is read from its beginning to its end."""
_MOST_ASKED = 8


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
        self._sizes: dict[_File, int] = {}
        self._pieces: dict[tuple[_File, int], bytes] = {}
        self._coming: dict[tuple[_File, int], int] = {}
        """Pieces that were asked for, by the ids of the questions."""
        self._failed: dict[_File | None, OSError] = {}
        """Files that the node does not have: a rebuild asks for each of their blocks. None: the node does not answer,
        and is waited for once."""

    def __enter__(self) -> RemoteSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives up what was asked ahead and not needed: a few pieces of each file that was read in part."""
        self._link.forget(self._coming.values())
        self._coming.clear()
        self._pieces.clear()

    def size_bytes(self, number: int, part: GenerationPart) -> int:
        """Returns the size of a file of a generation."""
        file = number, part
        if file not in self._sizes:
            self._check(file)
            self._answer(file, self._link.ask(Read(0, self._node, self._key, number, part.value, 0, 0)))
        return self._sizes[file]

    def read_into(self, number: int, part: GenerationPart, view: memoryview, offset: int) -> int:
        """Fills the buffer from a place of a file of a generation; returns how much there was."""
        done, last = 0, (offset + len(view) - 1) // MAX_PIECE_BYTES
        while done < len(view):
            piece, within = divmod(offset + done, MAX_PIECE_BYTES)
            found = self._piece((number, part), piece, last)[within : within + len(view) - done]
            view[done : done + len(found)] = found
            done += len(found)
            if not found:
                break
        return done

    def _piece(self, file: _File, piece: int, last: int) -> bytes:
        """Returns a piece of a file that is to be read up to the last one."""
        found = self._pieces.pop((file, piece), None)
        if found is None:
            self._check(file)
            self._ask(file, piece, last)
            found = self._answer(file, self._coming.pop((file, piece))).content
            if len(self._pieces) >= _KEPT_PIECES:
                del self._pieces[next(iter(self._pieces))]
        self._pieces[file, piece] = found
        return found

    def _ask(self, file: _File, piece: int, last: int) -> None:
        """Asks for a piece and those up to the last one; for the next ones, too, if the one before was read."""
        goes_on = not piece or (file, piece - 1) in self._pieces
        ahead = max(last, piece + _ASKED_AHEAD if goes_on else piece)
        for one in range(piece, min(ahead + 1, piece + _MOST_ASKED)):
            is_there = one <= last or one * MAX_PIECE_BYTES < self._sizes.get(file, 0)
            if is_there and (file, one) not in self._pieces and (file, one) not in self._coming:
                where = file[0], file[1].value, one * MAX_PIECE_BYTES, MAX_PIECE_BYTES
                self._coming[file, one] = self._link.ask(Read(0, self._node, self._key, *where))

    def _check(self, file: _File) -> None:
        """Raises the OSError that asking would."""
        failed = self._failed.get(file) or self._failed.get(None)
        if failed is not None:
            raise OSError(failed.errno, failed.strerror)

    def _answer(self, file: _File, asked: int) -> StoreAnswer:
        try:
            answer = self._link.answer(asked, self._node, self._timeout_s)
        except OSError as error:
            if error.errno == errno.ENOENT:
                self._failed[file] = error
            elif error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH):
                self._failed[None] = error
            raise
        self._sizes[file] = answer.size_bytes
        return answer
