"""Hands the state of a training from one rank to all others, through collectives of their group. Nothing is pickled.

The module owns the form on the way: the length of a head, the head in JSON, the bytes of each tensor.
"""

# ruff: noqa: ANN401 - a state is any nesting of values

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from hpcstage.torch.statetree import assembled, flattened


def hand_over(state: Any, source: int) -> Any:
    """Returns the state of the rank `source`, on all ranks. Only there `state` is looked at."""
    is_source = dist.get_rank() == source
    flat = flattened(state) if is_source else None
    head = None
    if flat is not None:
        forms = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in flat.tensors]
        head = json.dumps({"tree": flat.tree, "tensors": forms}).encode()
    told = json.loads(_bytes_of(head, source))
    tensors: list[torch.Tensor] = []
    for number, (dtype, shape) in enumerate(told["tensors"]):
        given = flat.tensors[number].detach().to("cpu").contiguous() if flat is not None else _empty(dtype, shape)
        if given.numel():
            dist.broadcast(given.reshape(-1).view(torch.uint8), source)
        tensors.append(given)
    return state if is_source else assembled(told["tree"], tensors.__getitem__, lambda number: tensors[number].numpy())


def _bytes_of(head: bytes | None, source: int) -> bytes:
    length = torch.tensor([len(head or b"")])
    dist.broadcast(length, source)
    content = torch.empty(int(length), dtype=torch.uint8)
    if head is not None:
        content = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    dist.broadcast(content, source)
    return content.numpy().tobytes()


def _empty(dtype: str, shape: list[int]) -> torch.Tensor:
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{dtype} is no type of a tensor")
    return torch.empty(shape, dtype=found)
