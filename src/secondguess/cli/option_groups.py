"""Options made from the fields of a settings class, so that a command receives an instance of the class."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from typer import Context, Option

from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.validation import Settings

SettingsT = TypeVar("SettingsT", bound="Settings")


@dataclass(frozen=True)
class Group:
    """Options that together give one argument of a command, which `build` makes from the context."""

    options: tuple[Parameter, ...]
    build: Callable[[Context], Any]

    def only(self, *names: str) -> Group:
        """Return the group of the options with these names."""
        return Group(tuple(option for option in self.options if option.name in names), self.build)

    def without(self, *names: str) -> Group:
        """Return the group of the options with other names."""
        return Group(tuple(option for option in self.options if option.name not in names), self.build)

    def replace(self, *replacements: Parameter) -> Group:
        """Return the group with other options in place of those of the same names."""
        by_name = {option.name: option for option in (*self.options, *replacements)}
        return Group(tuple(by_name.values()), self.build)


def panel(title: str) -> Callable[..., Any]:
    """Return a function like `typer.Option`, for one panel of `--help` and with the help text first."""

    def option(text: str, *names: str, **settings: Any) -> Any:
        return Option(*names, help=text, rich_help_panel=title, **settings)

    return option


def option(name: str, annotation: Any, default: Any = None) -> Parameter:
    """Return a parameter of a command, annotated as typer reads it."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def options_of(
    kind: type, infos: Mapping[str, Any], types: Mapping[str, Any] | None = None
) -> tuple[Parameter, ...]:
    """Return one option per entry of `infos`, with the type and default of the field of `kind`.

    Options in `types` are read as those instead, such as the name of a file. They, and options with several values, have
    the default None.
    """
    hints, fields = get_type_hints(kind), inspect.signature(kind).parameters
    options = []
    for name, info in infos.items():
        if types and name in types:
            options.append(option(name, Annotated[types[name] | None, info]))
        elif get_origin(hints[name]) in (Sequence, tuple):
            options.append(option(name, Annotated[list[get_args(hints[name])[0]] | None, info]))  # type: ignore[misc]
        else:
            options.append(option(name, Annotated[hints[name], info], fields[name].default))
    return tuple(options)


def with_groups(function: Callable[..., int]) -> Callable[..., int]:
    """Return a command that has the options of each parameter annotated with a `Group` in place of that parameter."""
    parameters = inspect.signature(function, eval_str=True).parameters
    groups = {
        name: part
        for name, parameter in parameters.items()
        for part in get_args(parameter.annotation)
        if isinstance(part, Group)
    }
    shown = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=Context)]
    for name, parameter in parameters.items():
        if name in groups:
            shown += groups[name].options
        elif name != "context":
            shown.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @wraps(function)
    def command(**values: Any) -> int:
        built = {name: group.build(values["context"]) for name, group in groups.items()}
        return function(**{name: built[name] if name in built else values[name] for name in parameters})

    command.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return command


def settings_of(context: Context, kind: type[SettingsT], **more: object) -> SettingsT:
    """Return the settings that a command's parameters of the same names give, and `more`.

    Lists become tuples. A parameter that is None, or an empty list, leaves the default.
    """
    given = {name: context.params.get(name) for name in kind.model_fields} | more
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    try:
        return kind(**{name: value for name, value in (given | lists).items() if value not in (None, ())})
    except BadInputError as error:
        message = str(error)
        for parameter in context.command.params:  # some options are named otherwise than their setting
            message = re.sub(
                rf"\bexpected {parameter.name}(\.\d+)? to", f"expected {parameter.opts[0]} to", message
            )
        raise BadInputError(message) from None


def is_given(context: Context, name: str) -> bool:
    """Return whether an option was given explicitly, even with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")
