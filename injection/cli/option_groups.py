"""Command-line options as frozen dataclasses, so that commands share groups of them and take one argument a group."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

from moegraft.operators.errors import MoegraftError

Options = Any  # a frozen dataclass; each command names its own, so no one type fits


class OptionsError(MoegraftError):
    """Options that contradict each other, or a value that its group refuses."""


def takes_options(*groups: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a Typer command of a function that takes one object of each group, in order.

    A field is annotated as a Typer parameter is: `Annotated[int, typer.Option("--threads")] = 0`. A ValueError from a
    group's own checks becomes an OptionsError.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: object) -> None:
            command(*[_make(group, values) for group in groups])

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {}  # Typer reads the signature alone
        parameters = [_parameter(field, get_type_hints(group, include_extras=True)) for group in groups for field in fields(group)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(field: Field[Any], hints: dict[str, Any]) -> inspect.Parameter:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])


def _make(group: type[Options], values: dict[str, object]) -> Options:
    try:
        return group(**{field.name: values[field.name] for field in fields(group)})
    except ValueError as error:
        raise OptionsError(str(error)) from error
