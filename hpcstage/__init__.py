"""hpcstage: one word before a training command makes the disk inside each compute node work for the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from hpcstage.record.schema import Record

__version__ = "0.1.0"
__all__ = ["__version__", "load_run", "order"]


def order(paths: Iterable[str | bytes | os.PathLike[str]]) -> bool:
    """Announces the files that this program will read, in this order. Returns True if a daemon of `hpcstage run` took
    it.

    The function does nothing outside of `hpcstage run`, so it may stay in the program.
    """
    from hpcstage.announce import order as announce

    return announce(paths)


def load_run(run: str | os.PathLike[str]) -> Record:
    """Returns the record of a run: of a run directory, its run.json, a run's id or a job's. Raises
    `hpcstage.errors.NoResult`.

    Its fields are those of `hpcstage report --json`; its `to_frames()` makes tables for pandas of it.
    """
    import os
    from pathlib import Path

    from hpcstage.record import files, runs

    return files.load_run(runs.named_run(Path(run), os.environ, Path.cwd()))
