"""Command groups that import a command's module only when that command is used.

``opcast --help`` lists names and one-line helps from a table; the module of a command is imported
when the command runs or when its own ``--help`` is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from typer._click import Command as ClickCommand
    from typer._click import Context, HelpFormatter


@dataclass(frozen=True)
class Command:
    """Where a command is implemented.

    Attributes:
        module: Module of ``opcast.cli`` that has it.
        function: Name of the function in the module.
        help: One line for the list of commands: the first line of the function's docstring.
        settings: Click's context settings.
    """

    module: str
    function: str
    help: str
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Commands under a common name.

    Attributes:
        help: One line for the list of commands.
        commands: Commands and groups by name.
        former: Subcommand by an option that stood for it in earlier versions, in order of
            precedence.
        former_file: Subcommand that a file given in place of a subcommand stood for.
    """

    help: str
    commands: Mapping[str, Command | Group]
    former: Mapping[str, str] = field(default_factory=dict)
    former_file: str = ""


def lazy_app(group: Group, **settings: Any) -> typer.Typer:
    """A Typer application of a group.

    Args:
        group: The commands of the application.
        settings: Further arguments of :class:`typer.Typer`.
    """

    # Typer instantiates the class itself, so the table has to be an attribute of it.
    class Bound(LazyGroup):
        table = group

    return typer.Typer(
        cls=Bound,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Help and errors hold names of files and programs, whose brackets are not markup.
        rich_markup_mode=None,
        help=group.help,
        **settings,
    )


class LazyGroup(TyperGroup):
    """A Click group whose commands come from :attr:`table`."""

    table: Group

    def __init__(self, **attributes: Any) -> None:
        """Take Click's attributes of a group; its own commands are those of the table."""
        super().__init__(**attributes)
        loaded = _LoadedCommands(self.table.commands)
        self.commands = cast("MutableMapping[str, ClickCommand]", loaded)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """List the commands from the table, importing none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, own.help) for name, own in self.table.commands.items()])

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the group's own options; name the new spelling of a former one."""
        # Only words that would fail anyway: a former spelling never shadows a command.
        if args and args[0] not in self.commands:
            options = {word.partition("=")[0] for word in args}
            successor = next((c for o, c in self.table.former.items() if o in options), "")
            if not successor and self.table.former_file and Path(args[0]).is_file():
                successor = self.table.former_file
            if successor:
                where = f"{ctx.command_path} {successor}"
                ctx.fail(f"'{ctx.command_path} {args[0]}' is now '{where}'; see {where} --help")
        return super().parse_args(ctx, args)


class _LoadedCommands(Mapping[str, "ClickCommand"]):
    """Commands of a table, each imported when it is first looked up."""

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
    """Make a command's Click object."""
    if isinstance(entry, Group):
        app = lazy_app(entry)
        # Without a callback, Typer turns an application with few commands into a single command.
        app.callback()(lambda: None)
    else:
        app = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        function = getattr(import_module(f"{__package__}.{entry.module}"), entry.function)
        app.command(name, context_settings=dict(entry.settings))(function)
    command = typer.main.get_command(app)
    command.name = name
    return command
