"""Builds the C extensions where a compiler is at hand. Owns nothing else: the metadata is in pyproject.toml.

All extensions are optional: without a compiler the package installs without them, and their Python forms are used.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup

FLAGS = [
    "-std=gnu11",
    "-O2",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
]
LINK_FLAGS = ["-Wl,-z,now", "-Wl,-z,relro"]  # bound at load: a hook may run where the lazy binder must not
SHIM = Path("hpcstage/shim")
PUBLISH = "hpcstage/daemon/_publish.h"


def extension(name: str, sources: list[str], depends: list[str] | None = None) -> Extension:
    """One extension for every Python from its limited API on, left out if it cannot be built."""
    return Extension(
        name,
        sources,
        depends=depends or [],
        extra_compile_args=FLAGS,
        extra_link_args=LINK_FLAGS,
        py_limited_api=True,
        optional=True,
    )


setup(
    ext_modules=[
        extension(
            "hpcstage.shim._hpcstage_native",
            sorted(str(p) for p in SHIM.glob("*.c")),
            sorted(str(p) for p in SHIM.glob("*.h")),
        ),
        extension("hpcstage.daemon._copy", ["hpcstage/daemon/_copy.c"], [PUBLISH]),
        extension("hpcstage.group._files", ["hpcstage/group/_files.c"], [PUBLISH]),
    ]
)
