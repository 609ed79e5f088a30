"""Takes the state of a training apart into plain JSON and tensors, and puts it together again. Nothing is pickled.

The module owns which values a state may hold, and how an error names the place of one that it may not. It moves no
tensor's bytes. Numbers, strings and None stand in the JSON as they are; every other value is an object with one key
that says what it is, so that a dictionary may have any keys.
"""

# ruff: noqa: ANN401 - a state is any nesting of values

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_PLAIN = frozenset({type(None), bool, int, float, str})
_DICTIONARIES: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "size"}
_MADE: dict[str, Callable[[Any], Any]] = {
    **{kind: made for made, kind in _DICTIONARIES.items()},
    **{kind: made for made, kind in _SEQUENCES.items()},
}
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)})
_ARRAYS = "biufc"
"""The kinds of NumPy's types whose bytes say all."""


@dataclass(frozen=True)
class FlatState:
    """A state in its two parts."""

    tree: Any
    """The state as plain JSON; a tensor is its number in `tensors`."""
    tensors: list[torch.Tensor]
    """The tensors, each once however often the state names it."""


class _Unsupported(Exception):
    """A value cannot be saved; `path` grows on the way out."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.path: list[str] = []


def flattened(state: Any) -> FlatState:
    """Takes a state apart. Raises a TypeError that names the place of a value that cannot be saved."""
    flattening = _Flattening()
    try:
        return FlatState(flattening.tree_of(state), flattening.tensors)
    except _Unsupported as error:
        raise TypeError(f"state{''.join(reversed(error.path))} {error}") from None
    except RecursionError:
        raise TypeError("the state holds itself, or is nested too deeply") from None


def assembled(tree: Any, tensor: Callable[[int], Any], array: Callable[[int], Any]) -> Any:
    """Puts a state together: `tensor` and `array` return what stands for a number, for PyTorch and for NumPy."""
    if type(tree) is not dict:
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensor(content)
    if kind in _DICTIONARIES.values():
        pairs = ((assembled(key, tensor, array), assembled(value, tensor, array)) for key, value in content)
        return _MADE[kind](dict(pairs))
    if kind in _SEQUENCES.values():
        return _MADE[kind]([assembled(value, tensor, array) for value in content])
    if kind == "bytes":
        return base64.b64decode(content)
    if kind in ("array", "scalar"):
        number, dtype, shape = content
        found = np.frombuffer(array(number), np.dtype(dtype)).reshape(shape).copy()
        return found if kind == "array" else found[()]
    raise ValueError(f"a state has no values of kind {kind!r}")


def names(tree: Any, count: int) -> list[str]:
    """Returns for each tensor the keys by which the state first names it, with dots between them."""
    found = [""] * count
    for number, path in _numbered(tree, ()):
        found[number] = found[number] or ".".join(map(str, path))
    return found


def targets(tree: Any, into: Any) -> dict[int, list[torch.Tensor]]:
    """Returns the tensors of another state that stand where those of this tree do, by number.

    Raises a ValueError that names a tensor of `into` which the tree does not have.
    """
    paths = {path: number for number, path in _numbered(tree, ())}
    flat = flattened(into)
    found: dict[int, list[torch.Tensor]] = {}
    for other, path in _numbered(flat.tree, ()):
        if path not in paths:
            raise ValueError(f"the checkpoint has no tensor {'.'.join(map(str, path))}")
        found.setdefault(paths[path], []).append(flat.tensors[other])
    return found


def _numbered(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yields the numbers of tensors and arrays with their keys."""
    if type(tree) is not dict:
        return
    ((kind, content),) = tree.items()
    if kind == "tensor":
        yield content, path
    elif kind in ("array", "scalar"):
        yield content[0], path
    elif kind in _DICTIONARIES.values():
        for key, value in content:
            yield from _numbered(value, (*path, key if type(key) is not dict else str(key)))
    elif kind in _SEQUENCES.values():
        for place, value in enumerate(content):
            yield from _numbered(value, (*path, place))


class _Flattening:
    """Takes one state apart."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._at: dict[int, list[int]] = {}
        """The numbers of the tensors whose bytes begin at an address."""

    def tree_of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in _TENSORS:
            return {"tensor": self._number(value)}
        if kind in _DICTIONARIES:
            return {_DICTIONARIES[kind]: self._pairs(value)}
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._values(value)}
        if kind in (bytes, bytearray):
            return {"bytes": base64.b64encode(value).decode()}
        if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in _ARRAYS:
            return self._array(value)
        raise _Unsupported(f"is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickling it")

    def _pairs(self, dictionary: dict[Any, Any]) -> list[list[Any]]:
        made = []
        for key, value in dictionary.items():
            try:
                made.append([key if type(key) in _PLAIN else self._key(key), self.tree_of(value)])
            except _Unsupported as error:
                error.path.append(f"[{key!r}]")
                raise
        return made

    def _values(self, values: Sequence[Any]) -> list[Any]:
        made = []
        for place, value in enumerate(values):
            try:
                made.append(self.tree_of(value))
            except _Unsupported as error:
                error.path.append(f"[{place}]")
                raise
        return made

    def _key(self, key: Any) -> Any:
        if type(key) is tuple and all(type(part) in _PLAIN for part in key):
            return {"tuple": list(key)}
        raise _Unsupported(f"has a key of type {type(key).__qualname__}; keys are numbers, strings or tuples of them")

    def _number(self, tensor: torch.Tensor) -> int:
        """Returns the number of a tensor; that of an earlier one if it is the same bytes in the same form."""
        if tensor.layout is not torch.strided:
            raise _Unsupported(
                f"is a tensor with the layout {tensor.layout}: save its indices and values, or to_dense()"
            )
        if tensor.is_meta:
            raise _Unsupported("is a meta tensor, which has no values")
        if tensor.is_quantized:
            raise _Unsupported("is a quantized tensor: save int_repr(), scale and zero point")
        if tensor.numel():
            alike = self._at.setdefault(tensor.data_ptr(), [])
            for number in alike:
                if _same(tensor, self.tensors[number]):
                    return number
            alike.append(len(self.tensors))
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _array(self, value: Any) -> Any:
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        # A copy, since an array may be read-only, which PyTorch warns of; arrays in a state are random states and such.
        self.tensors.append(torch.from_numpy(content.copy()))
        return {kind: [len(self.tensors) - 1, value.dtype.str, list(value.shape)]}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether two tensors that begin at one address are one."""
    return (one.dtype, one.shape, one.stride(), one.device) == (
        other.dtype,
        other.shape,
        other.stride(),
        other.device,
    ) and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
