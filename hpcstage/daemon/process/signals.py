"""Turns the daemon's signals into bytes of a pipe, so that the event loop handles them in turn with everything else."""

from __future__ import annotations

import faulthandler
import os
import signal


def take() -> int:
    """Returns the descriptor from which the numbers of SIGTERM and SIGUSR1 can be read.

    The daemon ignores a terminal's signals, which are for the command; SIGUSR2 writes the stacks to the log.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    out, into = os.pipe()
    os.set_blocking(out, False)
    os.set_blocking(into, False)
    signal.set_wakeup_fd(into, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the wrapper keeps its signals blocked, which a child inherits
    return out
