"""Maps the page into memory of this process, with no descriptor that stays open.

`mmap` of Python 3.8 to 3.12 keeps the file open under the lowest number that is free, which the program's next open
would have got. So the module calls the C library there; where that cannot be, it uses `mmap` all the same.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PYBUF_WRITE = 0x200
NO_MEMORY = (1 << 64) - 1, (1 << 32) - 1
_kept: list[Any] = []
"""Mappings stay: the end of one that holds a descriptor closes a number that may be that of a file of the program."""
_libc: Any = None


def mapped(fd: int, size: int) -> memoryview:
    """Returns the first bytes of an open file, shared. Raises OSError or ValueError where that cannot be."""
    import mmap

    if sys.version_info >= (3, 13):
        _kept.append(mmap.mmap(fd, size, trackfd=False))
        return memoryview(_kept[-1])
    try:
        libc = _functions()
    except Exception:  # an interpreter without ctypes, or one that does not let it into this subinterpreter
        _kept.append(mmap.mmap(fd, size))
        return memoryview(_kept[-1])
    address = libc[0](None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address is None or address in NO_MEMORY:
        raise OSError("the file cannot be mapped")
    view: memoryview = libc[1](address, size, PYBUF_WRITE)
    return view


def _functions() -> Any:
    """Returns mmap and PyMemoryView_FromMemory, without `ctypes`: its own imports take milliseconds."""
    global _libc
    if _libc is None:
        from _ctypes import FUNCFLAG_CDECL, FUNCFLAG_PYTHONAPI, CFuncPtr, _SimpleCData, dlopen, dlsym

        types = {code: type(code, (_SimpleCData,), {"_type_": code}) for code in "PLliO"}
        space = dlopen(None, 0)  # type: ignore[arg-type]

        def function(name: str, flags: int, result: str, arguments: str) -> Any:
            kind = type(name, (CFuncPtr,), {"_flags_": flags, "_restype_": types[result]})
            made = kind(dlsym(space, name))
            made.argtypes = [types[code] for code in arguments]
            return made

        _libc = (
            function("mmap", FUNCFLAG_CDECL, "P", "PLiiil"),
            function("PyMemoryView_FromMemory", FUNCFLAG_CDECL | FUNCFLAG_PYTHONAPI, "O", "Pli"),
        )
    return _libc
