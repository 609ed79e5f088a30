"""Patches functions of common libraries that open a file by its name in C and derive no other name from it.

A library that derives names from the one it is given (HDF5's external links, sidecar files) must never be listed: it
would look for the others in the store, and miss them without an error.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

READERS = {"cv2": ("imread",), "torch": ("from_file",)}
context: Any = None


def patch(module: Any) -> None:
    """Replaces the listed functions of a module that has just been imported."""
    for name in READERS[module.__name__]:
        setattr(module, name, _reader(getattr(module, name)))


def _reader(original: Callable[..., Any]) -> Callable[..., Any]:
    def read(filename: Any, *args: Any, **kwargs: Any) -> Any:
        writable = kwargs.get("shared", args[0] if original.__name__ == "from_file" and args else False)
        local = None if writable else context.copy_of(filename)
        return original(filename if local is None else local, *args, **kwargs)

    read.__name__ = original.__name__
    read.__doc__ = original.__doc__
    read.__wrapped__ = original  # type: ignore[attr-defined]
    return read
