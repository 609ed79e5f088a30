"""Makes the global generators of random, NumPy and PyTorch ask before they draw, so that samples draw in their order.

The module owns the gates: they call `ask`, in the drawing thread, before anything reads or changes one of the three
states. The numbers that are drawn stay what they were, and so do the states. Gates stay until the process ends.
"""

# ruff: noqa: ANN401 - other libraries' generators and operators are of any type

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.random

try:
    from torch.utils import _python_dispatch

    _stack: Any = _python_dispatch
except ImportError:  # then `available` says no
    _stack = None

Ask = Callable[[], None]
_RANDOM = ("random", "getrandbits", "seed", "getstate", "setstate")


class _Asking:
    asks: Ask | None = None


def install(ask: Ask) -> bool:
    """Installs the gates; returns whether all three generators ask now. If not, samples that draw must not be loaded
    side by side."""
    if _Asking.asks is not None:
        return _Asking.asks is ask
    if not _has_modes() or not _gate_numpy(ask):
        return False
    _gate_random(ask)
    _gate_torch_functions(ask)
    _Asking.asks = ask
    return True


# ---- random


def _gate_random(ask: Ask) -> None:
    """Gates the methods of the one hidden instance, to which all functions of the module belong."""
    hidden: Any = vars(random)["_inst"]

    def asking(name: str) -> Any:
        own = getattr(random.Random, name)

        def method(self: random.Random, *args: Any, **options: Any) -> Any:
            ask()
            return own(self, *args, **options)

        return method

    def gauss_next(self: random.Random) -> Any:
        ask()
        return vars(self).get("gauss_next")

    def keep_gauss(self: random.Random, value: Any) -> None:
        vars(self)["gauss_next"] = value

    gates = {name: asking(name) for name in _RANDOM}
    before = {name: getattr(random, name) for name in _RANDOM}
    hidden.__class__ = type("Random", (random.Random,), {**gates, "gauss_next": property(gauss_next, keep_gauss)})
    _replace({id(function): getattr(hidden, name) for name, function in before.items()})


def _replace(gated: dict[int, Any]) -> None:
    """Replaces functions in all modules, also where a module has imported one by name."""
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", None)
        if not isinstance(space, dict):
            continue
        for key in [key for key, value in list(space.items()) if id(value) in gated]:
            space[key] = gated[id(space[key])]


# ---- NumPy


def _gate_numpy(ask: Ask) -> bool:
    """Gates NumPy's global functions, all of which take the lock of their bit generator for each draw."""
    try:
        import numpy.random as library
    except ImportError:
        return True  # then nobody draws from it
    module: Any = library
    if not hasattr(module, "set_bit_generator"):
        return False
    current = module.get_bit_generator()
    if type(current) is not module.MT19937:
        return False
    state = module.get_state(legacy=False)
    gated = _gated_twister(module.MT19937, ask)()
    module.set_bit_generator(gated)
    module.set_state(state)
    return True


class _Lock:
    """A bit generator's lock that asks before it is taken."""

    def __init__(self, lock: Any, ask: Ask) -> None:
        self._lock = lock
        self._ask = ask

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def acquire(self) -> None:
        """Asks, then takes the lock."""
        self._ask()
        self._lock.acquire()

    def release(self) -> None:
        """Releases the lock."""
        self._lock.release()


def _gated_twister(base: Any, ask: Ask) -> Any:
    # The name is part of what get_state gives and set_state takes.
    class MT19937(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._asking = _Lock(base.lock.__get__(self), ask)

        @property
        def lock(self) -> _Lock:
            return self._asking

        @property
        def state(self) -> Any:
            ask()
            return base.state.__get__(self)

        @state.setter
        def state(self, value: Any) -> None:
            ask()
            base.state.__set__(self, value)

        def _legacy_seeding(self, seed: Any) -> Any:
            ask()
            return super()._legacy_seeding(seed)

        def __reduce__(self) -> Any:
            plain = base()
            plain.state = self.state
            return plain.__reduce__()

    return MT19937


# ---- PyTorch


class TorchDraws:
    """Makes PyTorch's operators ask before they draw, from whichever generator, within its block and in this thread.

    The mode is put on the thread's stack directly: entering it in the usual way also sets flags of the whole process,
    which threads would leave wrong, and which torch.compile reads.
    """

    def __init__(self, ask: Ask) -> None:
        self._gate = _gate(ask)

    def __enter__(self) -> None:
        _stack._push_mode(self._gate)

    def __exit__(self, *exc: object) -> None:
        _stack._pop_mode()


def _has_modes() -> bool:
    """Returns whether this PyTorch has what the gate needs."""
    has_tag = hasattr(getattr(torch, "Tag", None), "nondeterministic_seeded")
    return has_tag and all(hasattr(_stack, name) for name in ("TorchDispatchMode", "_push_mode", "_pop_mode"))


@functools.cache
def _gate(ask: Ask) -> Any:
    """Returns a mode that has no state, for all threads."""
    base: Any = _stack.TorchDispatchMode
    tag = torch.Tag.nondeterministic_seeded

    @functools.cache
    def draws(operator: Any) -> bool:
        return tag in operator.tags

    class DrawGate(base):  # type: ignore[misc]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # to arrange for that, all of torch.compile would be imported

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if draws(func):
                ask()
            return func(*args, **(kwargs or {}))

    return DrawGate()


class _Generator:
    """Stands for the default generator in the functions of torch.random, and asks before each use of it."""

    def __init__(self, generator: Any, ask: Ask) -> None:
        self._generator = generator
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        self._ask()
        return getattr(self._generator, name)


def _gate_torch_functions(ask: Ask) -> None:
    """Gates manual_seed, get_rng_state and so on, which are no operators."""
    module: Any = torch.random
    if hasattr(module, "default_generator"):
        module.default_generator = _Generator(module.default_generator, ask)
