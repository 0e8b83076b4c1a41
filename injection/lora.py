"""LoRA adapters beside the packed weights of an injected model, by PEFT (the extra `train`).

    model = get_peft_model(model, lora_config(model, r=16, target_modules="all-linear"))

PEFT knows packed linear layers by a mapping in the configuration, which its files do not hold: `load_adapter` adds it again. Adapters are
those of the stock model, so that each loads what was trained with the other. `check_adapter` compares their files with a model before any
weights are read, and `Adapters` are those of a model in use, for programs.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from moegraft.injection.injected import injection_of
from moegraft.operators.base import Operator
from moegraft.operators.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

logger = logging.getLogger(__name__)
ALL_LINEAR = "all-linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of PEFT's folders
PREFIX = "base_model.model."  # of the names of its tensors
SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")  # in names of transformers before version 5
MERGE = (
    "an adapter cannot be merged into packed weights, which would have to be quantised again: keep the adapter beside them, or load it "
    "onto the stock model and merge it there"
)


def lora_config(model: PreTrainedModel, **options: Any) -> LoraConfig:
    """Return a configuration by which PEFT adapts an injected model, its packed linear layers included.

    Args:
        options: those of `peft.LoraConfig`; `target_modules="all-linear"` means all linear layers, packed or not, but for the head.

    Raises:
        UnsupportedModelError: the model is not injected, or the options need the weights of a packed layer.
        ImportError: PEFT is not installed.
    """
    from peft import LoraConfig

    packed = _packed_layers(model)
    asked_for_all = options.get("target_modules") == ALL_LINEAR
    if asked_for_all:
        head = model.get_output_embeddings()
        options["target_modules"] = [
            name
            for name, module in model.named_modules()
            if module is not head and (isinstance(module, nn.Linear) or (name in packed and packed[name].kind == "linear"))
        ]
    config = _with_packed_layers(LoraConfig(**options), packed)
    if config.bias != "none":
        raise UnsupportedModelError(f"bias: {config.bias} changes the model's own biases, which packed layers do not train; set bias: none")
    kept = _packed_whole(config, packed)
    if kept is not None:
        raise UnsupportedModelError(f"modules_to_save: the rules pack {kept}, which cannot be trained: leave this layer out of the rules")
    taken = _taken_for_experts(config, model) if asked_for_all else set()
    if taken:
        config.target_modules = sorted(set(config.target_modules or ()) - taken)
        names = ", ".join(sorted({name.rpartition(".")[2] for name in taken}))
        logger.warning("%d linear layers get no adapters: for this family PEFT takes the names %s for those of experts", len(taken), names)
    return config


def _taken_for_experts(config: LoraConfig, model: PreTrainedModel) -> set[str]:
    """Return the target modules that PEFT replaces by the experts' fused matrices, as which other versions of transformers had them."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a version of PEFT that replaces none
        return set()
    converted = copy.copy(config)
    convert_peft_config_for_transformers(converted, model=model, conversions=None)
    return set(config.target_modules or ()) - set(converted.target_modules or ())


def load_adapter(
    model: PreTrainedModel | PeftModel, folder: str | os.PathLike[str], *, name: str = "default", is_trainable: bool = False
) -> PeftModel:
    """Return an injected model with the LoRA adapter of a folder, whether it was trained on an injected model or on the stock one.

    Args:
        model: an injected model, or one that this function returned, which gets a further adapter: `set_adapter(name)` makes it active.
        name: of the adapter within the model.
        is_trainable: whether the adapter goes on learning.

    Raises:
        UnsupportedModelError: the model is not injected, or the adapter does not fit it or needs the weights of a packed layer.
        CheckpointError: the folder is not that of an adapter.
        ImportError: PEFT is not installed.
    """
    from peft import LoraConfig, PeftModel
    from peft.utils import get_peft_model_state_dict

    folder = os.fspath(folder)
    base = cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model
    packed = _packed_layers(base)
    tensors = check_adapter(folder, base)
    config = _with_packed_layers(cast("LoraConfig", LoraConfig.from_pretrained(folder)), packed)
    kept = _packed_whole(config, packed)
    if kept is not None:
        raise UnsupportedModelError(f"{folder}: the adapter has {kept} as a whole, which the rules pack: leave this layer out of the rules")
    try:
        with warnings.catch_warnings():
            # PEFT reads an attribute under its old name; nothing is asked of who loads an adapter.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            if isinstance(model, PeftModel):
                config.inference_mode = not is_trainable
                model.add_adapter(name, config)
                model.load_adapter(folder, name, is_trainable=is_trainable)
                found = model
            else:
                found = PeftModel.from_pretrained(model, folder, adapter_name=name, config=config, is_trainable=is_trainable)
    except (ValueError, RuntimeError) as error:
        raise UnsupportedModelError(f"{folder}: PEFT cannot load the adapter onto this model: {error}") from error
    left = tensors - get_peft_model_state_dict(found, adapter_name=name, save_embedding_layers=False).keys()
    if left:
        raise UnsupportedModelError(f"{folder}: this model has no place for {len(left)} tensors of the adapter, such as {min(left)}")
    return found


def check_adapter(folder: str | os.PathLike[str], model: PreTrainedModel) -> set[str]:
    """Return the names of the low-rank tensors of an adapter, which fit the modules of a model; no weights are read.

    Args:
        model: it may be on meta, stock or injected.

    Raises:
        CheckpointError: the folder is not that of an adapter.
        UnsupportedModelError: the adapter is for another model, or of a kind that changes the model's own weights.
    """
    shapes, config = _adapter_shapes(Path(folder))
    trained_on = str(config.get("base_model_name_or_path") or "")
    of_other = f" (it was trained on {trained_on})" if trained_on else ""
    advice = "give the adapter's own model, or another adapter"
    modules = {path.replace(".base_layer", ""): module for path, module in model.named_modules()}
    for name, shape in shapes.items():
        path, _, part = name.removeprefix(PREFIX).partition(".lora_")
        if not part or SINGLE_EXPERT.search(name):
            continue
        module = modules.get(path.replace(".base_layer", ""))
        if module is None:
            raise UnsupportedModelError(f"{folder}: the adapter is for {path}, which this model does not have{of_other}; {advice}")
        sizes = _sizes(module, config)
        size = shape[1] if part.startswith("A") else shape[0]
        if part in ("A.weight", "B.weight") and sizes and size not in sizes[part[0]]:
            wanted = " or ".join(map(str, sorted(sizes[part[0]])))
            raise UnsupportedModelError(
                f"{folder}: the adapter of {path} has {size} {'inputs' if part[0] == 'A' else 'outputs'}, where this model has {wanted}"
                f"{of_other}; {advice}"
            )
    given = PurePath(str(model.config.name_or_path)).name
    if trained_on and given and PurePath(trained_on).name != given:
        logger.warning("%s: this adapter was trained on %s, and this model is %s", folder, trained_on, given)
    # PEFT compares the others: whole modules, copies of embeddings, and matrices of single experts, which it fuses.
    return {name for name in shapes if ".lora_" in name and not SINGLE_EXPERT.search(name)}


def _adapter_shapes(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shapes of an adapter's tensors, and its configuration."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder}: it has no {CONFIG}; give the folder of an adapter, as PEFT's save_pretrained writes it")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 # not a mapping
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: it has no {WEIGHTS}; save the adapter with PEFT again") from None
    except (ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: a damaged file ({error}); save the adapter with PEFT again") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise UnsupportedModelError(f"{folder}: an adapter of the kind {kind}; only LoRA is supported")
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(f"{folder}: bias: {config['bias']} changes the model's own biases; train an adapter with bias: none")
    return shapes, config


def _sizes(module: nn.Module, config: Mapping[str, Any]) -> dict[str, set[int]]:
    """Return the inputs that A of a module may have, and the outputs that B may have; empty where they are not known."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return {"A": {int(module.in_features)}, "B": {int(module.out_features)}}  # type: ignore[arg-type] # numbers
    targets = {name.rpartition(".")[2] for name in config.get("target_parameters") or ()}
    found = [parameter.shape[-2:] for name, parameter in module.named_parameters(recurse=False) if name in targets]
    both = {size for sizes in found for size in sizes}  # which of a matrix's sizes is the input depends on the family
    return {"A": both, "B": both} if both else {}


class Adapters:
    """The adapters of an injected model in use, of which one computes at a time, or none.

    Replayed decode steps are recorded again after a change. Keys and values that one adapter has computed belong to that one alone.

    Args:
        folders: by the name of each adapter; at least one.

    Raises:
        UnsupportedModelError, CheckpointError: as `load_adapter`.
    """

    def __init__(self, model: PreTrainedModel, folders: Mapping[str, str]) -> None:
        loaded: Any = model
        self._numbers = {name: f"adapter{number}" for number, name in enumerate(folders)}  # PEFT's names have no dots
        for name, folder in folders.items():
            loaded = load_adapter(loaded, folder, name=self._numbers[name])
        model.eval()
        self._model = loaded
        self._used: str | None = next(iter(folders))  # PEFT's choice
        self.use(None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._numbers)

    def use(self, name: str | None) -> None:
        """Let an adapter compute from the next forward pass on, or none."""
        if name == self._used:
            return
        layers = self._model.base_model
        if name is None:
            layers.disable_adapter_layers()
        else:
            layers.enable_adapter_layers()
            layers.set_adapter(self._numbers[name], inference_mode=True)
        self._used = name


def _packed_layers(model: PreTrainedModel) -> dict[str, Operator]:
    injection = injection_of(model)
    if injection is None:
        raise UnsupportedModelError("this model is not injected: peft.LoraConfig and PeftModel.from_pretrained serve it as it is")
    return {path: operator for path, operator in injection.replacing.items() if operator.kind in ("linear", "experts")}


def _packed_whole(config: LoraConfig, packed: Mapping[str, Operator]) -> str | None:
    """Return the name of a packed layer that an adapter has as a whole."""
    names = {path.rpartition(".")[2] for path in packed}
    return next((each for each in config.modules_to_save or () if each.rpartition(".")[2] in names), None)


def _with_packed_layers(config: LoraConfig, packed: Mapping[str, Operator]) -> LoraConfig:
    if config.use_dora or config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        form = "DoRA" if config.use_dora else f"init_lora_weights={config.init_lora_weights!r}"
        raise UnsupportedModelError(f"{form} needs the weights of the layers that it adapts, and packed ones are not at hand")
    layers = {"linear": _packed_layer_class, "experts": _packed_experts_class}
    classes = {kind: layers[kind]() for kind in {operator.kind for operator in packed.values()}}
    config._register_custom_module({type(operator): classes[operator.kind] for operator in packed.values()})
    return config


def _packed_layer_class() -> type[nn.Module]:
    from peft.tuners.lora.layer import Linear

    class PackedLoraLinear(Linear):  # type: ignore[misc] # PEFT may not be installed
        """PEFT's layer beside one whose weight is packed."""

        @staticmethod
        def _get_in_out_features(module: nn.Module) -> tuple[int, int]:
            return int(module.in_features), int(module.out_features)  # type: ignore[arg-type] # numbers, for which mypy has no type

        def merge(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise UnsupportedModelError(MERGE)

    return PackedLoraLinear


def _packed_experts_class() -> type[nn.Module]:
    from peft.tuners.lora import layer

    # PEFT finds the wrapper of a parameter, for a further adapter, by the name of its class.
    class ParamWrapper(layer.ParamWrapper):  # type: ignore[misc] # PEFT may not be installed
        """PEFT's layer beside a matrix of packed experts: it gives the factors of active adapters to the operator.

        The two matrices of a module have wrappers around each other, as beside stock experts, so that files have the same names.
        """

        def get_param(self) -> torch.Tensor:
            """Return a tensor of the matrix's shape, without memory."""
            return dict(self.get_base_layer().named_parameters(recurse=False))[self.parameter_name]

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._check_forward_args(x, *args, **kwargs)  # type: ignore[no-untyped-call]
            active = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]
            given = dict(kwargs.pop("adapters", {}))
            if active:
                factors = [self._factors(name) for name in active]
                given[self.parameter_name] = torch.cat([a for a, _ in factors], dim=1), torch.cat([b for _, b in factors], dim=2)
            out: torch.Tensor = self.base_layer(x, *args, **kwargs, adapters=given)
            return out

        def _factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
            """Return A (E, R, inputs) and B (E, outputs, R) of an adapter, scaled; PEFT stores (E * R, inputs) and (outputs, R * E)."""
            a: torch.Tensor = self.lora_A[name].weight  # type: ignore[assignment] # of nn.Linear
            b: torch.Tensor = self.lora_B[name].weight  # type: ignore[assignment]
            b = b.reshape(b.shape[0], -1, self.num_experts).permute(2, 0, 1)
            return a.reshape(self.num_experts, -1, a.shape[-1]), self.scaling[name] * b

        def merge(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise UnsupportedModelError(MERGE)

    return ParamWrapper
