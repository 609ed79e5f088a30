"""Collects what is known of a program before it runs: from the user's options, from the command's own arguments, and
from an earlier run's record, in this sequence.

This module owns where each value is from, and the names that training scripts commonly give their arguments. A wrong
guess costs a worse choice of `--mode auto`, never a wrong result. It is light to import, as the wrapper uses it before
it starts the command.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcstage.errors import HpcstageError
from hpcstage.plan.types import Dataset

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.record.workload import Measured

OPTIONS = {"epochs": "epochs", "epoch_compute_s": "epoch_compute", "readers": "readers", "startup_s": "startup"}
"""Maps the name of a value to the option that sets it."""
EPOCHS = frozenset({"epochs", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs", "nb_epochs", "train_epochs"})
READERS = frozenset({"workers", "num_workers", "n_workers", "dataloader_num_workers", "data_workers"})
MOST_EPOCHS, MOST_READERS = 1_000_000, 4096


@dataclass(frozen=True)
class KnownProgram:
    """The values of a program that the forecast needs, as in `Workload`; None is unknown."""

    epochs: int | None = None
    epoch_compute_s: float | None = None
    readers: int | None = None
    startup_s: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each value comes from."""


@dataclass(frozen=True)
class Earlier:
    """The program and the source as the record of an earlier run with the same datasets describes them."""

    program: Measured
    source_bytes_per_s: float | None
    nodes: int = 1


def asked(config: Config) -> KnownProgram:
    """Returns the values that options set."""
    values = {name: getattr(config, name) for name in OPTIONS}
    sources = {name: config.origin[key] for name, key in OPTIONS.items() if values[name] is not None}
    return KnownProgram(**values, sources=sources)


def known(said: KnownProgram, earlier: Earlier | None, command: Sequence[str] = ()) -> KnownProgram:
    """Fills in, from the command's arguments and the earlier run, the values that no option set."""
    values, sources = dict[str, float | None](), dict(said.sources)
    of_command = of_arguments(command)
    for name in OPTIONS:
        values[name] = getattr(said, name)
        if values[name] is None and name in of_command.sources:
            values[name], sources[name] = getattr(of_command, name), of_command.sources[name]
        elif values[name] is None:
            values[name] = None if earlier is None else getattr(earlier.program, name)
            sources[name] = "default" if values[name] is None or earlier is None else earlier.program.source
    return KnownProgram(**values, sources=sources)  # type: ignore[arg-type]


# ---- the command's own arguments


def of_arguments(command: Sequence[str]) -> KnownProgram:
    """Returns how often the program reads its data, and with how many processes, if its arguments say it. The last
    argument of a kind counts."""
    values: dict[str, int] = {}
    sources: dict[str, str] = {}
    for name, text in _settings(command):
        key = name.lstrip("-").rpartition(".")[2].replace("-", "_").lower()
        found = _known(key, text)
        if found is not None:
            values[found[0]] = found[1]
            sources[found[0]] = f"the command's {name} {text}"
    return KnownProgram(epochs=values.get("epochs"), readers=values.get("readers"), sources=sources)


def _known(key: str, text: str) -> tuple[str, int] | None:
    if not (text.isascii() and text.isdigit()):
        return None
    number = int(text)
    if key in EPOCHS and 1 <= number <= MOST_EPOCHS:
        return "epochs", number
    if key in READERS and number <= MOST_READERS:
        return "readers", number
    return None


def _settings(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields name and value of `--name value`, `--name=value` and `name=value`."""
    for at, word in enumerate(command):
        name, equals, value = word.partition("=")
        if equals:
            yield name, value
        elif word.startswith("--") and at + 1 < len(command):
            yield word, command[at + 1]


# ---- the earlier run


def find_earlier(datasets: Sequence[Dataset], env: Mapping[str, str]) -> Earlier | None:
    """Returns the last successful run on these datasets; None if there is none or its record cannot be read."""
    from hpcstage.record import files, index, workload

    try:
        run_dir = index.find(None, [os.fsdecode(d.root) for d in datasets], env)
        if run_dir is None:
            return None
        record = files.load_run(run_dir)
        typical = record.contention.typical_bytes_per_s
        return Earlier(workload.workload_of(record), typical, max(1, len(record.nodes)))
    except (HpcstageError, OSError, TypeError, ValueError, LookupError, AttributeError):
        return None
