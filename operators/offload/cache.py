"""The options of a cache policy, which learns from every token's routing and ranks experts by how much a cache should keep them.

The policies are native (`moegraft.cpu_backend.CachePolicy`): the slots of a GPU and the frames of host memory rank by the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moegraft.cpu_backend import CachePolicy
from moegraft.operators.errors import error_sentence
from moegraft.operators.routing_trace import Trace, TraceError

Ids = NDArray[np.int64]
PolicyName = Literal["mrs", "lru", "lfu", "score_frequency", "static"]
TOP_P_FACTOR = 2  # times the experts per token: HybriMoE sets p to twice the number of activated experts


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The cache policy. In `benchmarks/results/cache_sweep.csv` only the defaults are best or near the best on every trace.

    Attributes:
        policy: `mrs`, a moving average of router scores (HybriMoE, section IV-D); `lru`, the latest use; `lfu`, the total of uses;
            `score_frequency`, the averages of scores and of uses in equal parts; `static`, the uses in `profile`, fixed.
        alpha: the newest token's weight in the average of scores, eq. (3).
        top_p: how many of a token's largest scores count, eq. (3); by default twice the experts per token.
        frequency_alpha: the newest token's weight in the average of uses.
        profile: a routing trace (`moegraft calibrate --routing`), for `static`.
    """

    policy: PolicyName = "score_frequency"
    alpha: float = 0.1
    top_p: int | None = None
    frequency_alpha: float = 0.01
    profile: Path | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "frequency_alpha"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}")
        if self.top_p is not None and self.top_p < 1:
            raise ValueError(f"top_p must be 1 or more, not {self.top_p}")
        if (self.policy == "static") != (self.profile is not None):
            raise ValueError("policy 'static' needs 'profile', and only it takes one")

    def why_unfit(self, num_experts: int) -> str | None:
        """Return why the profile cannot serve layers of so many experts; None where it can, or where there is none."""
        if self.profile is None:
            return None
        try:
            found = _uses(self.profile).shape[1]
        except (OSError, TraceError) as error:
            return f"{error_sentence(error)}; moegraft calibrate --routing FILE records a profile"
        return (
            None if found == num_experts else f"{self.profile}: a profile of layers with {found} experts, where this one has {num_experts}"
        )

    @property
    def bypasses(self) -> bool:
        """Whether a miss stays out of the cache unless it ranks above a resident expert."""
        return self.policy == "static"


def make_policy(options: CacheOptions, layers: int, num_experts: int, top_k: int) -> CachePolicy:
    """Return the policy that `options` ask for, for a model that routes each token to `top_k` of `num_experts` experts per layer.

    Raises:
        OSError, TraceError: the profile cannot be read, or is for another model.
    """
    uses = None if options.profile is None else _uses(options.profile)
    if uses is not None and uses.shape != (layers, num_experts):
        raise TraceError(f"{options.profile}: expected a profile of {(layers, num_experts)} layers and experts, found {uses.shape}")
    weights = {"alpha": options.alpha, "frequency_alpha": options.frequency_alpha}
    return CachePolicy(options.policy, layers, num_experts, **weights, top_p=options.top_p or TOP_P_FACTOR * top_k, profile=uses)


def _uses(profile: Path) -> NDArray[np.int64]:
    """Return how often each expert is used in a recorded trace, (L, E)."""
    status = profile.stat()
    return _uses_of_version(profile, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)  # each layer of a plan asks for it
def _uses_of_version(profile: Path, changed_ns: int, size: int) -> NDArray[np.int64]:
    return Trace.load(profile).loads()
