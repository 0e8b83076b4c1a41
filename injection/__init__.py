"""Inject fast mixture-of-experts operators into a stock Hugging Face model, by a rule file.

`optimize_and_load` does it in one call, and its steps are public: `build_meta_model`, `plan`, `graft` and `load`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moegraft.injection.api import build_meta_model, graft, load, new_cache, optimize_and_load, plan, read_rules

__all__ = ["build_meta_model", "graft", "load", "new_cache", "optimize_and_load", "plan", "read_rules"]


def __getattr__(name: str) -> Any:
    # Imported on first use: programs that only print help or check a file should not wait for torch.
    if name in __all__:
        from moegraft.injection import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
