"""Precedence, provenance, and every bad input: one line that names the key, where it came from, and the fix."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcstage import reading
from hpcstage.config import BY_KEY, SETTINGS, Config, load
from hpcstage.errors import ConfigError, UsageError
from hpcstage.plan.budget import BudgetAsked


class Desk:
    """A working directory, a home and an installation prefix to put files into."""

    def __init__(self, top: Path) -> None:
        self.cwd, self.home, self.prefix = top / "cwd", top / "home", top / "prefix"
        for path in (self.cwd, self.home / ".config" / "hpcstage", self.prefix / "etc"):
            path.mkdir(parents=True)
        self.own = self.cwd / "hpcstage.yaml"
        self.user = self.home / ".config" / "hpcstage" / "config.yaml"
        self.site = self.prefix / "etc" / "hpcstage.yaml"
        self.named = top / "named.yaml"
        self.env = {"HOME": str(self.home)}

    def load(self, cli: Mapping[str, Any] | None = None, **env: str) -> Config:
        return load(cli or {}, {**self.env, **env}, self.cwd, prefix=self.prefix)

    def refused(self, cli: Mapping[str, Any] | None = None, **env: str) -> str:
        with pytest.raises(UsageError) as caught:
            self.load(cli, **env)
        assert caught.value.exit_code == 2
        line = caught.value.line()
        assert "\n" not in line
        return line


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(sys.modules["hpcstage.config.load"], "SITE_FALLBACK", tmp_path / "etc" / "hpcstage.yaml")
    return Desk(tmp_path)


def test_every_level_gives_way_to_the_one_above(desk: Desk, tmp_path: Path) -> None:
    desk.named.write_text("nodes: 13")
    desk.own.write_text("# mine\nnodes: 14")
    desk.user.write_text("nodes: 15")
    desk.site.write_text("schema: 1\n\nnodes: 16")
    fallback = tmp_path / "etc" / "hpcstage.yaml"
    fallback.parent.mkdir()
    fallback.write_text("nodes: 17")
    cli = {"nodes": "11", "config": str(desk.named)}

    def now(cli: Mapping[str, Any], **env: str) -> tuple[int | None, str]:
        config = desk.load(cli, **env)
        return config.nodes, config.origin["nodes"]

    assert now(cli, HPCSTAGE_NODES="12") == (11, "option --nodes")
    del cli["nodes"]
    assert now(cli, HPCSTAGE_NODES="12") == (12, "environment HPCSTAGE_NODES")
    assert now(cli) == (13, f"{desk.named}:1")
    assert now({}, HPCSTAGE_CONFIG=str(desk.named)) == (13, f"{desk.named}:1")
    assert now({}) == (14, "./hpcstage.yaml:2")
    desk.own.unlink()
    assert now({}) == (15, f"{desk.user}:1")
    desk.user.unlink()
    assert now({}) == (16, f"{desk.site}:3")
    assert now({}, HPCSTAGE_SITE_CONFIG=str(desk.named)) == (13, f"{desk.named}:1")
    desk.site.unlink()
    assert now({}) == (17, f"{fallback}:1")
    fallback.unlink()
    assert now({}) == (None, "default")


def test_the_users_file_follows_xdg(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "xdg" / "hpcstage").mkdir(parents=True)
    (tmp_path / "xdg" / "hpcstage" / "config.yaml").write_text("nodes: 3")
    assert desk.load({}, XDG_CONFIG_HOME=str(tmp_path / "xdg")).nodes == 3


def test_levels_are_taken_key_by_key(desk: Desk) -> None:
    desk.own.write_text("mode: upfront\nbudget: 80%\n")
    desk.user.write_text("mode: direct\ndrain_every: 7\n")
    config = desk.load({"strict": True})
    assert (config.mode, config.budget, config.drain_every, config.strict) == ("upfront", "80%", 7, True)
    assert config.origin["drain_every"] == f"{desk.user}:2"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.key)
def test_every_setting_can_come_from_option_variable_and_file(desk: Desk, setting: Any) -> None:
    values = {"data": "/x", "mode": "direct", "order": "o.txt", "local_dir": "ram", "budget": "1GB", "run_dir": "r"}
    values |= {
        "protect": "4+2",
        "strict": "true",
        "intercept": "python",
        "placement": "partition",
        "launcher": "qrsh",
        "survivors": "keep",
    }
    text = values.get(setting.key, "3")
    given = desk.load({setting.key: (text,) if setting.repeats else text})
    assert given.origin[setting.key] == f"option {setting.flag}"
    assert desk.load({}, **{setting.env: text}).origin[setting.key] == f"environment {setting.env}"
    desk.own.write_text(f"{setting.key}: {text}\n")
    config = desk.load({})
    assert config.origin[setting.key] == "./hpcstage.yaml:1"
    told = {"origin", "raw"}
    assert {k: v for k, v in vars(config).items() if k not in told} == {
        k: v for k, v in vars(given).items() if k not in told
    }
    desk.own.unlink()
    assert desk.load({}).origin[setting.key] == "default"


def test_the_types_of_all_values(desk: Desk) -> None:
    desk.own.write_text(
        "data: [/a, '@b c']\nlocal_dir: ram\nbudget: 500GB,2000000\nmax_rate: 2GiB/s\nstrict: yes\n"
        "placement: partition\nnodes: 12\nlauncher: srun\n"
        "intercept: off\ndrain_before: 1m\ndrain: 1.5\n"
    )
    config = desk.load({})
    assert config.data == ("/a", "@b c")
    assert config.budget == "500GB,2000000"
    assert config.budget_asked() == BudgetAsked(size_bytes=500 * 10**9, inodes=2000000)
    assert config.max_rate_bytes_per_s == 2 * 1024**3
    assert (config.strict, config.intercept) == (True, "off")
    assert (config.placement, config.nodes, config.launcher) == ("partition", 12, "srun")
    assert (config.drain_before_s, config.drain_s) == (60, 1.5)


def test_the_defaults(desk: Desk) -> None:
    config = desk.load({})
    assert (config.mode, config.order, config.order_asked()) == ("runtime", "auto", "auto")
    assert config.local_dir is config.budget is config.max_rate_bytes_per_s is config.run_dir is None
    assert config.drain_s == 8
    assert config.budget_asked() == BudgetAsked()
    assert config.warnings == ()


def test_auto_takes_back_what_a_weaker_level_said(desk: Desk) -> None:
    desk.site.write_text("budget: 10%\nmax_rate: 1GB\nlocal_dir: /x\n")
    cli = {"budget": "auto", "max_rate": "none", "local_dir": "auto"}
    config = desk.load(cli)
    assert config.local_dir is config.budget is config.max_rate_bytes_per_s is None


def test_the_order(desk: Desk) -> None:
    assert desk.load({"data": ("/a", "@b")}).order_asked() == "auto"
    for word in ("auto", "manifest"):
        assert desk.load({"data": ("@b",), "order": word}).order_asked() == word
    assert desk.load({"data": ("/a",), "order": "@o.txt"}).order_asked() == "o.txt"


def test_verbosity_is_counted(desk: Desk) -> None:
    assert desk.load({"verbose": 2, "quiet": 0}).verbosity == 2
    assert desk.load({"verbose": 0, "quiet": 1}).verbosity == -1


def test_variables_are_replaced_in_paths_only_and_where_the_shell_did_not(desk: Desk) -> None:
    desk.own.write_text("data: ['$WORK/a', '~/b', '$$x']\nrun_dir: ${WORK}/runs\nlocal_dir: $T4TMPDIR\n")
    config = desk.load({}, WORK="/w")
    assert config.data == ("/w/a", f"{desk.home}/b", "$x")
    assert config.run_dir == "/w/runs"
    assert config.local_dir == "$T4TMPDIR"
    assert desk.load({"data": ("/odd$name",)}, WORK="/w").data == ("/odd$name",)
    assert desk.load({}, WORK="/w", HPCSTAGE_DATA="$WORK/1:/2").data == ("/w/1", "/2")
    line = desk.refused()
    assert "$WORK is not set" in line
    assert "hpcstage.yaml:1" in line


def test_rows_say_what_was_written(desk: Desk) -> None:
    rows = {r["key"]: r for r in desk.load({"budget": "80%", "data": ("/a",)}, HPCSTAGE_STRICT="1").rows()}
    assert list(rows) == [s.key for s in SETTINGS]
    assert rows["budget"] == {"key": "budget", "value": "80%", "source": "option --budget"}
    assert rows["data"]["value"] == ["/a"]
    assert rows["strict"] == {"key": "strict", "value": True, "source": "environment HPCSTAGE_STRICT"}


BAD = {
    "mode": ["fast", "", "1"],
    "budget": ["-5GB", "0", "lots", "0%", "101%", "nan%", "5GB,", "5GB,-1", "5GB,0", "1GB,2,3", "", "9" * 400 + "TB"],
    "max_rate": ["0", "-1MB", "5 parsecs", "0/s"],
    "strict": ["maybe"],
    "intercept": ["tree", "on"],
    "nodes": ["0", "-1", "many", "1.5", "1e9", "99999", "٣", "1_0"],
    "drain": ["-8s", "0", "0.5s", "5 years", "soon"],
    "drain_rate": ["0", "-1MB", "5 parsecs"],
    "drain_before": ["-1", "5 parsecs"],
    "time_limit": ["0", "-1", "soon"],
    "out": ["", "a\0b"],
    "checkpoint": ["", "a\0b"],
    "protect": ["4", "0+2", "4+0", "4+2+1", "a+b"],
    "protect_rate": ["0", "-1MB", "5 parsecs"],
    "drain_every": ["0", "-1", "1.5"],
    "elastic": ["0", "4:2", "2:", ":3", "a:b", "2:3:4", "2-4"],
    "local_dir": [""],
    "run_dir": ["", "a\0b"],
    "order": [""],
}


@pytest.mark.parametrize(("key", "text"), [(key, text) for key, texts in BAD.items() for text in texts])
def test_a_bad_value_is_named_with_its_origin_and_the_fix(desk: Desk, key: str, text: str) -> None:
    line = desk.refused({key: text})
    assert f"{key} (option {BY_KEY[key].flag})" in line
    assert f"use {BY_KEY[key].flag}" in line
    if text and "\0" not in text:
        line = desk.refused({}, **{BY_KEY[key].env: text})
        assert f"{key} (environment {BY_KEY[key].env})" in line
        assert "export" in line


def test_an_empty_variable_is_no_value(desk: Desk) -> None:
    assert desk.load({}, HPCSTAGE_MODE="", HPCSTAGE_DATA="", HPCSTAGE_CONFIG="").origin["mode"] == "default"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node: 3", "unknown key 'node' (did you mean 'nodes'?)"),
        ("local-dir: x", "unknown key 'local-dir' (did you mean 'local_dir'?)"),
        ("MODE: x", "did you mean 'mode'?"),
        ("xyzzy: 3", "`hpcstage config show` lists all keys"),
        ("3: 3", "unknown key '3'"),
        ("mode: [runtime]", "a list is not a single text"),
        ("mode: {a: b}", "a mapping is not a single text"),
        ("budget: -5", "'-5' is not a size"),
        ("budget: 0", "'0' is not more than 0 bytes"),
        ("nodes: 1.5", "'1.5' is not a whole number from 1 to 4096 or auto"),
        ("nodes: true", "true is not a single text or number"),
        ("run_dir: 2026-01-02", "quote it"),
        ("strict: 3", "'3' is neither true nor false"),
        ("data: [[a]]", "a list is not a single text"),
        ("data: [null]", "an empty value"),
        ("data: {a: b}", "a mapping"),
        ("drain: .inf", "'inf' is not a duration"),
        ("mode: direct\nmode: upfront", "'mode' is given twice, first at ./hpcstage.yaml:1"),
        ("schema: 2", "schema 2 is not known (this version reads 1)"),
        ("schema: true", "schema True is not known"),
        ("- mode", "not a list of `key: value` lines"),
        ("mode", "not a list of `key: value` lines"),
        ("mode: [a}", "not YAML"),
        ("mode: a: b", "not YAML"),
        ("\tmode: a", "not YAML"),
        ("mode: !!python/object/apply:os.system [ls]", "not YAML"),
        ("? {a: b}\n: c", "unknown key"),
        ("a: &x [*x]", "not YAML"),
    ],
)
def test_a_bad_file_is_named_with_its_line(desk: Desk, text: str, said: str) -> None:
    desk.own.write_text(f"{text}\n")
    line = desk.refused()
    assert said in line
    number = 2 if "twice" in said else 1
    assert f"./hpcstage.yaml:{number}" in line


def test_a_mistake_in_the_middle_has_its_line(desk: Desk) -> None:
    desk.own.write_text("schema: 1\n# comment\n\nmode: direct\nnodes: cold\n")
    assert desk.refused().startswith("nodes (./hpcstage.yaml:5): 'cold'")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00mode", b"mode: \x01", b"mode: '\xc3'"])
def test_a_file_that_is_no_text(desk: Desk, content: bytes) -> None:
    desk.own.write_bytes(content)
    assert "./hpcstage.yaml" in desk.refused()


@pytest.mark.parametrize("content", ["", "# nothing\n", "---\n", "schema: 1\n", "mode:\n", "data: []\n"])
def test_a_file_that_says_nothing(desk: Desk, content: str) -> None:
    desk.own.write_text(content)
    assert desk.load({}).mode == "runtime"


def test_a_named_file_must_be_there(desk: Desk) -> None:
    assert "option --config: cannot read" in desk.refused({"config": "nowhere.yaml"})
    assert "environment HPCSTAGE_CONFIG: cannot read" in desk.refused({}, HPCSTAGE_CONFIG="nowhere.yaml")
    assert "environment HPCSTAGE_SITE_CONFIG" in desk.refused({}, HPCSTAGE_SITE_CONFIG="nowhere.yaml")


def test_an_unreadable_file_that_nobody_named_is_left_out_and_said(desk: Desk) -> None:
    desk.user.mkdir()
    config = desk.load({})
    assert str(desk.user) in config.warnings[0]
    assert config.mode == "runtime"


def test_a_misspelt_variable_is_said(desk: Desk) -> None:
    config = desk.load({}, HPCSTAGE_MODEE="direct", HPCSTAGE_ACTIVE="x", HPCSTAGE_TEST_SESSION="y")
    assert config.warnings == ("environment HPCSTAGE_MODEE is no setting; did you mean HPCSTAGE_MODE?",)


def test_a_config_error_is_a_usage_error() -> None:
    assert issubclass(ConfigError, UsageError)


def test_a_config_file_without_a_name(desk: Desk) -> None:
    assert "option --config" in desk.refused({"config": ""})
    assert desk.load({}, HPCSTAGE_CONFIG="").mode == "runtime", "an empty variable is one that is not set"


def test_a_pipe_is_a_configuration_file(desk: Desk, tmp_path: Path) -> None:
    readable, writable = os.pipe()
    os.write(writable, b"nodes: 11")
    os.close(writable)
    assert desk.load({"config": f"/dev/fd/{readable}"}).nodes == 11
    os.close(readable)


def test_a_pipe_that_nobody_writes_to(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "NO_WRITER_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    line = desk.refused({"config": str(tmp_path / "pipe")})
    assert "pipe" in line
    assert "nobody writes" in line


@pytest.mark.parametrize("content", [b"data:\n" + b"- /lustre/file\n" * 700_000, b"a: " + b"[" * 10_000_000])
def test_a_file_that_is_too_large_is_refused_at_once(desk: Desk, content: bytes) -> None:
    desk.own.write_bytes(content)
    begun_s = time.process_time()
    assert "./hpcstage.yaml is larger than 256 KiB" in desk.refused()
    assert time.process_time() - begun_s < 1


@pytest.mark.parametrize("bracket", [b"[", b"{", b"- "])
def test_deep_nesting_is_refused(desk: Desk, bracket: bytes) -> None:
    desk.own.write_bytes(b"mode: " + bracket * 100_000)
    assert "not YAML" in desk.refused()
