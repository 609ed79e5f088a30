"""Keeps audit events of the Python layer from the program's hooks: they get the events that they would get without us.

The module owns which functions of ours raise events. Until the program adds its first hook it does nothing, and no open
pays for it. It cannot reach a hook that was added in C, or before the shim was attached: such a hook also gets our
events, which name copies and files of the node directory.
"""

from __future__ import annotations

import sys
from _thread import _local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RAISERS = {
    "_hpcstage_attributes": ("_open", "mapped"),
    "_hpcstage_context": ("_open",),
    "_hpcstage_copies": ("_open", "_fcntl", "_listdir"),
    "_hpcstage_paths": ("_open",),
    "_hpcstage_ring": ("_open", "_unlink", "mapped"),
    "_hpcstage_slot": ("_open", "_lock"),
    "_hpcstage_want": ("_open", "_unlink", "_rename", "_new_socket", "_connect", "sleep"),
}
IMPORTED_LATE = ("_ctypes", "_socket", "fcntl", "mmap", "struct", "time")
"""The shim imports these when it first needs them: an import is an event."""
_listens = False


class _Thread(_local):
    ours = False


_thread = _Thread()


def listen() -> None:
    """Keeps our functions from hooks from now on; called before the program's first hook is added."""
    global _listens
    if _listens:
        return
    _listens = True
    for name in IMPORTED_LATE:
        try:
            __import__(name)
        except ImportError:
            pass
    for name, functions in RAISERS.items():
        for function in functions:
            setattr(sys.modules[name], function, _Unheard(getattr(sys.modules[name], function)))


class Hook:
    """Stands in for a hook of the program, and passes on what is not ours."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not _thread.ours:
            self._hook(event, arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)


class _Unheard:
    """Stands in for a function of ours, whose events the program's hooks do not get."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _thread.ours = True
        try:
            return self._function(*args, **kwargs)
        finally:
            _thread.ours = False
