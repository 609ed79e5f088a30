"""The daemon's signals: taken as bytes of a pipe, so that they come one after the other with everything else."""

from __future__ import annotations

import faulthandler
import os
import signal


def take() -> int:
    """Returns the descriptor from which the numbers of SIGTERM and SIGUSR1 can be read.

    A terminal's signals are for the command and pass by; SIGUSR2 writes the stacks to the log.
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
