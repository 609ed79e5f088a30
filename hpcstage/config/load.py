"""Makes one `Config` of options, variables and files: precedence, provenance, and errors that name key, origin and fix.

The module owns the order of precedence: option > environment > --config file > ./hpcstage.yaml > user's file > site's
file > default. The YAML library is imported when a file exists, not before: most runs have none and start faster.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage.config.model import BY_KEY, FIELD_OF, OTHER_VARIABLES, SETTINGS, Config, Setting
from hpcstage.config.parse import expand, nearest
from hpcstage.errors import ConfigError, UsageError
from hpcstage.reading import read_whole

if TYPE_CHECKING:
    from yaml import SafeLoader

SCHEMA = 1
LARGEST_BYTES = 1 << 18
"""No larger file is read: the safe loader takes about a microsecond for each byte, and libyaml's overflows the stack on
deep nesting."""
SITE_FALLBACK = Path("/etc/hpcstage.yaml")
_OURS = "HPCSTAGE_"


@dataclass(frozen=True)
class SettingValue:
    """A value and where it was written, such as `./hpcstage.yaml:3`."""

    value: object
    where: str
    by_shell: bool = False
    """Whether the shell has already replaced variables."""


@dataclass(frozen=True)
class ConfigFile:
    """Where a configuration file may be; one that somebody named (`named_by`) must be there."""

    path: Path
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
        return ConfigFile(cwd / env["HPCSTAGE_SITE_CONFIG"], "environment HPCSTAGE_SITE_CONFIG")
    own = prefix / "etc" / "hpcstage.yaml"
    return ConfigFile(own if own.exists() else SITE_FALLBACK)


def _read(place: ConfigFile, cwd: Path) -> dict[str, SettingValue] | str | None:
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
    return _parse(content, name)


def _shown(path: Path, cwd: Path) -> str:
    relative = os.path.relpath(path, cwd)
    return str(path) if relative.startswith("..") else f"./{relative}"


def _parse(content: bytes, name: str) -> dict[str, SettingValue]:
    pairs = _pairs(content, name)
    schema = pairs.pop("schema", None)
    if schema is not None and (isinstance(schema.value, bool) or schema.value != SCHEMA):
        raise ConfigError(f"{schema.where}: schema {schema.value!r} is not known", f"this version reads {SCHEMA}")
    return pairs


def _pairs(content: bytes, name: str) -> dict[str, SettingValue]:
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


def _construct(loader: SafeLoader, name: str) -> dict[str, SettingValue]:
    import yaml

    root = loader.get_single_node()
    if root is None or root.tag == "tag:yaml.org,2002:null":
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}:{root.start_mark.line + 1}: not a list of `key: value` lines")
    found: dict[str, SettingValue] = {}
    for key_node, value_node in root.value:
        key = str(loader.construct_object(key_node, deep=True))
        where = f"{name}:{key_node.start_mark.line + 1}"
        if key in found:
            raise ConfigError(f"{where}: key {key!r} is given twice, first at {found[key].where}", "remove one")
        found[key] = SettingValue(loader.construct_object(value_node, deep=True), where)
    return found


def load(cli: Mapping[str, Any], env: Mapping[str, str], cwd: Path, *, prefix: Path | None = None) -> Config:
    """Returns the configuration of this run.

    `cli` has the options that were given, by key (None: not given), `config` for `--config`, `verbose` and `quiet`;
    other names are left alone. `prefix` is where the package is installed (for `<prefix>/etc/hpcstage.yaml`). Raises
    UsageError or ConfigError.
    """
    found = [_from_options(cli), _from_environment(env)]
    warnings = list(_misspelt_variables(env))
    for place in places(cli.get("config"), env, cwd, prefix):
        content = _read(place, cwd)
        if isinstance(content, dict):
            _check_keys(content)
            found.append({key: written for key, written in content.items() if written.value is not None})
        elif content:
            warnings.append(content)
    verbosity = int(cli.get("verbose") or 0) - int(cli.get("quiet") or 0)
    return _check(_merge(found, env), verbosity, tuple(warnings))


def _from_options(cli: Mapping[str, Any]) -> dict[str, SettingValue]:
    given = {k: v for k, v in cli.items() if k in BY_KEY and v is not None and v != ()}
    return {k: SettingValue(v, f"option {_flag(k, v)}", by_shell=True) for k, v in given.items()}


def _flag(key: str, value: object) -> str:
    setting = BY_KEY[key]
    return f"--no-{setting.flag[2:]}" if setting.is_switch and value is False else setting.flag


def _from_environment(env: Mapping[str, str]) -> dict[str, SettingValue]:
    values = {}
    for setting in SETTINGS:
        value: object = env.get(setting.env)
        if not value:
            continue
        if setting.repeats:
            value = [part for part in str(value).split(":") if part]
        values[setting.key] = SettingValue(value, f"environment {setting.env}")
    return values


def _misspelt_variables(env: Mapping[str, str]) -> Iterable[str]:
    known = {name.removeprefix(_OURS) for name in ({s.env for s in SETTINGS} | OTHER_VARIABLES.keys())}
    for name in sorted(env):
        own = name.removeprefix(_OURS)
        if name.startswith(_OURS) and own not in known and (near := nearest(own, known, 0.75)):
            yield f"environment {name} is no setting; did you mean {_OURS}{near}?"


def _check_keys(content: Mapping[str, SettingValue]) -> None:
    for key, written in content.items():
        if key not in BY_KEY:
            near = nearest(key.replace("-", "_").lower(), BY_KEY, 0.75)
            hint = f"did you mean {near!r}?" if near else "`hpcstage config show` lists all keys"
            raise ConfigError(f"{written.where}: unknown key {key!r}", hint)


def _merge(found: list[dict[str, SettingValue]], env: Mapping[str, str]) -> Config:
    values: dict[str, Any] = {}
    raw: dict[str, object] = {}
    origin: dict[str, str] = {}
    for setting in SETTINGS:
        default = SettingValue(setting.default, "default", by_shell=True)
        written = next((one[setting.key] for one in found if setting.key in one), default)
        values[FIELD_OF[setting.key]] = _parsed(setting, written, env)
        raw[setting.key], origin[setting.key] = _plain(setting, values, written), written.where
    return Config(**values, raw=raw, origin=origin)


def _parsed(setting: Setting, written: SettingValue, env: Mapping[str, str]) -> object:
    value = written.value
    try:
        if setting.is_path and not written.by_shell:
            value = [expand(v, env) if isinstance(v, str) else v for v in value] if isinstance(value, list) else value
            value = expand(value, env) if isinstance(value, str) else value
        return setting.parse(value)
    except ValueError as error:
        kind = UsageError if written.by_shell else ConfigError
        raise kind(f"{setting.key} ({written.where}): {error}", _fix(setting, written.where)) from None


def _fix(setting: Setting, where: str) -> str:
    accepted = setting.metavar or "true|false"
    if where.startswith("option"):
        return f"use {setting.flag} {accepted}".strip()
    if where.startswith("environment"):
        return f"export {setting.env}={accepted}, or unset it"
    return f"write `{setting.key}: {accepted}` there"


def _plain(setting: Setting, values: Mapping[str, Any], written: SettingValue) -> object:
    if setting.repeats:
        return list(values[FIELD_OF[setting.key]])
    if setting.is_switch or setting.choices:
        return values[FIELD_OF[setting.key]]
    return written.value


def _check(config: Config, verbosity: int, warnings: tuple[str, ...]) -> Config:
    """Checks what needs several values at once, and adds verbosity and warnings."""
    if config.order == "given" and config.data and not any(d.startswith("@") for d in config.data):
        what = f"order given ({config.origin['order']}) needs a list among the datasets"
        raise UsageError(what, "use --data @LIST, or --order FILE")
    return replace(config, verbosity=verbosity, warnings=warnings)
