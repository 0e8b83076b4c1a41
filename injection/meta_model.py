"""From a hub id or folder to a model on meta with its checkpoint, config and tokenizer: the input of `plan` and `graft`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from moegraft.injection.checkpoint import expanded, gguf_alone, local_folder
from moegraft.injection.checkpoint.files import open_checkpoint, weight_files
from moegraft.injection.checkpoint.quantised import SETTINGS_KEYS, paired, quantisation_of, why_unreadable
from moegraft.injection.checkpoint.sources import CheckpointWeights, StoredWeights
from moegraft.operators.autoload import METHOD
from moegraft.operators.decode.mtp_layers import REPEATED, add_mtp_layers, is_declared_mtp_key, mtp_layers, why_no_mtp, with_declared_mtp
from moegraft.operators.errors import CheckpointError, UnsupportedModelError, error_sentence

if TYPE_CHECKING:
    from moegraft.injection.checkpoint.gguf.model import GgufModel

# Everything but weights. `weight_files` lists those that transformers would load, as some repositories hold them in several forms.
DOWNLOADED = ["*.json", "*.txt", "*.jinja", "*.model", "*.py"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The files of a model.

    Attributes:
        gguf: the weights; None if they are in `folder`.
        quantised: the quantisation settings of the weights, which `config` lacks.
        left_out: the parts of the checkpoint's model beside `model_class`, which writes text, as its config names them.
    """

    folder: Path
    config: PretrainedConfig
    model_class: type[PreTrainedModel]
    gguf: GgufModel | None = None
    quantised: Mapping[str, Any] | None = None
    left_out: tuple[str, ...] = ()


def resolve_folder(model: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """Return the folder of a model. The files of a hub model are downloaded to Hugging Face's cache; `weights` includes its weights.

    Raises:
        CheckpointError: there is no such folder, and the hub has no such model or cannot be reached.
    """
    name = os.fspath(model)
    if (here := local_folder(name)) is not None:
        return here
    try:
        folder = Path(snapshot_download(name, allow_patterns=DOWNLOADED))
        return Path(snapshot_download(name, allow_patterns=weight_files(folder))) if weights else folder
    except HFValidationError as error:
        raise CheckpointError(f"{name}: neither a folder here nor a hub id (owner/name)") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{name}: no folder of that name here, and the hub could not provide it ({reason})") from error


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """
    Raises:
        CheckpointError: there is no config, it cannot be read, or a value is one with which model classes compute unchecked.
        UnsupportedModelError: this version of transformers does not know the model type.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json in this folder; name the folder of a Hugging Face checkpoint")
    _check_config(path)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{path}: {error_sentence(error)}") from error
    except StrictDataclassError as error:
        raise CheckpointError(f"{path}: {' '.join(str(error).split())}") from error
    except _CONFIG_ERRORS as error:
        raise CheckpointError(f"{path}: not a readable model config ({error_sentence(error)})") from error
    assert isinstance(config, PretrainedConfig), f"AutoConfig returned a {type(config).__name__}"
    return config


# What the classes of transformers raise for values that they do not expect.
_CONFIG_ERRORS = (OSError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError, AssertionError, ImportError)
MAX_LAYERS = 512  # four times those of the deepest models; a layer takes milliseconds even on meta
MAX_INTEGER = (1 << 31) - 1
_ANY_INTEGER = re.compile(r"max_len")  # where it is a limit that is not used, configs have 10^30
_LAYERS = re.compile(r"(layers|layer|depth|blocks)$")


def _check_config(path: Path) -> None:
    """Refuse values that no model has, with which model classes compute unchecked."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable model config ({error_sentence(error)})") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{path}: not a readable model config (a mapping is expected, not a {type(body).__name__})")
    architectures, auto_map = body.get("architectures") or [], body.get("auto_map") or {}
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"{path}: 'architectures' must be a list of class names; download the file again")
    if not isinstance(auto_map, dict):
        raise CheckpointError(f"{path}: 'auto_map' must be a mapping; download the file again")
    waiting: list[tuple[str, object]] = list(body.items())
    while waiting:
        name, value = waiting.pop()
        if name in SETTINGS_KEYS and value is not None and not isinstance(value, dict):
            raise CheckpointError(f"{path}: '{name}' must be a mapping; download the file again")
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(name, inner) for inner in value]
        elif (
            isinstance(value, int) and not _ANY_INTEGER.search(name) and abs(value) > (MAX_LAYERS if _LAYERS.search(name) else MAX_INTEGER)
        ):
            raise CheckpointError(f"{path}: '{name}' is {str(value)[:100]}, more than any model has; download the file again")


def _why_unloadable(source: ModelSource) -> str | None:
    """Return the reason why a quantised checkpoint cannot be loaded; None if it can, or is not quantised."""
    settings = quantisation_of(source.config)
    reason = None if settings is None else why_unreadable(settings)
    return None if reason is None else f"{source.folder}: this checkpoint is quantised by a method that cannot be loaded: {reason}"


def find_class(folder: Path, config: PretrainedConfig, *, trust_remote_code: bool = False) -> type[PreTrainedModel]:
    """Return the class that generates text with this config: the config's architecture, else its causal language model.

    The architecture comes first because the checkpoint's keys are named after it: an image-text model's weights have other names than
    those of its language model alone. Of a model that speaks the text as well (Qwen3-Omni), it is the class of the part that writes it.

    Raises:
        UnsupportedModelError: transformers has no such class.
    """
    remote = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    found: Any = None
    if remote and trust_remote_code:
        found = get_class_from_dynamic_module(remote, str(folder))
    elif (part := _writing_part(config)) is not None:
        found = AutoModelForImageTextToText._model_mapping.get(type(part), None)
    else:
        named = [getattr(transformers, name, None) for name in config.architectures or []]
        generating = [cls for cls in named if isinstance(cls, type) and issubclass(cls, GenerationMixin)]
        found = generating[0] if generating else AutoModelForCausalLM._model_mapping.get(type(config), None)
    if found is None:
        hint = "; the model has its own code: pass trust_remote_code=True if you trust it" if remote else ""
        raise UnsupportedModelError(f"{folder}: transformers has no text-generating class for model type '{config.model_type}'{hint}")
    assert issubclass(found, PreTrainedModel), f"{found} is no PreTrainedModel"
    model_class: type[PreTrainedModel] = found
    return model_class


def _writing_part(config: PretrainedConfig) -> PretrainedConfig | None:
    """Return the part of a composite config that is itself composite and has the text config of the whole; None where none is."""
    parts: list[Any] = [part for name in config.sub_configs if getattr(part := getattr(config, name, None), "sub_configs", None)]
    return next((part for part in parts if part.get_text_config() is config.get_text_config() is not part), None)


def _config_of(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PretrainedConfig:
    """Return the part of a composite config that `model_class` is built from, with the dtype and quantisation of the whole."""
    parts = (_writing_part(config), config.get_text_config() if "text_config" in config.sub_configs else None)
    part = next((part for part in parts if type(part) is model_class.config_class), None)
    if part is None or part is config:
        return config
    for key in ("dtype", *SETTINGS_KEYS):
        if getattr(config, key, None) is not None and getattr(part, key, None) is None:
            setattr(part, key, getattr(config, key))
    return part


def find_model(
    model: str | os.PathLike[str], *, trust_remote_code: bool = False, weights: bool = True, gguf: str | os.PathLike[str] | None = None
) -> ModelSource:
    """Resolve a hub id or folder to its files, config and model class; `gguf` holds the weights instead of the folder.

    A GGUF file that is the model has its config and tokenizer as well.

    Raises:
        CheckpointError, UnsupportedModelError: as `resolve_folder`, `read_config`, `find_class` and `with_gguf`.
    """
    if (alone := gguf_alone(model)) is not None:
        from moegraft.injection.checkpoint.gguf.description import folder_of

        model, gguf = folder_of(alone), alone if gguf is None else gguf
    folder = resolve_folder(model, weights=weights and gguf is None)
    config = read_config(folder, trust_remote_code=trust_remote_code)
    model_class = find_class(folder, config, trust_remote_code=trust_remote_code)
    whole, config = config, _config_of(model_class, config)
    others = whole.sub_configs if config is _writing_part(whole) else ()
    left_out = tuple(name.removesuffix("_config") for name in others if getattr(whole, name) is not config)
    stated = getattr(config, SETTINGS_KEYS[0], None)
    if isinstance(stated, Mapping) and stated.get("quant_method") == METHOD:
        config = as_floats(config)
    source = ModelSource(folder, config, model_class, left_out=left_out)
    return source if gguf is None else with_gguf(source, gguf)


def folder_rules(model: object) -> dict[str, Any] | None:
    """Return the rules that the config.json of a model's folder states; None where it states none, or is not on this machine."""
    try:
        body = json.loads((Path(str(model)).expanduser() / "config.json").read_text(encoding="utf-8"))
        settings = body["quantization_config"]
        return dict(settings["rules"]) if settings["quant_method"] == METHOD else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, RecursionError):  # read_config reports what is wrong
        return None


def as_floats(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy without quantisation settings, which transformers would act on."""
    config = deepcopy(config)
    for part in (config, config.get_text_config()):
        for key in SETTINGS_KEYS:
            if getattr(part, key, None) is not None:
                delattr(part, key)
    return config


def with_gguf(source: ModelSource, gguf: str | os.PathLike[str]) -> ModelSource:
    """Return the same model with its weights in GGUF files; of one for text and images, the language model, as the files have no more.

    Raises:
        CheckpointError: the files are damaged, or belong to another model.
        UnsupportedModelError: GGUF files of this family cannot be loaded.
    """
    from moegraft.injection.checkpoint.gguf.families import FAMILIES
    from moegraft.injection.checkpoint.gguf.model import open_gguf

    # The config's quantisation is that of the folder's own weights.
    config = as_floats(source.config)
    text = config.get_text_config()
    language_model: Any = AutoModelForCausalLM._model_mapping.get(type(text), None)
    if text is not config and text.model_type in FAMILIES and language_model is not None:
        source, config = replace(source, model_class=language_model), text
    return replace(source, config=config, gguf=open_gguf(expanded(gguf), config))


def meta_skeleton(source: ModelSource, dtype: torch.dtype, *, mtp: bool = False) -> PreTrainedModel:
    """Build the stock model with every parameter on meta. Rules are matched against it, and checkpoint keys mapped to it.

    Args:
        mtp: whether it has its layers for multi-token prediction as well.

    Raises:
        UnsupportedModelError: the class cannot be built from the config.
    """
    try:
        with torch.device("meta"):
            skeleton: PreTrainedModel = source.model_class._from_config(deepcopy(source.config), dtype=dtype)
            if mtp:
                add_mtp_layers(skeleton)
                mtp_layers(skeleton).to(dtype)
        # Of experts: a model without shared experts may have empty matrices of these.
        empty = [path for path, parameter in skeleton.named_parameters() if parameter.ndim == 3 and not parameter.numel()]
        if empty:
            raise ValueError(f"a size of {empty[0]} is 0")
    except _CONFIG_ERRORS as error:
        name = source.model_class.__name__
        raise UnsupportedModelError(f"{source.folder}: {name} cannot be built from this config: {error_sentence(error)}") from error
    return skeleton


def read_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Read the tokenizer beside a checkpoint.

    Raises:
        CheckpointError: there is none that can be read.
    """
    hint = "tokenizer.json, or the files of this model type's own tokenizer, must be in the folder"
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # for a damaged file transformers raises many kinds, tokenizers Exception itself
        raise CheckpointError(f"{folder}: no tokenizer can be read ({error_sentence(error).rstrip(' :')}); {hint}") from error
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        # For some model types transformers returns a tokenizer with an empty vocabulary when the files are missing.
        raise CheckpointError(f"{folder}: no tokenizer can be read (its vocabulary is empty); {hint}")
    return tokenizer


@dataclass(frozen=True)
class MetaModel:
    """A model without its weights.

    Attributes:
        skeleton: the stock model with every parameter on meta.
        stored: the dtype of the stored weights.
        dtype: the dtype of activations and of what is not replaced.
        has_weights: whether the weights are on this machine; planning needs none.
    """

    source: ModelSource
    skeleton: PreTrainedModel
    stored: torch.dtype
    dtype: torch.dtype
    has_weights: bool

    @property
    def model_type(self) -> str:
        return str(self.source.config.model_type)

    @property
    def model_class(self) -> str:
        return type(self.skeleton).__name__

    @property
    def unloadable(self) -> str | None:
        """The reason why this checkpoint can be planned but not loaded; None if it can be loaded."""
        return None if self.source.gguf is not None else _why_unloadable(self.source)

    @cached_property
    def with_mtp(self) -> MetaModel:
        """The same model with its layers for multi-token prediction; itself where it has none, or they cannot be computed."""
        config = with_declared_mtp(self.source.config, self._mtp_tensors)
        if self.why_no_mtp is not None or (self._mtp_tensors is not None and not self._mtp_tensors):
            return self
        source = replace(self.source, config=config)
        return replace(self, source=source, skeleton=meta_skeleton(source, self.dtype, mtp=True))

    @property
    def why_no_mtp(self) -> str | None:
        """The reason why MTP layers cannot be computed; None if they can, should the checkpoint have them."""
        return why_no_mtp(self.model_class, with_declared_mtp(self.source.config, self._mtp_tensors))

    @property
    def mtp_bytes(self) -> int:
        """The bytes of the checkpoint's MTP layers as stored; 0 where it has none, or is not on this machine."""
        return sum((self._mtp_tensors or {}).values())

    @cached_property
    def _mtp_tensors(self) -> Mapping[str, int] | None:
        """The keys and bytes of the stored tensors of MTP layers; None if the weights are not on this machine."""
        if self.source.gguf is not None:
            return self.source.gguf.mtp_bytes(self.source.config)
        if not any(self.source.folder.glob("*.safetensors")):
            return None
        tensors, config = open_checkpoint(self.source.folder).tensors, self.source.config
        return {key: tensor.nbytes for key, tensor in tensors.items() if is_declared_mtp_key(key, config) and not key.endswith(REPEATED)}

    @cached_property
    def weights(self) -> StoredWeights | None:
        """The stored weights; None without `has_weights`. Their headers are read on first use.

        Raises:
            CheckpointError: a file is damaged, or does not fit the model.
        """
        return open_weights(self.source, self.skeleton) if self.has_weights else None


def build_meta_model(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    weights: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    gguf: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
) -> MetaModel:
    """Build the meta model that `plan` and `graft` work on. No weights are read.

    Args:
        model: a hub id or folder (planning needs only its config.json), a GGUF file, or a model on meta.
        weights: whether the model will be loaded: the weights must be present, and those of a hub model are downloaded.
        checkpoint: the folder with the weights of a model on meta; by default its `name_or_path`.
        gguf: GGUF weights to use instead: a file, any part of a split one, or a folder with the parts of one model.
        dtype: the dtype of activations and of what is not replaced; by default the config's, else the checkpoint's.

    Raises:
        CheckpointError, UnsupportedModelError: the model does not exist, cannot be built or, with `weights`, cannot be loaded.
    """
    if isinstance(model, PreTrainedModel):
        named = checkpoint or model.config.name_or_path
        if not named:
            raise UnsupportedModelError(f"{type(model).__name__} is on meta: pass the folder with its weights as checkpoint=FOLDER")
        source = ModelSource(resolve_folder(named, weights=weights and gguf is None), model.config, type(model))
        source = source if gguf is None else with_gguf(source, gguf)
    else:
        source = find_model(model, trust_remote_code=trust_remote_code, weights=weights, gguf=gguf)
    settings = quantisation_of(source.config) if source.gguf is None else None
    if settings is not None:
        # The headers tell what a quantised checkpoint's weights will take.
        weights = weights or (why_unreadable(settings) is None and any(source.folder.glob("*.safetensors")))
        if weights:
            if (reason := _why_unloadable(source)) is not None:
                raise UnsupportedModelError(reason)
            source = replace(source, config=as_floats(source.config), quantised=settings)
    stored = stored_dtype(source)
    rest = parse_dtype(dtype)
    if rest is None:
        try:
            rest = parse_dtype(source.config.dtype) or stored
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{source.folder / 'config.json'}: {error}") from error
    return MetaModel(source, meta_skeleton(source, rest), stored, rest, weights or source.gguf is not None)


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that `dtype` names; None for None and `auto`.

    Raises:
        UnsupportedModelError: a model cannot be computed in this dtype.
    """
    if dtype is None or dtype == "auto":
        return None
    parsed = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point or parsed.itemsize < 2:
        raise UnsupportedModelError(f"dtype {dtype!r}: give 'float32', 'float16', 'bfloat16' or a torch dtype")
    return parsed


def stored_dtype(source: ModelSource) -> torch.dtype:
    """Return the dtype of the stored weights; the config's dtype if the weights are not on this machine."""
    if source.gguf is not None:
        return source.gguf.float_dtype
    # A hub model that is only planned has an index in its folder, and no weights.
    if not any(source.folder.glob("*.safetensors")):
        dtype = source.config.dtype
        return dtype if isinstance(dtype, torch.dtype) else torch.float32
    return open_checkpoint(source.folder).float_dtype


def open_weights(source: ModelSource, skeleton: PreTrainedModel) -> StoredWeights:
    """Open the stored weights of a model, whose headers are read.

    Raises:
        CheckpointError: a file or key is damaged, or does not fit the model.
    """
    if source.gguf is not None:
        from moegraft.injection.checkpoint.gguf.model import GgufWeights

        return GgufWeights(source.gguf, skeleton)
    checkpoint = open_checkpoint(source.folder)
    settings = source.quantised or quantisation_of(source.config)
    return CheckpointWeights(checkpoint if settings is None else paired(checkpoint, settings), skeleton)
