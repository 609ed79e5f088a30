"""Runs the command without hpcstage: it is switched off, nested, or cannot stage."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcstage.errors import CommandNotExecutable, CommandNotFound, ConfigError

if TYPE_CHECKING:
    from hpcstage.wrapper.outdir import NamedDirectory

IGNORED_BY_PYTHON = [signal.SIGPIPE, signal.SIGXFSZ]
"""The interpreter ignores these, and commands do not: `yes | head` would report an error."""


def passes_through(env: Mapping[str, str]) -> bool:
    """Returns whether the user switched hpcstage off, or an outer `hpcstage run` already serves this command."""
    if env.get("HPCSTAGE_DISABLE", "") not in ("", "0"):
        return True
    if not env.get("HPCSTAGE_ACTIVE"):
        return False
    from hpcstage.wrapper import outer

    return outer.serves(env)


def directories_without_us(given: Mapping[str, Any], env: Mapping[str, str]) -> Mapping[NamedDirectory, str]:
    """Returns the directories of `--out` and `--checkpoint` for a command that runs without hpcstage; none where no
    option, variable or file may name one, which is seen at no cost."""
    from hpcstage import inherited
    from hpcstage.config import files

    cwd = inherited.directory()
    if not any(given.get(key) or env.get(f"HPCSTAGE_{key.upper()}") for key in ("out", "checkpoint")):
        try:
            if not any(place.path.exists() for place in files.places(given.get("config"), env, cwd)):
                return {}
        except ConfigError:
            return {}
    from hpcstage.wrapper import outdir

    return outdir.without_us(given, env, cwd)


def replace_with(command: Sequence[str], directories: Mapping[NamedDirectory, str] | None = None) -> int:
    """Replaces this process by the command, which writes to these directories; the function ends only by raising."""
    for named, path in (directories or {}).items():
        command = named.put_in(command, path)
        os.environ.update(named.environment(os.environ, path))
    for number in IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))  # noqa: S606  the user's own command
    except (OSError, ValueError) as error:
        for number in IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_IGN)
        raise exec_error(command, error) from None
    raise AssertionError


def exec_error(command: Sequence[str], error: OSError | ValueError) -> CommandNotFound | CommandNotExecutable:
    """Returns the error for a command that could not be started, with the exit code that shells use."""
    if isinstance(error, ValueError):  # an empty name, which Python does not pass on
        error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    what = f"cannot run {command[0]!r}: {error.strerror}"
    if isinstance(error, FileNotFoundError) and os.path.lexists(command[0]):
        return CommandNotFound(what, "it is there: check the interpreter in its first line, or where its link leads")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return CommandNotFound(what, "check the command after `--`")
    return CommandNotExecutable(what, "check its permissions and its first line")
