"""Commands and groups that say in one line what was mistyped and what may have been meant."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

import click

from hpcstage.config.model import BY_KEY, GROUPS, SETTINGS
from hpcstage.config.parse import nearest
from hpcstage.errors import UsageError

_PROGRAM = 0.75
"""How near they must be to be meant rather than a program of that name."""
_SHORT = 0.6
"""How near names of commands must be: with three letters one of them is much."""


class Command(click.Command):
    """A command whose options need a value that is no option, and that names what it does not take."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the words. Raises UsageError for those that cannot have been meant."""
        ctx.allow_extra_args = True
        try:
            left = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _unknown("option", error.option_name, flags(self, ctx), f"{ctx.command_path} --help") from None
        except click.MissingParameter as error:
            raise UsageError(f"`{ctx.command_path}` needs {_typed(error.param)}", _example(ctx)) from None
        known = {"--", *flags(self, ctx)}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and not ctx.resilient_parsing:
                _require_value(option, ctx.params.get(option.name or ""), known)
        if left and not ctx.resilient_parsing:
            raise UsageError(f"{left[0]!r} is no argument of `{ctx.command_path}`", self._meant(left[0], ctx))
        return left

    def _meant(self, word: str, ctx: click.Context) -> str:
        if "--data" in flags(self, ctx) and os.path.lexists(word):
            return f"did you mean --data {word}?"
        return f"see {ctx.command_path} --help"


class CommandGroup(click.Group):
    """A group that suggests the commands it has."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command that the first word names. Raises UsageError if none has that name."""
        word, names = args[0], self.list_commands(ctx)
        if word in names or word.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        if "run" in names and not nearest(word, names, _PROGRAM) and shutil.which(word):
            raise UsageError(f"no such command {word!r}", f"did you mean hpcstage run -- {word} ...?")
        raise _unknown("command", word, names, f"commands: {', '.join(names)}", _SHORT)


class RunCommand(Command):
    """`run`: its help explains the common options and names the others; that of --help-all explains all."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Returns all parameters, and --help-all."""
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the common options, then the groups in which the settings are declared."""
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        rows = {one.name: row for one in options if (row := one.get_help_record(ctx))}
        common = [setting.key for setting in SETTINGS if setting.is_common]
        common += [name for name in rows if name not in BY_KEY]
        with formatter.section("Common options"):
            formatter.write_dl([rows[name] for name in common])
        explains = _HELP_ALL.name in ctx.meta
        for group in GROUPS:
            rest = [setting for setting in SETTINGS if setting.group == group and not setting.is_common]
            with formatter.section(group):
                if explains:
                    formatter.write_dl([rows[setting.key] for setting in rest])
                else:
                    formatter.write_text("  ".join(setting.flag for setting in rest))
        if not explains:
            formatter.write_paragraph()
            formatter.write_text("`hpcstage run --help-all` explains these, too.")


def _help_all(ctx: click.Context, option: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[option.name or ""] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_help_all, help="Explain all options."
)


def flags(command: click.Command, ctx: click.Context) -> list[str]:
    """Returns all options of a command as they are typed."""
    params = command.get_params(ctx)
    return [flag for option in params if isinstance(option, click.Option) for flag in option.opts]


def _unknown(what: str, word: str, known: Iterable[str], otherwise: str, cutoff: float = 0.75) -> UsageError:
    near = nearest(word, known, cutoff)
    return UsageError(f"no such {what} {word!r}", f"did you mean {near}?" if near else otherwise)


def _typed(param: click.Parameter | None) -> str:
    """Returns what is typed for a parameter."""
    name = f"{param.opts[0]} " if isinstance(param, click.Option) else ""
    return f"{name}{param.metavar}" if param is not None else "more words"


def _example(ctx: click.Context) -> str:
    """Returns the first example of a command's help, or its form."""
    lines = (line.strip() for line in (ctx.command.help or "").splitlines())
    example = next((line for line in lines if line.startswith(f"{ctx.command_path} ")), "")
    return f"for example {example}" if example else " ".join(ctx.get_usage().split()[1:])


def _require_value(option: click.Option, found: object, known: set[str]) -> None:
    """Raises UsageError where the shell left nothing of the value, so that the next word was taken for it."""
    values = found if isinstance(found, tuple) else (found,)
    if not option.is_flag and any(value in known or value == "" for value in values if isinstance(value, str)):
        fix = f"is its variable empty? use {option.opts[0]} {option.metavar or 'VALUE'}"
        raise UsageError(f"{option.opts[0]} has no value", fix)
