"""The options that several commands share, and how their values are read."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from moegraft.injection.cli.model_options import ModelOptions
from moegraft.injection.cli.option_groups import OptionsError

PROGRAM = "moegraft"
BUNDLED = "the bundled model"

RulesArgument: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="RULES", help="Rule file, or the name of a shipped one; none: the one for the model's type.")
]
ModelOption: TypeAlias = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Hub id or folder (its config.json is enough); none: the bundled model.")
]
GgufOption: TypeAlias = Annotated[
    str | None, typer.Option("--gguf", metavar="PATH", help="Take the weights from this GGUF file, or folder with those of one model.")
]
VarOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--var", metavar="NAME=VALUE", help="A value for ${NAME} in the rule file; may be repeated.")
]
TrustOption: TypeAlias = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model brings.")]
GpuMemoryOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory", metavar="SIZE", help="GPU to plan for, here or not, as 24GiB, or 24GiB,24GiB; 0: none; without it: those here."
    ),
]
GpuBandwidthOption: TypeAlias = Annotated[
    float | None,
    typer.Option("--gpu-bandwidth", metavar="GB/S", min=1, help="What that GPU's memory reaches; none: measured, else assumed."),
]
LinkBandwidthOption: TypeAlias = Annotated[
    float | None,
    typer.Option("--link-bandwidth", metavar="GB/S", min=0.1, help="What copies to that GPU reach; none: measured, else assumed."),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def model_options(
    model: str | None,
    rules: str | None = None,
    var: list[str] | None = None,
    *,
    gguf: str | None = None,
    threads: int = 0,
    trust_remote_code: bool = False,
) -> ModelOptions:
    """
    Raises:
        OptionsError: a `--var` that is not NAME=VALUE.
    """
    try:
        return ModelOptions(model=model, rules=rules, var=var or [], gguf=gguf, threads=threads, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise OptionsError(str(error)) from error
