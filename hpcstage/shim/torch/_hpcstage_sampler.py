"""Finds what a loader's sampler will give in the coming epoch: runs it once and puts every random state back.

The module owns the table of samplers that may be run: those whose every step is known to be repeatable. No other
sampler is ever iterated. The module owns no loader and announces nothing.
"""

from __future__ import annotations

import sys
from array import array
from copy import copy
from itertools import chain, islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable

LIMIT = 50_000_000
"""An epoch with more samples than this is not run ahead."""
_TORCH = "torch.utils.data.sampler"
_PLAIN = (_TORCH, "BatchSampler")
_LIGHTNING = ("lightning.pytorch.overrides.distributed", "pytorch_lightning.overrides.distributed")
_FABRIC = ("lightning.fabric.utilities.distributed", "lightning_fabric.utilities.distributed")
_STATEFUL = "torchdata.stateful_dataloader.sampler"
_PASSES_ON = {(module, "_IndexBatchSamplerWrapper") for module in _LIGHTNING}
"""These samplers give exactly what their inner batch sampler gives, and keep their place in themselves: the inner one
is run."""
_HOLDERS = {(module, "_DatasetSamplerWrapper") for module in _FABRIC}
"""These classes hold a sampler in the place of a distributed sampler's dataset."""

# The keys are the classes that define __iter__, the values what else of the sampler __iter__ uses: a subclass may have
# replaced that.
KNOWN: dict[tuple[str, str], tuple[str, ...]] = {
    ("builtins", "list"): (),
    ("builtins", "tuple"): (),
    ("builtins", "range"): (),
    (_TORCH, "SequentialSampler"): (),
    (_TORCH, "RandomSampler"): ("num_samples",),
    (_TORCH, "SubsetRandomSampler"): (),
    (_TORCH, "WeightedRandomSampler"): (),
    _PLAIN: (),
    ("torch.utils.data.distributed", "DistributedSampler"): (),
    ("accelerate.data_loader", "SeedableRandomSampler"): ("num_samples", "set_epoch"),
    ("accelerate.data_loader", "BatchSamplerShard"): ("_iter_with_split", "_iter_with_no_split"),
    ("accelerate.data_loader", "SkipBatchSampler"): (),
    ("hpcstage.torch.samplers.bundles", "BundleRandomSampler"): (),
    ("hpcstage.torch.samplers.locality", "LocalityAwareSampler"): (),
    ("hpcstage.torch.elastic.sampler", "ElasticSampler"): ("share", "step_size"),
    (_STATEFUL, "RandomSampler"): ("num_samples",),
    (_STATEFUL, "BatchSampler"): (),
    (_STATEFUL, "StatefulDistributedSampler"): (),
    **dict.fromkeys(_PASSES_ON, ("__next__",)),
    **{(module, "UnrepeatedDistributedSampler"): () for module in _LIGHTNING},
    **{(module, "UnrepeatedDistributedSamplerWrapper"): () for module in _LIGHTNING},
    **{(module, "DistributedSamplerWrapper"): () for module in _FABRIC},
}
_EAGER = {name for name in KNOWN if name[1].endswith("SamplerWrapper")} - _PASSES_ON
_EAGER |= {(_STATEFUL, "RandomSampler"), (_STATEFUL, "BatchSampler")}
"""These samplers draw when `iter` is called, not when the first index is asked for: then it is too late to run them
alike."""
_COPIED = {(_STATEFUL, "_BatchSamplerIterator"), (_STATEFUL, "_StatefulRandomSamplerIterator")}
"""These iterators hold all of their place in attributes, so a copy gives what is left of them."""
_RESUMED = ("itertools", "islice")
"""A sampler's iterator of this class goes on where an earlier program was."""
_INNER = ("sampler", "batch_sampler", "_sampler", "_batch_sampler")
_SEQUENCES = ("builtins", "array", "numpy", "torch")


def peek(sampler: Any, more_generators: Iterable[Any] = (), drawn: Any = None) -> array[int] | None:
    """Returns all indices that `iter(sampler)` would give now, or None. Raises what the sampler raises; nothing has
    changed when it returns or raises. `drawn` is the loader's iterator of the sampler, not advanced since the epoch
    began."""
    found = parts(sampler)
    copied = _class(drawn) in _COPIED
    begun = _class(drawn) == _RESUMED or (_name(sampler, "__iter__") in _EAGER and not copied)
    if found is None or _too_long(found) or begun or not _drawn_on_cpu():
        return None
    states = _States(found, more_generators)
    try:
        return _left(drawn) if copied else _collect(sampler)
    finally:
        states.put_back()


def parts(sampler: Any) -> list[Any] | None:
    """Returns the sampler and all that it draws from, or None if one of them is not known."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting:
        part = waiting.pop()
        if any(part is other for other in found):
            continue
        if not _is_known(part):
            return None
        found.append(part)
        waiting.extend(_inner(part))
    return found


def _is_known(part: Any) -> bool:
    if _name(part, "__getitem__") in _HOLDERS:
        return True
    name = _name(part, "__iter__")
    uses = KNOWN.get(name)
    if uses is None:
        return False
    package = name[0].split(".")[0]
    if any(_name(part, used)[0].split(".")[0] not in ("", package, "torch") for used in uses):
        return False
    space = _space(part)
    if any(isinstance(value, sys.modules["torch"].Tensor) and not _on_cpu(value) for value in space.values()):
        return False  # it may draw from the generator of its device, which is not saved
    indices = space.get("indices", ())
    return type(indices).__module__.split(".")[0] in _SEQUENCES


def _name(part: Any, method: str) -> tuple[str, str]:
    """Returns module and name of the class that defines a method."""
    for cls in type(part).__mro__:
        if method in cls.__dict__:
            return cls.__module__, cls.__qualname__
    return "", ""


def _class(part: Any) -> tuple[str, str]:
    return type(part).__module__, type(part).__qualname__


def _space(part: Any) -> dict[str, Any]:
    space = getattr(part, "__dict__", None)
    return space if isinstance(space, dict) else {}


def _inner(part: Any) -> list[Any]:
    space = _space(part)
    inner = [space[name] for name in _INNER if space.get(name) is not None]
    held = space.get("dataset")
    return inner + [held] if _name(held, "__getitem__") in _HOLDERS else inner


def _too_long(found: list[Any]) -> bool:
    return any(len(part) > LIMIT for part in found if not _inner(part))


def _drawn_on_cpu() -> bool:
    """Returns whether the default device is the CPU. On another device the seeds are drawn from its generator, which is
    not saved."""
    return _on_cpu(sys.modules["torch"].empty(0))


def _on_cpu(tensor: Any) -> bool:
    return str(tensor.device.type) == "cpu"


def _collect(sampler: Any) -> array[int] | None:
    while _name(sampler, "__iter__") in _PASSES_ON:
        sampler = sampler._batch_sampler
    if _name(sampler, "__iter__") == _PLAIN:
        indices = array("I", islice(sampler.sampler, LIMIT + 1))
        if sampler.drop_last:
            del indices[len(indices) - len(indices) % sampler.batch_size :]
        return indices if len(indices) <= LIMIT else None
    drawn = iter(sampler)
    first = next(drawn, None)
    if not isinstance(first, (list, tuple)):
        indices = array("I", islice(chain([] if first is None else [first], drawn), LIMIT + 1))
        return indices if len(indices) <= LIMIT else None
    indices = array("I", first)
    for batch in drawn:
        indices.extend(batch)
        if len(indices) > LIMIT:
            break
    return indices if len(indices) <= LIMIT else None


def _left(drawn: Any) -> array[int] | None:
    """Returns what a copied iterator has still to give."""
    batched = "batch_size" in _space(drawn)
    inner = _left_inside(drawn) if batched else _random_left(drawn)
    if inner is None:
        return None
    indices = array("I", islice(inner, LIMIT + 1))
    if batched and drawn.drop_last:
        del indices[len(indices) - len(indices) % drawn.batch_size :]
    return indices if len(indices) <= LIMIT else None


def _left_inside(drawn: Any) -> Iterable[int] | None:
    """Returns what is left of the sampler's iterator that a batch sampler's iterator holds, or None."""
    inner, sampler = drawn.sampler_iter, drawn.sampler
    if _class(inner) in _COPIED:
        return _random_left(inner)
    begins = drawn.samples_yielded == 0 or hasattr(sampler, "load_state_dict")
    return iter(sampler) if begins and _name(sampler, "__iter__") not in _EAGER else None


def _random_left(drawn: Any) -> Iterable[int]:
    left = drawn.num_samples - drawn.yielded
    if left <= len(drawn.perm) - drawn.perm_index:
        return islice(drawn.perm, drawn.perm_index, drawn.perm_index + left)
    duplicate: Iterable[int] = copy(drawn)
    return duplicate


class _States:
    """Saves what running a known sampler can change: random states, and the samplers' attributes."""

    def __init__(self, found: list[Any], more_generators: Iterable[Any]) -> None:
        torch = sys.modules["torch"]
        generators = [torch.default_generator, *more_generators]
        for part in found:
            generators += [value for value in _space(part).values() if isinstance(value, torch.Generator)]
        unique = {id(generator): generator for generator in generators if generator is not None}
        self._restores: list[Callable[[], Any]] = [
            _restore(generator.set_state, generator.get_state()) for generator in unique.values()
        ]
        self._spaces = [(_space(part), dict(_space(part))) for part in found]
        self._save_libraries()

    def _save_libraries(self) -> None:
        random: Any = sys.modules.get("random")
        if random is not None:
            self._restores.append(_restore(random.setstate, random.getstate()))
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            state = numpy.get_state(legacy=False)
            if state["bit_generator"] == "MT19937":  # another cannot be set
                self._restores.append(_restore(numpy.set_state, state))

    def put_back(self) -> None:
        """Puts all of it back, whatever part of it fails."""
        for space, before in self._spaces:
            for name in [name for name in space if name not in before]:
                space.pop(name, None)
            space.update(before)
        for restore in self._restores:
            try:
                restore()
            except Exception:
                continue


def _restore(put: Callable[[Any], Any], state: Any) -> Callable[[], Any]:
    return lambda: put(state)
