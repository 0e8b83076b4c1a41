"""Which model, by which rules: the options that every command with a model shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import typer
import yaml

PANEL = "Model"
# The names that KTransformers' users have in their scripts.
OTHER_NAMES = {
    "model-path": "model",
    "optimize-config-path": "rules",
    "optimize-rule-path": "rules",
    "gguf-path": "gguf",
    "cpu-infer": "threads",
}


def option_name(name: str) -> str:
    """The name an option has here: KTransformers writes --optimize_config_path for --rules, generate top_p for --top-p."""
    dashed = name.replace("_", "-")
    return OTHER_NAMES.get(dashed, dashed)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """A model and how it is loaded."""

    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Hub id or folder; none: the bundled model.", rich_help_panel=PANEL),
    ] = None
    rules: Annotated[
        str | None,
        typer.Option(
            "--rules",
            metavar="FILE",
            help="Rule file, or the name of a shipped one; none: the one for the model's type.",
            rich_help_panel=PANEL,
        ),
    ] = None
    var: Annotated[
        list[str],
        typer.Option("--var", metavar="NAME=VALUE", help="A value for ${NAME} in the rule file; may be repeated.", rich_help_panel=PANEL),
    ] = field(default_factory=list)
    gguf: Annotated[
        str | None,
        typer.Option(
            "--gguf",
            metavar="PATH",
            help="Take the weights from this GGUF file, or folder with those of one model; --model has config and tokenizer.",
            rich_help_panel=PANEL,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="TYPE", help="Of what no rule replaces: float32, float16, bfloat16.", rich_help_panel=PANEL),
    ] = None
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", min=0, help="CPU threads; 0: one for each core.", rich_help_panel=PANEL)
    ] = 0
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the model brings.", rich_help_panel=PANEL)
    ] = False

    def __post_init__(self) -> None:
        self.vars()

    def vars(self) -> Mapping[str, object]:
        """The `--var` values, typed as YAML types them: 0.25 is a number, true a boolean.

        Raises:
            ValueError: one is not NAME=VALUE.
        """
        return dict(_variable(text) for text in self.var)


def _variable(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"--var {text}: give NAME=VALUE, as in --var cache=0.25")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"--var {text}: the value is not YAML; quote it") from error
