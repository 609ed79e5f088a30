"""Reads YAML files: which there are, and what one of them says, with the line of each key. Owns no setting.

The YAML library is imported when a file exists, not before: most runs have none and start faster.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.errors import ConfigError
from hpcstage.reading import read_whole

if TYPE_CHECKING:
    from yaml import SafeLoader

SCHEMA = 1
LARGEST_BYTES = 1 << 18
"""No larger file is read: the safe loader takes about a microsecond for each byte, and libyaml's overflows the stack on
deep nesting."""
SITE_FALLBACK = Path("/etc/hpcstage.yaml")


@dataclass(frozen=True)
class WrittenValue:
    """A value and where it was written, such as `./hpcstage.yaml:3`."""

    value: object
    where: str


@dataclass(frozen=True)
class FileContent:
    """The keys of one file, without `schema` and `locked`."""

    values: dict[str, WrittenValue]
    locked: dict[str, str]
    """For each locked key, where it was locked."""


@dataclass(frozen=True)
class ConfigFile:
    """Where a configuration file may be; one that somebody named (`named_by`) must be there."""

    path: Path
    is_site: bool = False
    named_by: str = ""


def places(option: object, env: Mapping[str, str], cwd: Path, prefix: Path | None = None) -> list[ConfigFile]:
    """Returns all places, the strongest first. Of the site's files only the first that exists is used."""
    found = []
    if option == "":
        raise ConfigError("option --config: an empty value", "use --config FILE, or leave it out")
    if option:
        found.append(ConfigFile(cwd / str(option), named_by="option --config"))
    elif env.get("HPCSTAGE_CONFIG"):
        found.append(ConfigFile(cwd / env["HPCSTAGE_CONFIG"], named_by="environment HPCSTAGE_CONFIG"))
    found.append(ConfigFile(cwd / "hpcstage.yaml"))
    base = env.get("XDG_CONFIG_HOME") or (f"{env['HOME']}/.config" if env.get("HOME") else "")
    if base:
        found.append(ConfigFile(Path(base) / "hpcstage" / "config.yaml"))
    return [*found, _site(env, cwd, prefix or Path(sys.prefix))]


def _site(env: Mapping[str, str], cwd: Path, prefix: Path) -> ConfigFile:
    if env.get("HPCSTAGE_SITE_CONFIG"):
        return ConfigFile(cwd / env["HPCSTAGE_SITE_CONFIG"], True, "environment HPCSTAGE_SITE_CONFIG")
    own = prefix / "etc" / "hpcstage.yaml"
    return ConfigFile(own if own.exists() else SITE_FALLBACK, True)


def read(place: ConfigFile, cwd: Path) -> FileContent | str | None:
    """Returns what the file says; None if there is none; a sentence if it is there, cannot be read and nobody named
    it."""
    try:
        content = read_whole(place.path, LARGEST_BYTES)
    except OSError as error:
        if place.named_by:
            raise ConfigError(f"{place.named_by}: cannot read {place.path}: {error.strerror}") from None
        absent = error.errno in (errno.ENOENT, errno.ENOTDIR)
        return None if absent else f"cannot read {place.path}: {error.strerror}; it is left out"
    name = _shown(place.path, cwd)
    if len(content) > LARGEST_BYTES:
        limit = f"{LARGEST_BYTES >> 10} KiB"
        raise ConfigError(f"{name} is larger than {limit}", "put long lists of files into a list: --data @LIST")
    return _parse(content, name, place.is_site)


def _shown(path: Path, cwd: Path) -> str:
    relative = os.path.relpath(path, cwd)
    return str(path) if relative.startswith("..") else f"./{relative}"


def _parse(content: bytes, name: str, is_site: bool) -> FileContent:
    pairs = _pairs(content, name)
    schema = pairs.pop("schema", None)
    if schema is not None and (isinstance(schema.value, bool) or schema.value != SCHEMA):
        raise ConfigError(f"{schema.where}: schema {schema.value!r} is not known", f"this version reads {SCHEMA}")
    locked = pairs.pop("locked", None)
    if locked is None:
        return FileContent(pairs, {})
    if not is_site:
        raise ConfigError(f"{locked.where}: only the site's file may lock keys", "remove `locked`")
    keys = locked.value if isinstance(locked.value, list) else [locked.value]
    return FileContent(pairs, {str(key): locked.where for key in keys})


def _pairs(content: bytes, name: str) -> dict[str, WrittenValue]:
    import yaml

    try:
        loader = yaml.SafeLoader(content)
        try:
            return _construct(loader, name)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        what = error.problem or error.context
        raise ConfigError(f"{where}: not YAML: {what}", "check indentation and quotes") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not YAML: {' '.join(str(error).split())}") from None


def _construct(loader: SafeLoader, name: str) -> dict[str, WrittenValue]:
    import yaml

    root = loader.get_single_node()
    if root is None or root.tag == "tag:yaml.org,2002:null":
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}:{root.start_mark.line + 1}: not a list of `key: value` lines")
    found: dict[str, WrittenValue] = {}
    for key_node, value_node in root.value:
        key = str(loader.construct_object(key_node, deep=True))
        where = f"{name}:{key_node.start_mark.line + 1}"
        if key in found:
            raise ConfigError(f"{where}: key {key!r} is given twice, first at {found[key].where}", "remove one")
        found[key] = WrittenValue(loader.construct_object(value_node, deep=True), where)
    return found
