"""Makes the directory that goes on PYTHONPATH: the shim's files, its configuration, and what its self-test reads.

Owns the form of `config`, which the shim reads. The directory contains nothing but what is listed here, because the
program can import whatever lies on PYTHONPATH.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcstage.protocol import nodedir

SHIM = Path(__file__).resolve().parent.parent / "shim"
PYTHON = (SHIM / "python", SHIM / "torch")
"""The directories of the shim's Python modules."""
_NATIVE = "native/_hpcstage_native*.so"
SELFTEST = b"hpcstage\n"


def native_available() -> bool:
    """Returns whether the C extension was built."""
    return sys.platform == "linux" and any(SHIM.glob(_NATIVE))


def install(
    node_dir: Path,
    maps: Sequence[tuple[bytes, bytes]],
    *,
    intercept: str,
    mode: str,
    want_cap_s: float,
    sock: Path | None = None,
    virtual: tuple[str, int] | None = None,
    learn: bool = True,
) -> Path:
    """Makes `<node_dir>/shim` and returns it. `maps` holds (root or alias, directory in the store). `mode` is `stage`
    or `direct`, `intercept` one of auto, native, python and off, `sock` the socket if it is not `<node_dir>/sock`,
    `learn` whether processes announce what they will read. `virtual` is the prefix of the directories of all virtual
    nodes, and their number; a process finds its own."""
    shim = node_dir / nodedir.SHIM
    shim.mkdir(mode=0o700)
    for source in (*modules(), *SHIM.glob(_NATIVE)):
        shutil.copy2(source, shim / source.name)
    _copy_bytecode(shim)
    selftest = node_dir / "selftest" / "store"
    selftest.mkdir(parents=True, mode=0o700)
    (selftest / "probe").write_bytes(SELFTEST)
    settings = _settings(node_dir, sock or node_dir / nodedir.SOCK, want_cap_s)
    settings |= {"intercept": intercept, "mode": mode, "learn": "yes" if learn else "no"}
    if virtual is not None:
        settings |= {"virtual": virtual[0], "nodes": str(virtual[1])}
    (shim / "config").write_bytes(_config(settings, maps))
    return shim


def modules() -> list[Path]:
    """Returns the shim's Python modules, which lie side by side in the directory on PYTHONPATH."""
    return [path for directory in PYTHON for path in sorted(directory.glob("*.py")) if path.name != "__init__.py"]


def _copy_bytecode(shim: Path) -> None:
    """Copies the bytecode, which saves each process the compilation where Python may not write it. It is valid since
    the copies of the sources keep their times."""
    (shim / "__pycache__").mkdir(mode=0o700)
    for directory in PYTHON:
        for source in directory.glob("__pycache__/*.pyc"):
            if not source.name.startswith("__init__."):
                shutil.copy2(source, shim / "__pycache__" / source.name)


def _settings(node_dir: Path, sock: Path, want_cap_s: float) -> dict[str, str | Path]:
    return {
        "version": "1",
        "node_dir": node_dir,
        "sock": sock,
        "page": node_dir / nodedir.PAGE,
        "uid": str(os.geteuid()),
        "want_cap_ms": str(round(want_cap_s * 1000)),
        "selftest_source": node_dir / "selftest" / "source",
        "selftest_store": node_dir / "selftest" / "store",
    }


def _config(settings: dict[str, str | Path], maps: Sequence[tuple[bytes, bytes]]) -> bytes:
    lines = [f"{key} ".encode() + _quoted(os.fsencode(value)) for key, value in settings.items()]
    lines += [b"map " + _quoted(source) + b"\t" + _quoted(store) for source, store in maps]
    return b"".join(line + b"\n" for line in lines)


def _quoted(value: bytes) -> bytes:
    for char, code in ((b"%", b"%25"), (b"\n", b"%0A"), (b"\t", b"%09"), (b"\r", b"%0D")):
        value = value.replace(char, code)
    return value
