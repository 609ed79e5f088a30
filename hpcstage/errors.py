"""Owns the error tree: each class has its exit code and names the next step.

The module owns what a user is told when something fails before the command starts. It does not own the exit code of the
command, which is always passed on unchanged.
"""

from __future__ import annotations

import os


class HpcstageError(Exception):
    """Something failed: `what` says what and to which object, `remedy` says what to do next."""

    exit_code = 1

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def line(self) -> str:
        """Returns the whole message on one line, with the causes behind colons."""
        parts = [self.what]
        cause = self.__cause__
        while cause is not None:
            parts.append(str(cause) or type(cause).__name__)
            cause = cause.__cause__
        text = ": ".join(parts).replace("\n", "\\n")
        return f"{text} ({self.remedy})" if self.remedy else text


class UsageError(HpcstageError):
    """An option, a list or a plan file is wrong: the user has to change the command line."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file or variable is wrong: the message names the key, the file and the line."""


class NoResult(HpcstageError):
    """`report` found nothing to show."""

    exit_code = 1


class NotDrained(HpcstageError):
    """Files of the command's output are not in their directory on the shared file system. Its exit code takes the
    place of 0 only."""

    exit_code = 74


class NotStarted(HpcstageError):
    """hpcstage failed before the command started. Raised only with --strict; otherwise the command runs without
    hpcstage."""

    exit_code = 125


class LocalDiskProblem(NotStarted):
    """The node-local directory cannot be used; the message names the host."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{os.uname().nodename}: {what}", remedy)
        self.here = what
        """The message for who names the host itself."""


class NoLocalDir(LocalDiskProblem):
    """The node has no directory that can be used. All processes of a launch on this node find that out."""


class CommandNotExecutable(HpcstageError):
    """The command exists but cannot be executed."""

    exit_code = 126


class CommandNotFound(HpcstageError):
    """The command does not exist."""

    exit_code = 127
