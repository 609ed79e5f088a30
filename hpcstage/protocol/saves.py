"""Defines the files by which a program tells the daemon of its node how long its saves of checkpoints held it up.

Owns the form: each process that saves has a file of its own below `<node directory>/saves/`, which is SAVES and is
written anew, in one call, after each save.
"""

from __future__ import annotations

import struct

DIRECTORY = "saves"
SAVES = struct.Struct("<QQ")
"""u64 saves so far, u64 ns from the begin of a save until the training could go on, of all of them."""
