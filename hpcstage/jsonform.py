"""Turns frozen dataclasses into plain data for JSON and back, and describes them by a JSON schema.

A dataclass is an object with a key for each field, in their order; a tuple is an array, an enumeration its value, bytes
(of a path) are text with surrogates. A key that is missing gets the field's default, else null where that is allowed,
and a key without a field is dropped, so that older and newer versions read each other's data. Values are not checked,
only the form.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Form = TypeVar("Form")


@dataclass(frozen=True)
class NumberLimits:
    """Says in an annotation which values the schema allows."""

    minimum: float | None = None
    maximum: float | None = None


Count = Annotated[int, NumberLimits(minimum=0)]
Seconds = Annotated[float, NumberLimits(minimum=0)]
Share = Annotated[float, NumberLimits(minimum=0, maximum=1)]
NotNegative = Annotated[float, NumberLimits(minimum=0)]


# ---- writing and reading ----


def plain(value: Any) -> Any:  # noqa: ANN401  any value of a field
    """Returns the value as data for json.dump."""
    if is_dataclass(value):
        return written(value)
    if isinstance(value, dict):
        return {key: plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(member) for member in value]
    if isinstance(value, bytes):
        return os.fsdecode(value)
    return value.value if isinstance(value, Enum) else value


def written(value: Any) -> dict[str, Any]:  # noqa: ANN401  any dataclass
    """Returns a dataclass with all its fields."""
    return {part.name: plain(getattr(value, part.name)) for part in fields(value)}


def read(form: type[Form], data: Any) -> Form:  # noqa: ANN401  any JSON value
    """Returns an object of this dataclass. Raises ValueError if the data have another form."""
    values = _checked(data, dict, form.__name__)
    found = {}
    for name, member, absent in _readers(cast("Any", form)):
        if name in values:
            given = values[name]
            found[name] = given if member is _same else member(given)
        elif absent is MISSING:
            raise ValueError(f"{form.__name__} has no {name}")
        else:
            found[name] = absent() if callable(absent) else absent
    return form(**found)


@cache
def _readers(form: Any) -> Sequence[tuple[str, Callable[[Any], Any], Any]]:  # noqa: ANN401  a dataclass
    """Returns the names of the fields, the readers of their values, and the values of missing keys, or what makes them;
    MISSING where a key must be there."""
    hints, found = get_type_hints(form), []
    for part in fields(form):
        member = _reader(hints[part.name])
        absent: Any = part.default if part.default_factory is MISSING else part.default_factory
        if absent is MISSING and NoneType in get_args(hints[part.name]):
            absent = None
        found.append((part.name, member, absent))
    return found


def _reader(hint: Any) -> Callable[[Any], Any]:  # noqa: ANN401  any annotation
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        member = _reader(inner[0])
        return _same if member is _same else partial(_optional, member)
    if origin is tuple and inner[-1] is not Ellipsis:
        return partial(_row, [_reader(one) for one in inner])
    if origin in (tuple, list, Sequence):
        return partial(_array, list if origin is list else tuple, _reader(inner[0]))
    if origin in (dict, Mapping):
        return partial(_table, inner[0], _reader(inner[1]))
    if hint is bytes:
        return os.fsencode
    if is_dataclass(hint):
        return partial(read, cast("type[Any]", hint))
    return hint if isinstance(hint, type) and issubclass(hint, Enum) else _same


def _same(value: Any) -> Any:  # noqa: ANN401
    return value


def _optional(member: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401
    return None if value is None else member(value)


def _array(kind: type[Any], member: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401
    members = _checked(value, (list, tuple))
    return kind(members if member is _same else map(member, members))


def _row(members: Sequence[Callable[[Any], Any]], value: Any) -> Any:  # noqa: ANN401
    return tuple(member(one) for member, one in zip(members, _checked(value, (list, tuple)), strict=True))


def _table(key: Callable[[str], Any], member: Callable[[Any], Any], value: Any) -> dict[Any, Any]:  # noqa: ANN401
    table = _checked(value, dict).items()
    if member is _same:
        return dict(table) if key is str else {key(name): one for name, one in table}
    return {key(name): member(one) for name, one in table}


def _checked(value: Any, kind: type[Any] | tuple[type[Any], ...], name: str = "a part") -> Any:  # noqa: ANN401
    if not isinstance(value, kind):
        raise ValueError(f"{name} has another form: {value!r:.60}")  # noqa: TRY004  the form of data, not of code
    return value


# ---- the schema ----

TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


def schema(form: type[Any]) -> dict[str, Any]:
    """Returns the JSON schema of a dataclass. Docstrings of classes and attributes are its descriptions."""
    hints = get_type_hints(form, include_extras=True)
    about: dict[str, str] = {}
    for one in filter(is_dataclass, reversed(form.__mro__)):
        about |= _documented(one.__module__).get(one.__name__, {})
    found: dict[str, Any] = {"type": "object"}
    required = [one.name for one in fields(form) if one.default is MISSING and one.default_factory is MISSING]
    properties = {}
    for part in fields(form):
        described = dict(_described(hints[part.name]))
        if text := about.get(part.name):
            described["description"] = text
        properties[part.name] = described
    told = {"description": " ".join((form.__doc__ or "").split()), "required": required, "properties": properties}
    return found | {key: value for key, value in told.items() if value}


def _described(hint: Any) -> dict[str, Any]:  # noqa: ANN401  any annotation
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _described(inner[0]) | {key: value for key, value in vars(inner[1]).items() if value is not None}
    if origin in (Union, UnionType):
        return _or_null(_described(inner[0]))
    if origin is tuple and inner[-1] is not Ellipsis:
        return {
            "type": "array",
            "minItems": len(inner),
            "maxItems": len(inner),
            "prefixItems": [_described(one) for one in inner],
        }
    if origin is tuple:
        return {"type": "array", "items": _described(inner[0])}
    if origin is dict:
        member = _described(inner[1])
        return {"type": "object"} | ({"additionalProperties": member} if member else {})
    if origin is Literal:
        return {"enum": list(inner)}
    if is_dataclass(hint):
        return schema(hint)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    return {"type": TYPES[hint]} if hint in TYPES else {}


def _or_null(described: Mapping[str, Any]) -> dict[str, Any]:
    if "enum" in described:
        return {**described, "enum": [*described["enum"], None]}
    return {**described, "type": [described["type"], "null"]}


@cache
def _documented(module: str) -> dict[str, dict[str, str]]:
    """Returns the docstrings of the attributes of each class of a module."""
    found: dict[str, dict[str, str]] = {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for form in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for one, after in pairwise(form.body):
            match one, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found.setdefault(form.name, {})[name] = " ".join(text.split())
    return found
