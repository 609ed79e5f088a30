"""Builds the C extensions where a compiler is at hand, and puts the pages that explain the report and the job
scripts into the package. Owns nothing else: the metadata is in pyproject.toml.

All extensions are optional: without a compiler the package installs without them, and their Python forms are used.
Where the variable HPCSTAGE_REQUIRE_NATIVE is set, as in CI, an extension that cannot be built is an error. They
keep to the limited API, so that one wheel serves every Python from the oldest that is supported on. A free-threaded
Python has no limited API, and would run with its lock as soon as it imports an extension that does not say that it
needs none: there the Python forms are used.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

FLAGS = [
    "-std=gnu11",
    "-O2",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
]
MOST_FRAME_BYTES = 512
"""Of a function that a redirected call may run: it is called on stacks of 8 kB, and calls nest."""
LINK_FLAGS = ["-Wl,-z,now", "-Wl,-z,relro"]  # bound at load: a hook may run where the lazy binder must not
NATIVE = Path("hpcstage/shim/native")
PUBLISH = "hpcstage/store/_publish.h"
OLDEST = "cp310"
"""As `requires-python` says. The shim's extension is built for older ones: programs may run another Python."""
IS_REQUIRED = bool(os.environ.get("HPCSTAGE_REQUIRE_NATIVE"))
HAS_LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")


def extension(name: str, sources: list[str], depends: list[str], *flags: str) -> Extension:
    """One extension for every Python from its limited API on, left out if it cannot be built and need not be."""
    return Extension(
        name,
        sources,
        depends=depends,
        extra_compile_args=[*FLAGS, *flags, *(["-Werror"] if IS_REQUIRED else [])],
        extra_link_args=LINK_FLAGS,
        py_limited_api=True,
        optional=not IS_REQUIRED,
    )


EXTENSIONS = [
    extension(
        "hpcstage.shim.native._hpcstage_native",
        sorted(str(p) for p in NATIVE.glob("*.c")),
        sorted(str(p) for p in NATIVE.glob("*.h")),
        f"-Wframe-larger-than={MOST_FRAME_BYTES}",
    ),
    extension("hpcstage.store._copy", ["hpcstage/store/_copy.c"], [PUBLISH]),
    extension("hpcstage.store._files", ["hpcstage/store/_files.c"], [PUBLISH]),
]


class WithPages(build_py):
    """Copies the pages that explain the report, and the job scripts, into the package: what is installed finds them
    there."""

    def run(self) -> None:
        """Builds; nothing is copied into a clone that is installed in place, which has both."""
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "hpcstage"
            for name in ("report.md", "notes.md"):
                shutil.copyfile(f"docs/{name}", package / "report" / name)
            shutil.copytree("jobscripts", package / "jobscripts", dirs_exist_ok=True)


setup(
    cmdclass={"build_py": WithPages},
    ext_modules=EXTENSIONS if HAS_LIMITED_API else [],
    options={"bdist_wheel": {"py_limited_api": OLDEST}} if HAS_LIMITED_API else {},
)
