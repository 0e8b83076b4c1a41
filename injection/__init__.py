"""Inject fast mixture-of-experts operators into a stock Hugging Face model, by a rule file.

`optimize_and_load` does it in one call, and its steps are public: `build_meta_model`, `plan`, `graft` and `load`. `from_pretrained` of
transformers does it with `quantization_config=MoegraftConfig(rules=...)`, which importing this package registers.
"""

from typing import TYPE_CHECKING, Any

from moegraft.operators import autoload

if TYPE_CHECKING:
    from moegraft.injection.api import build_meta_model, graft, load, new_cache, optimize_and_load, plan, read_rules
    from moegraft.injection.in_transformers import MoegraftConfig

__all__ = ["MoegraftConfig", "build_meta_model", "graft", "load", "new_cache", "optimize_and_load", "plan", "read_rules"]


def __getattr__(name: str) -> Any:
    # Imported on first use: programs that only print help or check a file should not wait for torch.
    if name == "MoegraftConfig":
        from moegraft.injection import in_transformers

        return in_transformers.MoegraftConfig
    if name in __all__:
        from moegraft.injection import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


autoload.register()
