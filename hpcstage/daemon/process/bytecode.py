"""Compiles the shim where its bytecode is missing, as after an editable install: interpreters of the command start
faster.

Owns what is compiled, for the Python that runs the daemon, and where to: the package's own __pycache__, so that it is
done once, and that of the node directory, from which the command's interpreters take it. It is work for a helper; a
failure costs each interpreter some milliseconds, nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

HELPER = "bytecode"
_HEADER_BYTES = 16
_NICEST = 19


def missing(shim: Path) -> list[str]:
    """Returns the modules in a directory on the command's PYTHONPATH that its interpreters would have to compile."""
    if sys.pycache_prefix is not None:  # interpreters look for bytecode elsewhere
        return []
    return [source.name for source in sorted(shim.glob("*.py")) if not _fits(source, _compiled(source))]


def fill(shim: Path, names: Sequence[str], modules: Sequence[Path]) -> bytes:
    """Compiles these modules into `shim`, and beside the package's own `modules` if Python may write bytecode there."""
    os.nice(_NICEST)
    (shim / "__pycache__").mkdir(mode=0o700, exist_ok=True)
    for original in modules:
        if original.name in names:
            with suppress(OSError, SyntaxError):
                _fill_one(shim / original.name, original)
    return b""


def _fill_one(source: Path, original: Path) -> None:
    compiled, kept = _compiled(source), _compiled(original)
    if not _fits(source, kept) and not sys.dont_write_bytecode:
        with suppress(OSError):
            kept.parent.mkdir(exist_ok=True)
            _compile(original, kept)
    if not _fits(source, kept):
        _compile(source, compiled)
        return
    temporary = compiled.with_name(f".{compiled.name}.{os.getpid()}")
    shutil.copyfile(kept, temporary)
    temporary.replace(compiled)


def _compile(source: Path, target: Path) -> None:
    """Compiles a module atomically, as Python itself does; the bytecode is valid by the source's size and time."""
    import py_compile

    mode = py_compile.PycInvalidationMode.TIMESTAMP
    py_compile.compile(os.fspath(source), cfile=os.fspath(target), doraise=False, quiet=2, invalidation_mode=mode)


def _compiled(source: Path) -> Path:
    return Path(importlib.util.cache_from_source(os.fspath(source), optimization=""))


def _fits(source: Path, compiled: Path) -> bool:
    """Returns whether Python would take this bytecode. One that names its source by a hash was made on purpose and
    always counts as valid."""
    try:
        with compiled.open("rb") as file:
            header = file.read(_HEADER_BYTES)
        status = source.stat()
    except OSError:
        return False
    if header[:4] != importlib.util.MAGIC_NUMBER or len(header) < _HEADER_BYTES:
        return False
    now = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    said = int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:16], "little")
    return header[4:8] != bytes(4) or said == now
