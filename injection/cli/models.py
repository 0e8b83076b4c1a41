"""From a command's options to a loaded model, a meta model, rules or a target machine. Commands import this, and torch, when they run."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.images import ImageReader, read_image_reader
from moegraft.injection.cli.options import BUNDLED, ModelOptions, OptionsError, TargetOptions, talks_to_user
from moegraft.injection.cli.output import Terminal, plural
from moegraft.injection.demo import demo_path
from moegraft.injection.injected import Injection
from moegraft.injection.meta_model import MetaModel, ModelSource, build_meta_model, find_model, folder_rules, read_tokenizer
from moegraft.injection.planning import Plan
from moegraft.injection.progress import ProgressLine
from moegraft.injection.rules import DEFAULT_RULES, RuleFile, read_rules
from moegraft.operators.machine import probe_machine
from moegraft.operators.registry import OperatorRegistry, load_registry

if TYPE_CHECKING:
    from moegraft.injection.estimate.forecast import TargetMachine
    from moegraft.injection.estimate.measure import Measurements
    from moegraft.injection.lora import Adapters

MAX_TOKEN_CHARACTERS = 32  # characters per token of a text, on average
# PyTorch keeps what oneDNN prepares for a matrix product in two caches of 1024 entries, here half a MiB for each number of rows, and so for
# each length of a prompt: half a GiB in all. To prepare one again takes less than a millisecond.
MATRIX_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer.

    Attributes:
        name: as the user names it.
        rules: the rule file, as the user names it.
        placement: returns lines of text on what runs where.
        adapters: beside the model's weights; none of them is used before `adapters.use`.
        images: the reader of images, or the reason why there is none.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    placement: Callable[[], list[str]]
    rules: str = DEFAULT_RULES
    adapters: Adapters | None = None
    images: ImageReader | str = "this model reads text, and no images"

    @property
    def context_tokens(self) -> int | None:
        """The positions that the model was made for, prompt and answer together; None if its config sets no bound."""
        bound = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return bound if isinstance(bound, int) and bound > 0 else None


def plan_only(options: ModelOptions, terminal: Terminal) -> Plan:
    """Return the plan for these options, without reading weights.

    Raises:
        MoegraftError: the model cannot be loaded with these options.
    """
    quiet_libraries()
    return optimize_and_load(model_of(options), options.rules, dry_run=True, progress=terminal.progress, **_load_arguments(options))


def load_model(
    options: ModelOptions, terminal: Terminal, rules: RuleFile | None = None, adapters: Mapping[str, str] | None = None
) -> LoadedModel:
    """Load a model and its tokenizer; `rules` replace those that the options name.

    In a process that holds experts for another one's model, compute for that process and exit when it ends.

    Args:
        adapters: folders of LoRA adapters, by the name of each.

    Raises:
        MoegraftError: the model, its tokenizer, the rules or an adapter cannot be used.
    """
    quiet_libraries()
    for name, capacity in MATRIX_CACHES.items():
        os.environ.setdefault(name, capacity)
    if options.threads:
        torch.set_num_threads(options.threads)
    with terminal.stage("reading the tokenizer"):
        # First, so that its errors are reported before weights are read.
        folder = find_model(model_of(options), trust_remote_code=options.trust_remote_code, weights=False).folder
        tokenizer = read_tokenizer(folder, trust_remote_code=options.trust_remote_code)
    if adapters and talks_to_user():
        check_adapters(options, adapters)
    progress: bool | ProgressLine = talks_to_user() and terminal.progress
    arguments = _load_arguments(options) if rules is None else {**_load_arguments(options), "vars": None}
    model = optimize_and_load(model_of(options), rules or rules_of(options), progress=progress, **arguments)
    injection = model.moegraft
    assert isinstance(injection, Injection), "optimize_and_load sets model.moegraft"
    if injection.follows:
        for stop in (signal.SIGINT, signal.SIGTERM):  # rank 0 gets them too, and may have an answer to finish
            signal.signal(stop, signal.SIG_IGN)
        injection.follow()
        raise typer.Exit
    if not talks_to_user():
        raise OptionsError("'parallel: {shares: none}' gives each process a whole model, and this program needs one: start one process")
    beside = None
    if adapters:
        from moegraft.injection.lora import Adapters

        with terminal.stage("reading adapters"):
            beside = Adapters(model, adapters)
    reader, named = read_image_reader(folder, model, tokenizer), rules_of(options)
    name = named if isinstance(named, str) else "those of the model's folder"
    return LoadedModel(options.model or BUNDLED, model, tokenizer, injection.placement, name, beside, reader)


def check_adapters(options: ModelOptions, adapters: Mapping[str, str]) -> None:
    """Compare adapters with the model before weights are read.

    Raises:
        OptionsError: PEFT is not installed.
        CheckpointError, UnsupportedModelError: one is damaged, or not for this model.
    """
    if importlib.util.find_spec("peft") is None:
        raise OptionsError("--adapter needs PEFT, which is not installed: pip install 'moegraft[train]'")
    from moegraft.injection.lora import check_adapter

    skeleton = open_meta_model(options).skeleton
    for folder in adapters.values():
        check_adapter(folder, skeleton)


def text_ids(loaded: LoadedModel, content: bytes, name: object, tokens: int, least: int = 0) -> torch.Tensor:
    """Return at most the first `tokens` tokens of a text, (T,) int64.

    Raises:
        OptionsError: the text, which errors call `name`, is not UTF-8, or has fewer than `least` tokens.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise OptionsError(f"{name}: not UTF-8 text (byte 0x{content[error.start]:02x} at offset {error.start})") from error
    text = text[: tokens * MAX_TOKEN_CHARACTERS]  # tokenizers are slow on text that is not used
    ids = torch.tensor(loaded.tokenizer(text, verbose=False)["input_ids"][:tokens], dtype=torch.int64)
    if len(ids) < least:
        raise OptionsError(f"{name}: the text has {plural(len(ids), 'token')}; at least {least} are needed, and some hundred are better")
    return ids


def model_of(options: ModelOptions) -> str:
    """Return the hub id, folder or GGUF file of the model; by default the bundled model's folder."""
    return os.fspath(demo_path()) if options.model is None else options.model


def short_name(model: str | None) -> str:
    """Return a model's name without the path of its folder."""
    if model is None:
        return BUNDLED
    return Path(model).resolve().name if Path(model).expanduser().exists() else model


def _load_arguments(options: ModelOptions) -> dict[str, Any]:
    return {
        "dtype": options.dtype,
        "vars": options.vars(),
        "gguf": options.gguf,
        "threads": options.threads,
        "trust_remote_code": options.trust_remote_code,
    }


def quiet_libraries() -> None:
    """Silence the warnings of transformers: they are about arguments that this program sets, and would interrupt an answer."""
    transformers_logging.set_verbosity(logging.ERROR)


def find_source(options: ModelOptions) -> ModelSource:
    """Return where the model's files are.

    Raises:
        CheckpointError: there is no such model.
    """
    return find_model(model_of(options), trust_remote_code=options.trust_remote_code, gguf=options.gguf)


def open_meta_model(options: ModelOptions, *, weights: bool = False) -> MetaModel:
    """
    Raises:
        CheckpointError, UnsupportedModelError: there is no such model, or it cannot be built.
    """
    quiet_libraries()
    return build_meta_model(model_of(options), weights=weights, trust_remote_code=options.trust_remote_code, gguf=options.gguf)


def rules_of(options: ModelOptions) -> str | dict[str, Any]:
    """Return the rules that the user names, else those that the model's folder states, else the default."""
    return options.rules or folder_rules(model_of(options)) or DEFAULT_RULES


def model_and_rules(options: ModelOptions) -> tuple[MetaModel, RuleFile, OperatorRegistry]:
    """
    Raises:
        RuleErrors: the rule file has mistakes that show without a model.
        CheckpointError, UnsupportedModelError: there is no such model, or it cannot be built.
    """
    registry = load_registry()
    # Rules first: their errors show at once, while building a model takes seconds.
    rules = read_rules(rules_of(options), vars=options.vars(), registry=registry)
    return open_meta_model(options), rules, registry


def target_machine(measured: Measurements | None, options: TargetOptions) -> TargetMachine:
    """Return this machine, with the memory and rates that options state instead of its own.

    Raises:
        OptionsError: a bandwidth is stated without a GPU.
    """
    from moegraft.injection.estimate.forecast import TargetMachine
    from moegraft.injection.estimate.memory import budget_of

    machine = probe_machine()
    of_gpu = measured.gpu if measured is not None else None
    gbps, link_gbps = options.gpu_bandwidth, options.link_bandwidth
    budget = budget_of(machine, options.gpu_memory, of_gpu, gbps=gbps, link_gbps=link_gbps)
    if budget is None and not (gbps is None and link_gbps is None):
        raise OptionsError(
            "--gpu-bandwidth and --link-bandwidth need a GPU, and this machine has none: state its memory as well, with --gpu-memory 24GiB"
        )
    return TargetMachine(machine.available_bytes if options.ram is None else options.ram, measured, budget)
