"""Reads from the command's own arguments how often the program reads its data, and with how many processes. Pure.

This module knows the names that training scripts commonly use. A wrong guess costs a worse choice of `--mode auto`,
never a wrong result; hpcstage's own options (`--epochs`, `--readers`) override it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

EPOCHS = frozenset({"epochs", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs", "nb_epochs", "train_epochs"})
READERS = frozenset({"workers", "num_workers", "n_workers", "dataloader_num_workers", "data_workers"})
MOST_EPOCHS, MOST_READERS = 1_000_000, 4096


def told(command: Sequence[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Returns values by their name in the forecast, and the argument of each. The last argument of a kind counts."""
    values: dict[str, int] = {}
    sources: dict[str, str] = {}
    for name, text in _settings(command):
        key = name.lstrip("-").rpartition(".")[2].replace("-", "_").lower()
        found = _known(key, text)
        if found is not None:
            values[found[0]] = found[1]
            sources[found[0]] = f"the command's {name} {text}"
    return values, sources


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
