"""Collects what is known of a program before it runs: from the user's options, then from an earlier run's record.

This module owns where each value is from. It is light to import, as the wrapper uses it before it starts the command.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcstage.errors import HpcstageError
from hpcstage.plan.types import Dataset, Kept
from hpcstage.preview import commandline

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.record.schema import Record
    from hpcstage.record.workload import Measured

KEYS = {"epochs": "epochs", "epoch_compute_s": "epoch_compute", "readers": "readers", "startup_s": "startup"}
"""Maps the name of a value to the option that sets it."""


@dataclass(frozen=True)
class Earlier:
    """The program and the source as the record of an earlier run with the same datasets describes them."""

    program: Measured
    source_bytes_per_s: float | None
    kept: Kept | None = None
    nodes: int = 1


def said_of_program(config: Config) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns epochs, compute, readers and start-up as far as options set them, and where each was set."""
    values = {name: getattr(config, name) for name in KEYS}
    return values, {name: config.origin[key] for name, key in KEYS.items() if values[name] is not None}


def known(
    values: Mapping[str, Any], sources: Mapping[str, str], earlier: Earlier | None, command: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """Fills in, from the command's arguments and the earlier run, the values that no option set."""
    values, sources = dict(values), dict(sources)
    of_command, where = commandline.told(command)
    for name in KEYS:
        if values.get(name) is not None:
            continue
        if name in of_command:
            values[name], sources[name] = of_command[name], where[name]
            continue
        values[name] = None if earlier is None else getattr(earlier.program, name)
        sources[name] = "default" if values[name] is None or earlier is None else earlier.program.source
    return values, sources


def find_earlier(datasets: Sequence[Dataset], env: Mapping[str, str]) -> Earlier | None:
    """Returns the last successful run on these datasets; None if there is none or its record cannot be read."""
    from hpcstage.record import files, index, workload

    run_dir = index.find(None, [os.fsdecode(d.root) for d in datasets], env)
    if run_dir is None:
        return None
    try:
        record = files.load_run(run_dir)
        typical = record.contention.typical_bytes_per_s
        return Earlier(workload.workload_of(record), typical, _kept(record), max(1, len(record.nodes)))
    except (HpcstageError, OSError, TypeError):
        return None


def _kept(record: Record) -> Kept | None:
    found = record.order
    if found.kept_share is None:
        return None
    return Kept(found.provenance, found.kept_share, record.run.id)
