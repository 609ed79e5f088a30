"""Makes a policy from what the user wrote: `NAME[:ARGUMENTS]` or `FILE.py:CLASS[:ARGUMENTS]`.

The module owns the form of that text and its mistakes, each of which is a UsageError of one line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcstage.elastic.policies import FailStop, FinishIfNear, KeepBatch, MinMax, TimeLeft, WaitFor
from hpcstage.elastic.policy import AskedPolicy, PolicyError
from hpcstage.errors import UsageError

READY_MADE: Mapping[str, type[Any]] = {
    "failstop": FailStop,
    "minmax": MinMax,
    "waitfor": WaitFor,
    "keepbatch": KeepBatch,
    "finishifnear": FinishIfNear,
    "timeleft": TimeLeft,
}
NEAR_SHARE = 0.8
WAIT_S = 60.0


def load_policy(text: str, least: int, most: int) -> AskedPolicy:
    """Returns the policy that `text` means, for a training on `least` to `most` hosts. Raises UsageError.

    Arguments are separated by commas, and may have names: `keepbatch:256,1024,per_process=32`. Without any, `failstop`
    takes `most`, `minmax` both, `waitfor` `least` and a minute, `finishifnear` 0.8, and `timeleft` waits for nobody.
    """
    name, has_arguments, written = _split(text)
    if not name:
        raise UsageError("a policy has no name", f"choose one of {', '.join(READY_MADE)} or FILE.py:CLASS")
    made = READY_MADE.get(name) or _class_of_file(text, name)
    positional, named = _arguments(text, written)
    if not has_arguments:
        positional = _defaults(name, least, most)
    try:
        inspect.signature(made).bind(*positional, **named)
    except TypeError as error:
        raise UsageError(f"policy {text}: {error}", f"{_usage(name, made)}") from None
    try:
        return AskedPolicy(made(*positional, **named), text)
    except PolicyError as error:
        raise UsageError(error.what, error.remedy) from error.__cause__
    except Exception as error:
        raise UsageError(f"policy {text} cannot be made: {type(error).__name__}", _usage(name, made)) from error


def _split(text: str) -> tuple[str, bool, str]:
    """Returns the name, whether there are arguments, and these. The name of a file may have colons."""
    if ".py:" in text:
        file, _, rest = text.rpartition(".py:")
        name, colon, written = rest.partition(":")
        return f"{file}.py:{name}", bool(colon), written
    name, colon, written = text.partition(":")
    return name, bool(colon), written


def _defaults(name: str, least: int, most: int) -> list[Any]:
    known: dict[str, list[Any]] = {
        "failstop": [most],
        "minmax": [least, most],
        "waitfor": [least, WAIT_S],
        "finishifnear": [NEAR_SHARE],
    }
    return known.get(name, [])


def _class_of_file(text: str, name: str) -> Any:  # noqa: ANN401 - a class, whatever it can do
    file, is_file, class_name = name.rpartition(".py:")
    if not is_file:
        raise UsageError(f"there is no policy {name}", f"choose one of {', '.join(READY_MADE)} or FILE.py:CLASS")
    path = Path(f"{file}.py")
    if not path.is_file():
        raise UsageError(f"policy {text}: {path} is not a file", "name a Python file")
    spec = importlib.util.spec_from_file_location(f"hpcstage_policy_{path.stem}", path.absolute())
    if spec is None or spec.loader is None:
        raise UsageError(f"policy {text}: {path} cannot be imported", "name a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"policy {text}: {path} raised {type(error).__name__}", "correct the file") from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        raise UsageError(f"policy {text}: {path} has no class {class_name or '(no name)'}", "name one: FILE.py:CLASS")
    return found


def _arguments(text: str, written: str) -> tuple[list[Any], dict[str, Any]]:
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for part in written.split(",") if written else []:
        name, is_named, value = part.partition("=")
        if is_named and name.strip().isidentifier():
            named[name.strip()] = _value(value.strip())
        elif named:
            raise UsageError(f"policy {text}: {part!r} comes after arguments with a name", "put it in front of them")
        else:
            positional.append(_value(part.strip()))
    return positional, named


def _value(text: str) -> int | float | str:
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def _usage(name: str, made: type[Any]) -> str:
    takes = [str(parameter) for parameter in inspect.signature(made).parameters.values()]
    return f"write {name}" + (f":ARGUMENTS, which are {', '.join(takes)}" if takes else " without arguments")
