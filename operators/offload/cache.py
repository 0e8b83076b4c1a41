"""The options of a cache policy, which learns from every token's routing and ranks experts by how much a cache should keep them.

The policies are native (`moegraft.cpu_backend.CachePolicy`): the slots of a GPU and the frames of host memory rank by the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moegraft.cpu_backend import CachePolicy
from moegraft.operators.errors import error_sentence
from moegraft.operators.routing_trace import Trace, TraceError
from moegraft.operators.structure import MTP

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

    def why_unfit(self, num_experts: int, path: str | None = None) -> str | None:
        """Return why the profile cannot serve a layer of so many experts, or that of `path`; None where it can or none is given."""
        if self.profile is None:
            return None
        try:
            uses = _uses(self.profile)
        except (OSError, TraceError) as error:
            return f"{error_sentence(error)}; moegraft calibrate --routing FILE records a profile"
        found = len(next(iter(uses.values())))
        if found != num_experts:
            return f"{self.profile}: a profile of layers with {found} experts, where this one has {num_experts}"
        if path is None or path in uses or path.startswith(f"{MTP}."):  # MTP layers run in drafts alone, which are not recorded
            return None
        return f"{self.profile}: the profile of another model, which has no {path}"

    @property
    def bypasses(self) -> bool:
        """Whether a miss stays out of the cache unless it ranks above a resident expert."""
        return self.policy == "static"


def make_policy(options: CacheOptions, paths: Sequence[str], num_experts: int, top_k: int) -> CachePolicy:
    """Return the policy that `options` ask for, for the layers of these paths, which route each token to `top_k` of `num_experts` experts.

    Raises:
        OSError, TraceError: the profile cannot be read, or is for another model.
    """
    uses = None
    if options.profile is not None:
        reasons = filter(None, (options.why_unfit(num_experts, path) for path in paths))
        if (reason := next(reasons, None)) is not None:
            raise TraceError(reason)
        uses = np.stack([_uses(options.profile).get(path, np.zeros(num_experts, np.int64)) for path in paths])
    weights = {"alpha": options.alpha, "frequency_alpha": options.frequency_alpha}
    return CachePolicy(options.policy, len(paths), num_experts, **weights, top_p=options.top_p or TOP_P_FACTOR * top_k, profile=uses)


def _uses(profile: Path) -> Mapping[str, NDArray[np.int64]]:
    """Return how often each expert is used in a recorded trace, (E,), by the paths of its layers."""
    status = profile.stat()
    return _uses_of_version(profile, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)  # each layer of a plan asks for it
def _uses_of_version(profile: Path, changed_ns: int, size: int) -> Mapping[str, NDArray[np.int64]]:
    trace = Trace.load(profile)
    return dict(zip(trace.layers, trace.loads(), strict=True))
