"""The Python layer: replaces open and os.open by objects that look in the store first, and what must agree with them.

The layer is used where the native layer cannot be. It sees what is opened from Python, not what C libraries open by
themselves. The module owns the sequence: every original is taken before anything is replaced, and then modules that
took one earlier are swept.
"""

from __future__ import annotations

import os
import sys

import _hpcstage_calls as calls  # type: ignore[import-not-found]
import _hpcstage_daemon as daemon  # type: ignore[import-not-found]
import _hpcstage_paths as paths  # type: ignore[import-not-found]
import _hpcstage_slot as slots  # type: ignore[import-not-found]
import _hpcstage_wire as wire  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

HEAP_TYPE = 1 << 9
"""The flag of classes that are made by Python code, and can be changed."""


def install(config: Any, selftest: Callable[[Any], bool]) -> Any:
    """Replaces the functions; returns the slot of this process, or None (and all is as before) if the self-test
    fails."""
    slot = slots.Slot(config.page, wire.LAYER_PYTHON, config.python_version)
    slot.open()
    hook = calls.Hook(slot, paths.Paths([config.selftest]), daemon.DaemonSocket(config, slot))
    replaced = {}
    for kind, module, names in calls.BY_KIND:
        for original in (getattr(sys.modules[module], name, None) for name in names):
            if original is not None:
                replaced[id(original)] = kind(hook, original)
    _sweep(replaced)
    if not selftest(config):
        _sweep({id(call): call.original for call in replaced.values()})
        return None
    slot.claim()
    hook.paths = paths.Paths(config.maps)
    hook.quiet = False
    for supports in list(vars(os).values()):
        if isinstance(supports, set):
            supports.update([call for call in replaced.values() if call.original in supports])
    return slot


def _sweep(table: dict[int, Any]) -> None:
    """Replaces originals by identity in every module, and in its classes, but not where the import system has them."""
    for name, module in list(sys.modules.items()):
        if name != "posix" and not name.startswith("_hpcstage") and isinstance(getattr(module, "__dict__", None), dict):
            _swap(module, table)
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__flags__ & HEAP_TYPE:
                    _swap(value, table)


def _swap(owner: Any, table: dict[int, Any]) -> None:
    for key, value in list(vars(owner).items()):
        if id(value) in table:
            setattr(owner, key, table[id(value)])
