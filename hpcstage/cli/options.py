"""The options that commands share, made from the declarations of `hpcstage.config`. They only record what was given.

A command that is decorated gets its values by key (None: not given), ready for `hpcstage.config.load`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpcstage.config import SETTINGS, Setting, parse
from hpcstage.config.parse import Parser
from hpcstage.errors import UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_FIGURES: tuple[tuple[str, str, Parser, str, str], ...] = (
    ("--epochs", "epochs", parse.whole(1, 1_000_000), "N", "How often the program reads the dataset."),
    ("--epoch-compute", "epoch_compute_s", parse.duration(0), "DURATION",
     "How long an epoch would take if reading took no time."),
    ("--readers", "readers", parse.whole(0, 4096), "N",
     "Processes that read ahead of the training (a loader's num_workers); with 0 nothing is read ahead."),
    ("--startup", "startup_s", parse.duration(0), "DURATION", "Time from the program's start to its first read."),
    ("--source-rate", "source_bytes_per_s", parse.rate(), "SIZE",
     "Bytes of such files, with their opens, that the source gives per second."),
    ("--reader-rate", "reader_bytes_per_s", parse.rate(), "SIZE", "The same for one reader alone."),
    ("--local-rate", "local_bytes_per_s", parse.rate(), "SIZE", "The same for one reader of the local disk."),
)  # fmt: skip
"""Option, name of the figure, how it is read, metavar, help."""


_SCRIPTED = [s for s in SETTINGS if (s.is_common or s.is_planned) and s.key not in ("nodes", "elastic")]


def dataset_options(command: Decorated) -> Decorated:
    """Adds the options that `run` and `plan` take: datasets, order, local disk, copying, nodes; and
    `common_options`."""
    return _with((s for s in SETTINGS if s.is_planned), common_options(command))


def figure_options(command: Decorated) -> Decorated:
    """Adds the options by which `plan` is told the figures of its forecast, under their names in `plan.types`."""
    for flag, name, parser, metavar, text in reversed(_FIGURES):
        callback = _figure(parser)
        command = click.option(flag, name, metavar=metavar, callback=callback, help=f"For the forecast: {text}")(
            command
        )
    return command


def figures(given: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures that were told, by name."""
    return {name: given[name] for _, name, *_ in _FIGURES if given[name] is not None}


def _figure(parser: Parser) -> Callable[[click.Context, click.Parameter, str | None], object]:
    def read(_context: click.Context, parameter: click.Parameter, text: str | None) -> object:
        try:
            return None if text is None else parser(text)
        except ValueError as error:
            raise UsageError(f"{parameter.opts[0]}: {error}", f"see {parameter.opts[0]} in --help") from None

    return read


def run_options(command: Decorated) -> Decorated:
    """Adds the options that only `run` takes."""
    return _with((s for s in SETTINGS if not s.is_planned), command)


def script_options(command: Decorated) -> Decorated:
    """Adds the options that a job script passes on to `run`, and `--config`."""
    text = "Settings of the runs: this YAML file."
    return _with(_SCRIPTED, click.option("--config", metavar="FILE", help=text)(command))


def words_of(given: Mapping[str, Any]) -> list[str]:
    """Returns the options of `script_options` that were given, as words for `run`."""
    found = [] if given["config"] is None else ["--config", str(given["config"])]
    for setting in _SCRIPTED:
        value = given[setting.key]
        for one in value if setting.repeats else [value]:
            found += [] if one is None else [setting.flag, str(one)]
    return found


def all_options(command: Decorated) -> Decorated:
    """Adds all settings, and `common_options`."""
    return _with(SETTINGS, common_options(command))


def common_options(command: Decorated) -> Decorated:
    """Adds `--config`, `-v` and `-q`."""
    command = click.option("-q", "--quiet", is_flag=True, help="Print errors only.")(command)
    command = click.option("-v", "--verbose", is_flag=True, help="Also print what hpcstage decides, and why.")(command)
    text = "Read settings from this YAML file (HPCSTAGE_CONFIG)."
    return click.option("--config", metavar="FILE", help=text)(command)


def _with(settings: Iterable[Setting], command: Decorated) -> Decorated:
    for setting in reversed(list(settings)):
        command = _option(setting)(command)
    return command


def _option(setting: Setting) -> Callable[[Decorated], Decorated]:
    default = ", ".join(setting.default) if isinstance(setting.default, tuple) else setting.default
    shown = f"{setting.help}  [{setting.env}; default: {default}]" if default else f"{setting.help}  [{setting.env}]"
    if setting.is_switch:
        return click.option(f"{setting.flag}/--no-{setting.flag[2:]}", setting.key, default=None, help=shown)
    complete = _completer(setting.choices) if setting.choices else complete_path if _is_path(setting) else None
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


def _is_path(setting: Setting) -> bool:
    return setting.is_path or setting.metavar.startswith("DIR")


def complete_path(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Leaves it to the shell to complete a path."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(typed, type="file")]


def _completer(choices: tuple[str, ...]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    def complete(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(typed)]

    return complete
