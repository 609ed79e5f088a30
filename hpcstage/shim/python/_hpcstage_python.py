"""The Python layer: replaces open, os.open, os.stat and their relatives by objects that look in the store first.

The layer is used where the native layer cannot be. It sees what is opened from Python, not what C libraries open by
themselves. The module owns the sequence: every original is taken before anything is replaced, and then modules that
took one earlier are swept.
"""

from __future__ import annotations

import builtins
import io
import os
import sys

import _hpcstage_calls as calls  # type: ignore[import-not-found]
import _hpcstage_context as contexts  # type: ignore[import-not-found]
import _hpcstage_paths as paths  # type: ignore[import-not-found]
import _hpcstage_ring as ring  # type: ignore[import-not-found]
import _hpcstage_slot as slots  # type: ignore[import-not-found]
import _hpcstage_want as wants  # type: ignore[import-not-found]
import _hpcstage_wire as wire  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

FUNCTION = type(lambda: None)
HEAP_TYPE = 1 << 9
"""The flag of classes that are made by Python code, and can be changed."""
UNTOUCHED = ("posix", "_io", "importlib", "zipimport", "_frozen_importlib", "_frozen_importlib_external", "_imp")
SETS = (
    "supports_dir_fd",
    "supports_fd",
    "supports_follow_symlinks",
    "supports_effective_ids",
    "supports_bytes_environ",
)


def install(config: Any, selftest: Callable[[Any], bool]) -> Any:
    """Replaces the functions; returns the slot of this process, or None (and all is as before) if the self-test
    fails."""
    slot = slots.Slot(config.page, wire.LAYER_PYTHON, config.python_version)
    slot.open()
    context = contexts.Context(config, slot, paths.Paths([config.selftest]), wants.DaemonSocket(config, slot))
    replaced = _replacements(context)
    _sweep({id(old): new for old, new in replaced})
    if not selftest(config):
        _sweep({id(new): old for old, new in replaced})
        return None
    slot.claim()
    slot.log_opens(lambda slot: ring.Log(config.node_dir, slot))
    context.use(paths.Paths(config.maps), quiet=False)
    _extend_sets(replaced)
    _watch_libraries(context)
    return slot


def _replacements(context: Any) -> list[tuple[Any, Any]]:
    pairs = [(builtins.open, calls.Open(context, builtins.open))]
    for kind, module, names in calls.BY_KIND:
        for name in names:
            original = getattr(sys.modules[module], name, None)
            if original is not None:
                pairs.append((original, kind(context, original)))
    assert io.open is builtins.open
    return pairs


def _sweep(table: dict[int, Any]) -> None:
    """Replaces originals by identity in every module that holds one, and in pathlib's accessor (up to 3.10)."""
    for name, module in list(sys.modules.items()):
        if name in UNTOUCHED or name.startswith(("_hpcstage", "importlib.")):
            continue
        space = getattr(module, "__dict__", None)
        if isinstance(space, dict):
            _swap(space, table, module)
            _sweep_members(space, table)
    _swap({"open": sys.modules["_io"].open}, table, sys.modules["_io"])  # its name in pickles from 3.12 on
    accessor = getattr(sys.modules.get("pathlib"), "_NormalAccessor", None)
    if accessor is not None:
        _swap(accessor.__dict__, table, accessor)


def _sweep_members(space: dict[str, Any], table: dict[int, Any]) -> None:
    """Replaces originals that classes of a module and the defaults of its functions hold."""
    for value in list(space.values()):
        if isinstance(value, type) and value.__flags__ & HEAP_TYPE:
            _swap(value.__dict__, table, value)
            for member in list(value.__dict__.values()):
                _sweep_defaults(member, table)
        else:
            _sweep_defaults(value, table)


def _sweep_defaults(function: Any, table: dict[int, Any]) -> None:
    if type(function) is not FUNCTION:
        return
    defaults, keywords = function.__defaults__, function.__kwdefaults__ or {}
    if defaults and any(id(value) in table for value in defaults):
        function.__defaults__ = tuple(table.get(id(value), value) for value in defaults)
    for key, value in list(keywords.items()):
        if id(value) in table:
            keywords[key] = table[id(value)]


def _swap(space: Any, table: dict[int, Any], owner: Any) -> None:
    for key, value in [(key, table[id(value)]) for key, value in list(space.items()) if id(value) in table]:
        setattr(owner, key, value)


def _extend_sets(replaced: list[tuple[Any, Any]]) -> None:
    for name in SETS:
        functions = getattr(os, name, None)
        if isinstance(functions, set):
            functions.update(new for old, new in replaced if old in functions)


def _watch_libraries(context: Any) -> None:
    import _hpcstage_imports  # type: ignore[import-not-found]
    import _hpcstage_libraries  # type: ignore[import-not-found]

    _hpcstage_libraries.context = context
    for module in _hpcstage_libraries.READERS:
        _hpcstage_imports.after_import(module, "_hpcstage_libraries")
