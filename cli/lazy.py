"""Command groups that import a command's module only when that command is used.

``opcast --help`` takes names and one-line descriptions from a table; the module of a command is
imported when the command runs or when its own ``--help`` is shown.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from ..common.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from typer._click import Command as ClickCommand
    from typer._click import Context, HelpFormatter, Parameter


#: Maximum number of options that ``--help`` lists without sections.
MOST_TOGETHER = 10
with Path(__file__).with_name("commands.toml").open("rb") as _file:
    #: Panels of ``opcast --help``, sections of long helps, and tables of commands.
    LISTED: JsonObject = tomllib.load(_file)
SECTION_OF = {name: title for title, names in LISTED["sections"].items() for name in names}
ORDER = ("Arguments", *LISTED["sections"], "Options")


@dataclass(frozen=True)
class Command:
    """Where a command is implemented.

    Attributes:
        module: Module in ``opcast.cli``.
        function: Name of the function in the module.
        help: One line for the list of commands: the first line of the function's docstring.
        settings: Click's context settings.
        examples: Command lines printed at the end of its help.
    """

    module: str
    function: str
    help: str
    settings: Mapping[str, object] = field(default_factory=dict)
    examples: Sequence[str] = ()


@dataclass(frozen=True)
class Group:
    """Commands under a common name.

    Attributes:
        help: One line for the list of commands.
        commands: Commands and groups by name.
        panels: Headings of the list of commands, each with the names below it; without any, the
            commands stand in one list.
        former: Subcommand by an option that stood for it in earlier versions, in order of
            precedence.
        former_file: Subcommand that a file given in place of a subcommand stood for.
    """

    help: str
    commands: Mapping[str, Command | Group]
    panels: Mapping[str, Iterable[str]] = field(default_factory=dict)
    former: Mapping[str, str] = field(default_factory=dict)
    former_file: str = ""


def entry_of(data: JsonMapping) -> Command | Group:
    """Make a command or a group from its table in ``commands.toml``."""
    given = dict(data)
    if "commands" in given:
        commands = {name: entry_of(own) for name, own in given.pop("commands").items()}
        return Group(commands=commands, **given)
    module, _, function = given.pop("at").partition(":")
    return Command(module, function, **given)


def lazy_app(group: Group, **settings: Any) -> typer.Typer:
    """A Typer application of a group.

    Args:
        group: The commands of the application.
        settings: Further arguments of :class:`typer.Typer`.
    """

    # Typer instantiates the class itself at every call, so the table has to be an attribute of it,
    # as the commands that are loaded: several calls in one process make them once.
    class Bound(LazyGroup):
        table = group
        loaded = _LoadedCommands(group.commands)

    return typer.Typer(
        cls=Bound,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Names of files and programs may contain brackets, which are not markup.
        rich_markup_mode=None,
        help=group.help,
        **settings,
    )


class LazyGroup(TyperGroup):
    """A Click group that takes its commands from :attr:`table`."""

    table: Group
    loaded: Mapping[str, ClickCommand]

    def __init__(self, **attributes: Any) -> None:
        """Pass attributes to Click, and take the commands from the table."""
        super().__init__(**attributes)
        self.commands = cast("MutableMapping[str, ClickCommand]", self.loaded)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """List the commands of the table without importing them."""
        commands = self.table.commands
        for title, names in (self.table.panels or {"Commands": commands}).items():
            with formatter.section(title):
                formatter.write_dl([(name, commands[name].help) for name in names])

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the group's options; suggest the new spelling of a former command line."""
        # Only for unknown commands, so that a former spelling never shadows a command.
        if args and args[0] not in self.commands:
            options = {word.partition("=")[0] for word in args}
            successor = next((c for o, c in self.table.former.items() if o in options), "")
            if not successor and self.table.former_file and Path(args[0]).is_file():
                successor = self.table.former_file
            if successor:
                where = f"{ctx.command_path} {successor}"
                ctx.fail(f"'{ctx.command_path} {args[0]}' is now '{where}'; see {where} --help")
        return super().parse_args(ctx, args)


def spelt(parameter: Parameter) -> str:
    """Name of a parameter as spelt on the command line: ``trip_count`` for ``--trip-count``.

    The parameter's own name, a field of a dataclass, may differ.
    """
    return parameter.opts[0].lstrip("-").replace("-", "_")


class GroupedCommand(TyperCommand):
    """A command whose help groups its options into sections if it has many."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """List the arguments, then the options, in sections if there are many."""
        sections: dict[str, list[tuple[str, str]]] = {}
        options = [p for p in self.get_params(ctx) if p.param_type_name == "option"]
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            title = "Options"
            if parameter.param_type_name == "argument":
                title = "Arguments"
            elif len(options) > MOST_TOGETHER:
                own = getattr(parameter, "rich_help_panel", None)
                title = own or SECTION_OF.get(spelt(parameter), title)
            sections.setdefault(title, []).append(record)
        for title in sorted(sections, key=lambda own: ORDER.index(own)):
            with formatter.section(title):
                formatter.write_dl(sections[title])


class _LoadedCommands(Mapping[str, "ClickCommand"]):
    """Commands of a table, each imported on first access."""

    def __init__(self, table: Mapping[str, Command | Group]) -> None:
        self._table = table
        self._loaded: dict[str, ClickCommand] = {}

    def __getitem__(self, name: str) -> ClickCommand:
        if name not in self._loaded:
            self._loaded[name] = _load(name, self._table[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def _load(name: str, entry: Command | Group) -> ClickCommand:
    """Make the Click command of an entry."""
    if isinstance(entry, Group):
        app = lazy_app(entry)
        # Without a callback, Typer turns an application with few commands into a single command.
        app.callback()(lambda: None)
    else:
        # Imported here because listing the commands must be fast.
        from .from_dataclass import flat

        app = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        function = getattr(import_module(f"{__package__}.{entry.module}"), entry.function)
        # \b keeps the line breaks, so that the examples can be copied.
        lines = "\n".join(("\b", "Examples:", *(f"  {one}" for one in entry.examples)))
        app.command(
            name,
            cls=GroupedCommand,
            context_settings=dict(entry.settings),
            epilog=lines if entry.examples else None,
        )(flat(function))
    command = typer.main.get_command(app)
    command.name = name
    return command
