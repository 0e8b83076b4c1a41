"""LoRA adapters beside the packed weights of an injected model, by PEFT (the extra `train`).

    model = get_peft_model(model, lora_config(model, r=16, target_modules="all-linear"))

PEFT knows packed linear layers by a mapping in the configuration, which its files do not hold: `load_adapter` adds it again. Adapters are
those of the stock model, so that each loads what was trained with the other.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch import nn
from transformers import PreTrainedModel

from moegraft.injection.injected import injection_of
from moegraft.operators.errors import UnsupportedModelError

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

ALL_LINEAR = "all-linear"
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
    if options.get("target_modules") == ALL_LINEAR:
        head = model.get_output_embeddings()
        options["target_modules"] = [
            name for name, module in model.named_modules() if (name in packed or isinstance(module, nn.Linear)) and module is not head
        ]
    return _with_packed_layers(LoraConfig(**options), packed)


def load_adapter(model: PreTrainedModel, folder: str | os.PathLike[str], *, is_trainable: bool = False) -> PeftModel:
    """Return an injected model with the LoRA adapter of a folder, whether it was trained on an injected model or on the stock one.

    Args:
        is_trainable: whether the adapter goes on learning.

    Raises:
        UnsupportedModelError: the model is not injected, or the adapter needs the weights of a packed layer.
        ImportError: PEFT is not installed.
    """
    from peft import LoraConfig, PeftModel

    config = _with_packed_layers(cast("LoraConfig", LoraConfig.from_pretrained(os.fspath(folder))), _packed_layers(model))
    return PeftModel.from_pretrained(model, os.fspath(folder), config=config, is_trainable=is_trainable)


def _packed_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    injection = injection_of(model)
    if injection is None:
        raise UnsupportedModelError("this model is not injected: peft.LoraConfig and PeftModel.from_pretrained serve it as it is")
    return {path: operator for path, operator in injection.replacing.items() if operator.kind == "linear"}


def _with_packed_layers(config: LoraConfig, packed: dict[str, nn.Module]) -> LoraConfig:
    if config.use_dora or config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        form = "DoRA" if config.use_dora else f"init_lora_weights={config.init_lora_weights!r}"
        raise UnsupportedModelError(f"{form} needs the weights of the layers that it adapts, and packed ones are not at hand")
    layer = _packed_layer_class()
    config._register_custom_module({type(operator): layer for operator in packed.values()})
    return config


def _packed_layer_class() -> type[nn.Module]:
    from peft.tuners.lora.layer import Linear

    class PackedLoraLinear(Linear):  # type: ignore[misc] # PEFT may not be installed
        """PEFT's layer beside one whose weight is packed."""

        @staticmethod
        def _get_in_out_features(module: nn.Module) -> tuple[int, int]:
            return int(module.in_features), int(module.out_features)  # type: ignore[arg-type] # numbers, for which mypy has no type

        def merge(self, *args: Any, **kwargs: Any) -> NoReturn:
            """
            Raises:
                UnsupportedModelError: always.
            """
            raise UnsupportedModelError(MERGE)

    return PackedLoraLinear
