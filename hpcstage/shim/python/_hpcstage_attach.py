"""Attaches the shim to this process: reads the configuration beside it and takes the first layer that works.

The module owns the choice of the layer, and `active`: the counters of this process, for code that measures more (the
hook on PyTorch's loader). It imports little, because every Python below `hpcstage run` pays for it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PROBE = b"hpcstage\n"
LAYERS = {"auto": ("native", "python"), "native": ("native",), "python": ("python",)}

active: Any = None
"""The counters, with count(counter, value) and loader_step(begin_ns, end_ns, workers); None if not attached."""
layer = "none"
settings: Any = None
"""The configuration; None until the shim is attached."""


def attach(here: str) -> None:
    """Attaches by the configuration in `here`. Raises where it cannot; the caller swallows that."""
    global active, layer, settings
    if active is not None:
        return
    config = ShimConfig(here)
    if config.uid != os.geteuid():
        return
    if config.virtual:
        config = _own_node(config)
    elif "HPCSTAGE_SOCKET" in os.environ:
        os.environ["HPCSTAGE_SOCKET"] = os.fsdecode(config.sock)  # the variable may name the first node's socket
    for name in LAYERS.get(config.intercept, ()):
        active = _try(name, config)
        if active is not None:
            layer = name
            break
    else:
        active = _count_only(config)
        layer = "direct"
    if active is not None:
        settings = config
        _follow(active)


class ShimConfig:
    """Reads the file `config`: lines of key and value, `map SOURCE<TAB>STORE` once per root and alias; bytes
    throughout."""

    def __init__(self, here: str) -> None:
        self.maps: list[tuple[bytes, bytes]] = []
        values: dict[bytes, bytes] = {}
        with open(os.path.join(here, "config"), "rb") as file:
            for line in file.read().split(b"\n"):
                key, _, value = line.partition(b" ")
                if key == b"map":
                    source, _, store = value.partition(b"\t")
                    self.maps.append((_plain(source), _plain(store)))
                elif key:
                    values[key] = _plain(value)
        if values[b"version"] != b"1":
            raise ValueError("a configuration of another version")
        self.intercept = values[b"intercept"].decode()
        self.direct = values[b"mode"] == b"direct"
        self.virtual = values.get(b"virtual", b"")
        self.nodes = int(values.get(b"nodes", b"1"))
        self.announces = values.get(b"announce") != b"no"
        self.node_dir = values[b"node_dir"]
        self.sock = values[b"sock"]
        self.page = values[b"page"]
        self.uid = int(values[b"uid"])
        self.request_cap_ms = int(values[b"request_cap_ms"])
        self.selftest = (values[b"selftest_source"], values[b"selftest_store"])
        self.python_version = sys.version_info[0] << 8 | sys.version_info[1]


def _own_node(config: ShimConfig) -> ShimConfig:
    """Returns the configuration of the virtual node that this process is on, where several are on this machine."""
    import _hpcstage_rank  # type: ignore[import-not-found]

    node = _hpcstage_rank.node_of(os.environ, config.nodes)
    node_dir = config.virtual + str(node).encode()
    if node_dir == config.node_dir:
        return config
    own = ShimConfig(os.fsdecode(node_dir + b"/shim"))
    _hpcstage_rank.tell(os.environ, own.node_dir, own.sock)
    return own


def _plain(value: bytes) -> bytes:
    if b"%" not in value:
        return value
    for code, char in ((b"%0A", b"\n"), (b"%09", b"\t"), (b"%0D", b"\r"), (b"%25", b"%")):
        value = value.replace(code, char)
    return value


def _try(name: str, config: ShimConfig) -> Any:
    try:
        return _native(config) if name == "native" else _python(config)
    except Exception:
        return None


def _native(config: ShimConfig) -> Any:
    if "t" in getattr(sys, "abiflags", ""):
        return None  # a free-threaded build has another ABI
    import _hpcstage_native as native  # type: ignore[import-not-found]

    if native.serves():  # another interpreter of this process has installed it for all
        return native
    maps = [(source, store, False) for source, store in config.maps]
    maps.append((*config.selftest, True))
    native.install(
        maps,
        config.sock,
        config.page,
        config.node_dir,
        config.uid,
        config.request_cap_ms,
        config.direct,
        config.python_version,
    )
    works = _selftest(config, stats=True)
    native.withdraw(works)
    if works:
        _at_exit(native.finish)
    return native if works else None


def _python(config: ShimConfig) -> Any:
    import _hpcstage_python  # type: ignore[import-not-found]

    slot = _hpcstage_python.install(config, _selftest)
    if slot is not None:
        _at_exit(slot.finish)
    return slot


def _count_only(config: ShimConfig) -> Any:
    import _hpcstage_slot  # type: ignore[import-not-found]
    import _hpcstage_wire as wire  # type: ignore[import-not-found]

    slot = _hpcstage_slot.Slot(config.page, wire.LAYER_DIRECT, config.python_version)
    _at_exit(slot.finish)
    return slot


def _at_exit(finish: Any) -> None:
    import atexit

    atexit.register(finish)


def _selftest(config: ShimConfig, stats: bool = False) -> bool:
    """Returns whether a file that is only in a store is found under its source's name, by open, and by stat if that
    looks there."""
    name = config.selftest[0] + b"/probe"
    try:
        size = os.stat(name).st_size if stats else len(PROBE)
        fd = os.open(name, os.O_RDONLY)
    except OSError:
        return False
    try:
        return size == len(PROBE) and os.read(fd, len(PROBE) + 1) == PROBE
    finally:
        os.close(fd)


def _follow(counters: Any) -> None:
    """Gives children by fork a slot of their own, and has PyTorch's loader measured once it is imported."""
    import _hpcstage_imports  # type: ignore[import-not-found]

    counters.claim()
    os.register_at_fork(after_in_child=counters.claim)
    _hpcstage_imports.after_import("torch.utils.data.dataloader", "_hpcstage_torch")
