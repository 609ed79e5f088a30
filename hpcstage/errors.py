"""The error tree: each class owns its exit code and says the next step.

Owns: what a user is told when something fails before the command starts. It does not own the exit code of the
command, which is always passed on unchanged.
"""

from __future__ import annotations

import os


class HpcstageError(Exception):
    """Something failed; `what` says what and to which object, `remedy` what to do next."""

    exit_code = 1

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def line(self) -> str:
        """The whole message on one line, causes chained behind colons."""
        parts = [self.what]
        cause = self.__cause__
        while cause is not None:
            parts.append(str(cause) or type(cause).__name__)
            cause = cause.__cause__
        text = ": ".join(parts).replace("\n", "\\n")
        return f"{text} ({self.remedy})" if self.remedy else text


class UsageError(HpcstageError):
    """A bad option, list or plan file: the user changes the command line."""

    exit_code = 2


class ConfigError(UsageError):
    """A bad configuration file or variable: names the key, the file and the line."""


class NoResult(HpcstageError):
    """`report` found nothing to show."""

    exit_code = 1


class NotStarted(HpcstageError):
    """We failed before the command started (only with --strict; otherwise the command runs without us)."""

    exit_code = 125


class LocalDiskProblem(NotStarted):
    """No usable node-local directory; the message carries the host."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what} on {os.uname().nodename}", remedy)


class NoLocalDir(LocalDiskProblem):
    """The node has no directory that can be used: all processes of a launch find that out there."""


class CommandNotExecutable(HpcstageError):
    """The command exists and cannot be executed."""

    exit_code = 126


class CommandNotFound(HpcstageError):
    """The command does not exist."""

    exit_code = 127
