"""Rule files to plans, plans to grafted models, checkpoints into them: `optimize_and_load` does all of it.

Its steps are public, too: `from moegraft.injection.api import build_meta_model, graft, load, plan`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moegraft.injection.api import optimize_and_load

__all__ = ["optimize_and_load"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: programs that only print help or check a file should not wait for torch.
    if name == "optimize_and_load":
        from moegraft.injection.api import optimize_and_load

        return optimize_and_load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
