"""The options that commands share, made from the declarations of `hpcstage.config`. They only record what was given.

A command that is decorated gets its values by key (None: not given), ready for `hpcstage.config.load`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from hpcstage.config import SETTINGS, Setting

Command = TypeVar("Command", bound=Callable[..., Any])

_SAMPLER: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--sampler",), {"type": click.Choice(["sequential", "random", "distributed"]),
                      "help": "With --order sampler: PyTorch's sampler of the program to come; its exact order is "
                              "computed. random is a DataLoader with shuffle=True and a generator of its own."}),
    (("--seed",), {"type": int, "help": "Of the DistributedSampler, or of the loader's generator (default 0)."}),
    (("--ranks",), {"type": click.IntRange(min=1), "help": "Training processes of the job (num_replicas)."}),
    (("--rank",), {"metavar": "N[-M][,...]", "help": "Those on the node, such as 0-3 (default: all)."}),
    (("--batch",), {"type": click.IntRange(min=1), "help": "The loader's batch_size; matters with --drop-last."}),
    (("--drop-last",), {"is_flag": True, "help": "The loader has drop_last=True."}),
    (("--sampler-drop-last",), {"is_flag": True, "help": "The DistributedSampler has drop_last=True."}),
    (("--no-shuffle",), {"is_flag": True, "help": "The DistributedSampler has shuffle=False."}),
    (("--persistent-workers",), {"is_flag": True, "help": "The loader has persistent_workers=True."}),
)  # fmt: skip


_SHARED = frozenset({"dataset", "disk", "copy", "nodes", "workload"})


def dataset_options(command: Command) -> Command:
    """Adds the options that `run` and `plan` take: datasets, order, local disk, copying, nodes, workload; and
    `common_options`."""
    return _with((s for s in SETTINGS if s.group in _SHARED), common_options(command))


def sampler_options(command: Command) -> Command:
    """Adds the options by which `plan` is told the sampler of a program to come; `cli.samplers` reads them."""
    for names, how in reversed(_SAMPLER):
        command = click.option(*names, **how)(command)
    return command


def run_options(command: Command) -> Command:
    """Adds the options that only `run` takes."""
    return _with((s for s in SETTINGS if s.group not in _SHARED), command)


def all_options(command: Command) -> Command:
    """Adds all settings, and `common_options`."""
    return _with(SETTINGS, common_options(command))


def common_options(command: Command) -> Command:
    """Adds `--config`, `-v` and `-q`."""
    command = click.option("-q", "--quiet", is_flag=True, help="Print errors only.")(command)
    command = click.option("-v", "--verbose", is_flag=True, help="Also print what hpcstage decides, and why.")(command)
    text = "Read settings from this YAML file (HPCSTAGE_CONFIG)."
    return click.option("--config", metavar="FILE", help=text)(command)


def _with(settings: Iterable[Setting], command: Command) -> Command:
    for setting in reversed(list(settings)):
        command = _option(setting)(command)
    return command


def _option(setting: Setting) -> Callable[[Command], Command]:
    default = ", ".join(setting.default) if isinstance(setting.default, tuple) else setting.default
    shown = f"{setting.help}  [{setting.env}; default: {default}]" if default else f"{setting.help}  [{setting.env}]"
    if setting.is_switch:
        return click.option(f"{setting.flag}/--no-{setting.flag[2:]}", setting.key, default=None, help=shown)
    complete = _completer(setting.choices) if setting.choices else None
    # The value stays text: `load` checks it in the same way wherever it comes from. No default: None is "not given".
    return click.option(
        setting.flag,
        setting.key,
        type=click.STRING,
        metavar=setting.metavar,
        multiple=setting.repeats,
        shell_complete=complete,
        help=shown,
    )


def _completer(choices: tuple[str, ...]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    def complete(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(typed)]

    return complete
