"""Arguments and options that several verbs share, and options that are the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.errors import FormatError

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Python file with `def job() -> penstock.Job`")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="plan file, from `penstock plan`")]
Json = Annotated[bool, typer.Option("--json", help="print the answer as JSON")]
LONGEST_TIMEOUT_S = 1e7


def _check_timeout(seconds: float) -> float:
    if not 0 < seconds <= LONGEST_TIMEOUT_S:
        raise FormatError(f"--timeout is {seconds:g}; it must be above 0 and at most {LONGEST_TIMEOUT_S:g} seconds")
    return seconds


Timeout = Annotated[
    float,
    typer.Option(callback=_check_timeout, help="seconds after which a worker gives up waiting for another; above 0"),
]


def with_options(cls: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for verbs: replaces the parameter ``options`` by the command-line options of a dataclass.

    typer reads the signature of a verb. It sees an option for each field of ``cls`` that has a help text; the verb
    gets one value of ``cls``.
    """
    added = _parameters(cls)

    def expand(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def run(**values: Any) -> None:
            verb(options=cls(**{parameter.name: values.pop(parameter.name) for parameter in added}), **values)

        signature = inspect.signature(verb, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for name, parameter in signature.parameters.items():
            parameters += added if name == "options" else [parameter]
        vars(run)["__signature__"] = signature.replace(parameters=parameters)
        return run

    return expand


def _parameters(cls: type[Any]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(cls)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[hints[field.name], typer.Option(**field.metadata)],
        )
        for field in _option_fields(cls)
    ]


def _option_fields(cls: Any) -> list[Field[Any]]:
    return [field for field in fields(cls) if "help" in field.metadata]


def command_words(options: Any) -> list[str]:
    """The options as a user types them. Those that have their default are left out."""
    words = []
    for field in _option_fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return words
