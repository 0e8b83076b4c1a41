"""Command-line options that several programs share, as frozen dataclasses, and the parsing of their values."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

import typer
import yaml

from moegraft.injection.checkpoint import gguf_alone, local_folder
from moegraft.injection.rules.reading import check_syntax
from moegraft.operators.atomic_file import NotNeededError, new_file
from moegraft.operators.errors import MoegraftError

# Option names of KTransformers, for users who have them in their scripts.
OTHER_NAMES = {
    "model-path": "model",
    "optimize-config-path": "rules",
    "optimize-rule-path": "rules",
    "gguf-path": "gguf",
    "cpu-infer": "threads",
}


def option_name(name: str) -> str:
    """Return the canonical name of an option: `rules` for KTransformers' --optimize_config_path, `top-p` for --top_p."""
    dashed = name.replace("_", "-")
    return OTHER_NAMES.get(dashed, dashed)


def talks_to_user() -> bool:
    """Whether this is the process that people and clients talk to: the only one, or rank 0 of those that torchrun started."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


class OptionsError(MoegraftError):
    """Options that contradict each other, or an invalid value."""


def option(names: str, metavar: str | None, about: str, **more: Any) -> Any:
    """Return what annotates a parameter as an option; `names` is such as "--out -o", and a flag has no `metavar`."""
    return typer.Option(*names.split(), metavar=metavar, help=about, **more)


_model_option = partial(option, rich_help_panel="Model")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model and rules to load, and how."""

    model: Annotated[str | None, _model_option("--model", "NAME", "Hub id, folder or GGUF file; default: the bundled model.")] = None
    rules: Annotated[str | None, _model_option("--rules", "FILE", "Rule file, or the name of a shipped one; default: cpu.")] = None
    var: Annotated[list[str], _model_option("--var", "NAME=VALUE", "Set ${NAME} of the rule file; may be repeated.")] = field(
        default_factory=list
    )
    gguf: Annotated[
        str | None,
        _model_option(
            "--gguf", "PATH", "Load the weights from this GGUF file or folder; config and tokenizer come from --model, if given."
        ),
    ] = None
    dtype: Annotated[str | None, _model_option("--dtype", "TYPE", "Type of what no rule replaces: float32, float16 or bfloat16.")] = None
    threads: Annotated[
        int, _model_option("--threads", "N", "CPU threads; 0: one per core, less up to two that GPUs need.", min=0, max=1024)
    ] = 0
    trust_remote_code: Annotated[bool, _model_option("--trust-remote-code", None, "Run Python code that comes with the model.")] = False

    def __post_init__(self) -> None:
        self.vars()
        if self.model is None and self.gguf is not None:  # the file has config and tokenizer as well
            object.__setattr__(self, "model", self.gguf)
            object.__setattr__(self, "gguf", None)
        # What is checked here shows at once: importing PyTorch takes seconds.
        if self.model is not None and gguf_alone(self.model) is None:
            local_folder(self.model)
        if self.rules is not None:
            check_syntax(self.rules)

    @property
    def naming(self) -> str:
        """The options that name the model, as one writes them behind a command; empty for the bundled model."""
        named = (("model", self.model), ("gguf", self.gguf))
        return "".join(f" --{name} {quote(value)}" for name, value in named if value is not None)

    def vars(self) -> Mapping[str, object]:
        """Return the `--var` values, typed as in YAML: 0.25 is a number, true a boolean.

        Raises:
            OptionsError: one is not NAME=VALUE.
        """
        return dict(_variable(text) for text in self.var)


def _variable(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise OptionsError(f"--var {text}: give NAME=VALUE, as in --var cache=0.25")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise OptionsError(f"--var {text}: the value is not YAML; quote it") from error


class Fields:
    """Which fields of an options dataclass a command has, as metadata of its parameter; the others keep their defaults.

    Args:
        names: of the fields.
        other: annotations that take the place of those that fields have.
    """

    def __init__(self, *names: str, **other: Any) -> None:
        self.names, self.other = names, other


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a function into a Typer command: a parameter that is an options dataclass becomes an option for each of its fields.

    Fields are annotated like Typer parameters: `Annotated[int, option("--threads", "N", "CPU threads.")] = 0`. A function that follows,
    such as `parse_size`, returns the field's value for an option's text and name. A ValueError from the checks of a dataclass becomes an
    OptionsError.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., object], list[str]]] = {}
    parsers: dict[str, Callable[[Any], object]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        group, *metadata = get_args(hints[name]) if get_origin(hints[name]) is Annotated else [hints[name]]
        if not (isinstance(group, type) and is_dataclass(group)):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        only = metadata[0] if metadata else Fields(*(each.name for each in fields(group)))
        chosen = [each for each in fields(group) if each.name in only.names]
        groups[name] = group, [each.name for each in chosen]
        own = get_type_hints(group, include_extras=True)
        for each in chosen:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            annotation = only.other.get(each.name, own[each.name])
            about, *parse = annotation.__metadata__
            if parse:
                parsers[each.name] = partial(parse[0], option=f"--{each.name.replace('_', '-')}")
                annotation = Annotated[str | None, about]
            parameters.append(inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    def run(**values: object) -> None:
        try:
            values |= {name: parse(values[name]) for name, parse in parsers.items()}
            given = {name: group(**{each: values.pop(each) for each in chosen}) for name, (group, chosen) in groups.items()}
        except MoegraftError:
            raise
        except ValueError as error:
            raise OptionsError(str(error)) from error
        command(**given, **values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {}  # Typer reads the signature alone
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        print(f"moegraft {version('moegraft')}")
    except PackageNotFoundError:
        print("moegraft, run from its folder without being installed")
    raise typer.Exit


PROGRAM = "moegraft"
BUNDLED = "the bundled model"
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[KMGT]?)(?:i?B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

VersionOption: TypeAlias = Annotated[bool, option("--version", None, "Print the version and exit.", callback=_show_version, is_eager=True)]
RulesArgument: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="RULES", help="Rule file, or the name of a shipped one; default: cpu.")
]
ConfigOption: TypeAlias = Annotated[
    str | None, _model_option("--model", "NAME", "Hub id or folder (config.json is enough); default: the bundled model.")
]
# The options of commands that load a model, those that plan for one, and those that only look at its structure.
LoadedModelOptions: TypeAlias = Annotated[ModelOptions, Fields("model", "rules", "var", "gguf", "threads", "trust_remote_code")]
PlannedModelOptions: TypeAlias = Annotated[
    ModelOptions, Fields("model", "rules", "var", "gguf", "trust_remote_code", model=ConfigOption, rules=RulesArgument)
]
MetaModelOptions: TypeAlias = Annotated[ModelOptions, Fields("model", "gguf", "trust_remote_code", model=ConfigOption)]


JsonOption: TypeAlias = Annotated[bool, option("--json", None, "Print one JSON object to standard output.")]


def parse_size(text: str | None, option: str) -> int | None:
    """Return the bytes of `64GiB`, `64G` or `64GB`, which all mean 64 * 1024**3 here; None for None.

    Raises:
        OptionsError: the text is not a size, or one of less than a MiB, as where the unit was forgotten.
    """
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionsError(f"{option} {text}: give a size such as 24GiB")
    size = int(float(match["number"]) * 1024 ** _POWERS[match["unit"].upper()])
    if 0 < size < 1 << 20:
        raise OptionsError(f"{option} {text}: {size:,} bytes are too few; give a size with its unit, such as 24GiB")
    return size


def parse_sizes(text: str | None, option: str) -> tuple[int, ...] | None:
    """Return the bytes of sizes separated by commas, one per device.

    Raises:
        OptionsError: one is not a size.
    """
    sizes = [parse_size(part, option) for part in text.split(",")] if text is not None else None
    return None if sizes is None else tuple(size for size in sizes if size is not None)


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What to plan for instead of this machine's memory and rates."""

    ram: Annotated[int | None, option("--ram", "SIZE", "Host memory to plan for, such as 64GiB; default: the free memory."), parse_size] = (
        None
    )
    gpu_memory: Annotated[
        tuple[int, ...] | None,
        option(
            "--gpu-memory",
            "SIZE",
            "Memory of the GPUs to plan for, such as 24GiB or 24GiB,24GiB; 0: none; default: the GPUs of this machine.",
        ),
        parse_sizes,
    ] = None
    gpu_bandwidth: Annotated[
        float | None, option("--gpu-bandwidth", "GB/S", "Memory bandwidth of that GPU; default: measured, else assumed.", min=1)
    ] = None
    link_bandwidth: Annotated[
        float | None, option("--link-bandwidth", "GB/S", "Bandwidth of copies to that GPU; default: measured, else assumed.", min=0.1)
    ] = None


def check_new_file(path: Path, option: str, *, force: bool) -> None:
    """
    Raises:
        OptionsError: it is a folder, a file that is not to be overwritten, or in a folder that does not exist.
        OSError: the file cannot be written.
    """
    if path.is_dir():
        raise OptionsError(f"{option} {path} is a folder; give the name of a file in it")
    if path.exists() and not force:
        raise OptionsError(f"{path} exists; give --force to overwrite it, or {option} with another FILE")
    if not path.parent.is_dir():
        raise OptionsError(f"{path}: the folder {path.parent} does not exist; create it first")
    if path.is_file() or not path.exists():  # others, as a pipe, are opened once
        with new_file(path):
            raise NotNeededError


_sampling = partial(option, rich_help_panel="Sampling (default: the model's generation_config.json)", show_default=False)
SHAPING = ("temperature", "top_p", "top_k", "min_p")  # used only when sampling
LEAST_TEMPERATURE = 1e-5  # below it decoding is greedy: logits divided by less can overflow float32
LEAST_PENALTY = 0.01  # penalties divide logits as well
# The values that `generate` reads as "off": greedy decoding overrides the model's own values with them.
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None}


def is_greedy(temperature: float | None) -> bool:
    """Whether a temperature, the user's or the model's own, means the likeliest token instead of a random one."""
    return temperature is not None and temperature < LEAST_TEMPERATURE


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling options; None keeps the model's own value."""

    max_new_tokens: Annotated[int | None, _sampling("--max-new-tokens", "N", "Maximum length of an answer, in tokens.", min=1)] = None
    do_sample: Annotated[
        bool | None, _sampling("--do-sample/--no-do-sample", None, "Sample tokens at random, or always take the likeliest one.")
    ] = None
    temperature: Annotated[
        float | None,
        _sampling("--temperature", "X", f"Sampling temperature; below {LEAST_TEMPERATURE:g} always takes the likeliest token.", min=0.0),
    ] = None
    top_p: Annotated[
        float | None, _sampling("--top-p", "X", "Sample from the likeliest tokens with this total probability.", min=0.0, max=1.0)
    ] = None
    top_k: Annotated[int | None, _sampling("--top-k", "N", "Sample from this many of the likeliest tokens; 0: all.", min=0)] = None
    min_p: Annotated[
        float | None, _sampling("--min-p", "X", "Exclude tokens below this share of the likeliest token's probability.", min=0.0, max=1.0)
    ] = None
    repetition_penalty: Annotated[float | None, _sampling("--repetition-penalty", "X", "Penalise repeated tokens; 1: off.")] = None
    no_repeat_ngram_size: Annotated[
        int | None, _sampling("--no-repeat-ngram-size", "N", "Never repeat a sequence of this many tokens; 0: off.", min=0)
    ] = None

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"--{option.name.replace('_', '-')} must be a finite number, not {value}")
        if self.repetition_penalty is not None and self.repetition_penalty < LEAST_PENALTY:
            raise ValueError(f"--repetition-penalty must be above 0, and at least {LEAST_PENALTY:g}; 1 means none")
        if self.top_p == 0:
            raise ValueError("--top-p must be above 0; use --no-do-sample to always take the likeliest token")
        if is_greedy(self.temperature):
            if self.do_sample:
                raise ValueError(
                    f"--temperature {self.temperature:g} always takes the likeliest token, and --do-sample a random one; "
                    "give only one of them"
                )
        elif self.do_sample is False and self._shaping():
            names = ", ".join(f"--{name.replace('_', '-')}" for name in self._shaping())
            raise ValueError(f"--no-do-sample leaves {names} without effect; give one or the other")

    def _shaping(self) -> list[str]:
        return [name for name in SHAPING if getattr(self, name) is not None]

    def overrides(self, *, model_samples: bool, model_temperature: float | None = None) -> dict[str, Any]:
        """Return keyword arguments for `generate`; an option that shapes sampling turns it on.

        Args:
            model_samples, model_temperature: `do_sample` and `temperature` of the model's generation config.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None}
        samples = self.do_sample or (self.do_sample is None and (bool(self._shaping()) or model_samples))
        if not samples or is_greedy(model_temperature if self.temperature is None else self.temperature):
            return {**given, **NEUTRAL, "do_sample": False}
        return {**given, "do_sample": True}


setting = partial(option, rich_help_panel="Server")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one server; sizes are in bytes."""

    max_queue: Annotated[int, setting("--max-queue", "N", "Requests that may wait; others are refused with 429.", min=1)] = 64
    max_batch: Annotated[
        int | None,
        setting(
            "--max-batch",
            "N",
            "Requests answered at once; each holds its own context. Default: 32, or 1 if decode steps are captured for a GPU, where one "
            "answer is several times faster.",
            min=1,
        ),
    ] = None
    max_tokens: Annotated[int, setting("--max-tokens", "N", "Maximum length of an answer, in tokens.", min=1)] = 4096
    max_body: Annotated[
        int | None,
        setting(
            "--max-body",
            "BYTES",
            "Maximum request size; larger ones are refused with 413. Default: 1 MiB, or 16 MiB if the model reads images.",
            min=1,
        ),
    ] = None
    image_folder: Annotated[
        Path | None,
        setting("--image-folder", "FOLDER", "Requests may name images in this folder, as file:///PATH; by default none."),
    ] = None
    prefill_chunk: Annotated[
        int, setting("--prefill-chunk", "N", "Prompt tokens computed between two decode steps of other answers; 0: all.", min=0)
    ] = 512
    max_client: Annotated[
        int | None, setting("--max-client", "N", "Requests of one address that may wait; default: 7/8 of --max-queue.", min=1)
    ] = None
    kv_memory: Annotated[
        int | None,
        setting("--kv-memory", "SIZE", "Memory for keys and values, such as 8GiB; requests wait for it. Default: half of what is free."),
        parse_size,
    ] = None
    prefix_cache: Annotated[
        int | None,
        setting("--prefix-cache", "SIZE", "Of --kv-memory, for conversations that may go on, such as 2GiB; 0: none. Default: half."),
        parse_size,
    ] = None
    prefix_cache_dir: Annotated[
        Path | None,
        setting("--prefix-cache-dir", "FOLDER", "Also keep conversations in this folder, for the server to continue after a restart."),
    ] = None
    prefix_cache_disk: Annotated[
        int | None,
        setting(
            "--prefix-cache-disk",
            "SIZE",
            "Limit of the files in --prefix-cache-dir, such as 50GiB. Default: a quarter of the free disk space.",
        ),
        parse_size,
    ] = None
    batch_invariant: Annotated[
        bool,
        setting(
            "--batch-invariant",
            None,
            "Exactly the same answer whatever else is answered. Otherwise greedy texts may differ alone and beside others, as "
            "rounding depends on the batch. Each token of each answer has a pass of its own: about a third of the tokens per second with "
            "8 clients.",
        ),
    ] = False
    strict: Annotated[bool, setting("--strict", None, "Refuse parameters that would be ignored, as they have no effect here.")] = False

    def __post_init__(self) -> None:
        if self.image_folder is not None and not self.image_folder.is_dir():
            raise ValueError(f"--image-folder {self.image_folder}: there is no such folder")
        if self.prefix_cache_dir is not None and self.prefix_cache_dir.exists() and not self.prefix_cache_dir.is_dir():
            raise ValueError(f"--prefix-cache-dir {self.prefix_cache_dir}: this is a file; give a folder")
        if self.prefix_cache_disk is not None and self.prefix_cache_dir is None:
            raise ValueError("--prefix-cache-disk limits --prefix-cache-dir, which is missing; give both")
        if self.prefix_cache_dir is not None and self.prefix_cache == 0:
            raise ValueError("--prefix-cache-dir needs some --prefix-cache in memory, from which it is written; leave --prefix-cache 0 out")
