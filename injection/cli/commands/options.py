"""The options that several commands share, and how their values are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import typer

from moegraft.injection.cli.model_options import ModelOptions
from moegraft.injection.cli.option_groups import OptionsError

PROGRAM = "moegraft"
BUNDLED = "the bundled model"
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[KMGT]?)(?:i?B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

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


@dataclass(frozen=True, slots=True)
class StatedMachine:
    """What the options say of the machine to plan for; None: what is here, and measured here.

    Attributes:
        ram: bytes of host memory.
        gpus: bytes of each GPU.
        gpu_bandwidth, link_bandwidth: GB/s.
    """

    ram: int | None
    gpus: tuple[int, ...] | None
    gpu_bandwidth: float | None
    link_bandwidth: float | None


def stated_machine(ram: str | None, gpu_memory: str | None, gpu_bandwidth: float | None, link_bandwidth: float | None) -> StatedMachine:
    """
    Raises:
        OptionsError: a size that is none.
    """
    return StatedMachine(parse_size(ram, "--ram"), parse_sizes(gpu_memory, "--gpu-memory"), gpu_bandwidth, link_bandwidth)


def parse_size(text: str | None, option: str) -> int | None:
    """Bytes of `64GiB`, `64G` or `64GB`, all of which mean 64 * 1024**3 as memory is sold; None of None.

    Raises:
        OptionsError: the text is no size.
    """
    if text is None:
        return None
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise OptionsError(f"{option} {text}: give a size such as 24GiB")
    return int(float(found["number"]) * 1024 ** _POWERS[found["unit"].upper()])


def parse_sizes(text: str | None, option: str) -> tuple[int, ...] | None:
    """Sizes with commas between: one for each device.

    Raises:
        OptionsError: one is no size.
    """
    sizes = [parse_size(part, option) for part in text.split(",")] if text is not None else None
    return None if sizes is None else tuple(size for size in sizes if size is not None)
