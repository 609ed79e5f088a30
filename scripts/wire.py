#!/usr/bin/env python3
"""Writes the shim's two copies of the numbers in hpcstage/protocol, shim.py and arriving.py: for its C and its Python.

A copy holds what the shim's sources of that language name, that for C all counters besides, as some are found by their
place beside another. So a new number is first used there, then copied by running this script. A test compares the
copies with what it would write.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from enum import IntEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hpcstage.protocol import arriving, shim  # noqa: E402

SHIM = ROOT / "hpcstage" / "shim"
HEADER, MODULE = SHIM / "native" / "_native_wire.h", SHIM / "python" / "_hpcstage_wire.py"
GROUPS = {"KIND": shim.Kind, "ANSWER": shim.Answer, "REASON": shim.Reason, "LAYER": shim.Layer, "STATE": shim.State,
          "COUNTER": shim.Counter, "STRIPE": arriving.StripeState}  # fmt: skip
FUNCTION = shim.bucket_of_ns
"""A function that the shim's Python needs, too."""
LARGEST = 2**31 - 1
"""The largest number that may stand in an enumeration of C."""


def numbers() -> dict[str, int]:
    """Returns all numbers of the protocol by the shim's names for them, in the protocol's order."""
    found: dict[str, int] = {}
    for name, value in (*vars(shim).items(), *vars(arriving).items()):
        if isinstance(value, type) and issubclass(value, IntEnum) and value in GROUPS.values():
            group = next(group for group, members in GROUPS.items() if members is value)
            found |= {f"{group}_{member.name}": int(member) for member in value}
        elif name.isupper() and type(value) is int:
            found[name] = value
    return found


def used(*texts: str) -> dict[str, int]:
    """Returns the numbers that texts name."""
    named = {word for text in texts for word in re.findall(r"\b[A-Z][A-Z0-9_]+\b", text)}
    return {name: value for name, value in numbers().items() if name in named}


def header() -> str:
    """Returns the header for C."""
    sources = (*SHIM.glob("native/*.c"), SHIM / "native" / "_native.h")
    found = used(*(path.read_text() for path in sources), *(f"COUNTER_{counter.name}" for counter in shim.Counter))
    pairs = " ".join(f"X({name},@{value})" for name, value in found.items() if value <= LARGEST)
    rows = [line.replace("@", " ") for line in textwrap.wrap(pairs, 112, break_on_hyphens=False)]
    large = [f"#define {name} 0x{value:016x}ull" for name, value in found.items() if value > LARGEST]
    return "\n".join(
        [
            "/* Written by scripts/wire.py from hpcstage/protocol. */",
            "#ifndef HPCSTAGE_NATIVE_WIRE_H",
            "#define HPCSTAGE_NATIVE_WIRE_H",
            "",
            "#define WIRE(X) \\",
            " \\\n".join(f"    {row}" for row in rows),
            "",
            "#define WIRE_ENUM(name, value) name = value,",
            "enum wire { WIRE(WIRE_ENUM) };",
            "#undef WIRE_ENUM",
            "",
            *large,
            "",
            "#endif",
            "",
        ]
    )


def module() -> str:
    """Returns the module for the shim's Python; a magic number is the bytes at the beginning of its file there."""
    function = inspect.getsource(FUNCTION)
    sources = [path for place in ("python", "torch") for path in SHIM.glob(f"{place}/*.py") if path != MODULE]
    found = used(function, *(path.read_text() for path in sources))
    lines = [f"{name} = {_spelt(name, value)}" for name, value in found.items()]
    about = "Holds the numbers of hpcstage/protocol that the shim's Python needs. Written by scripts/wire.py."
    return "\n".join([f'"""{about}"""', "", "from __future__ import annotations", "", *lines, "", "", function])


def _spelt(name: str, value: int) -> str:
    if name.endswith("_MAGIC"):
        return '"'.join(("b", value.to_bytes(8, "little").decode("ascii"), ""))
    return str(value) if value <= LARGEST else f"0x{value:016X}"


if __name__ == "__main__":
    HEADER.write_text(header())
    MODULE.write_text(module())
