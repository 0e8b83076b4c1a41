"""`moegraft schema`: the JSON Schema of rule files, for editors."""

from __future__ import annotations

from moegraft.injection.cli.exits import user_errors
from moegraft.injection.cli.options import PROGRAM
from moegraft.injection.cli.output import open_terminal, write_json


@user_errors(PROGRAM)
def schema() -> None:
    """Print the JSON Schema of rule files with the options of every operator installed here, for editors."""
    from moegraft.injection.schema import rule_schema
    from moegraft.operators.registry import load_registry

    write_json(open_terminal(), rule_schema(load_registry()))
