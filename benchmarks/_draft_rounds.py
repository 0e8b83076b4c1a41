"""Rounds of drafting with a checkpoint: the drafted tokens, their confidences, which were accepted, and the routing of both passes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import support.emulated  # noqa: F401  the device that rules name
import torch
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.offload.gpu_layer import GpuLayer
from moegraft.operators.speculative.schedule import Round

RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace:
    class: hybrid_experts
    kwargs: {experts}
- match: {{kind: model}}
  replace: {{class: speculative_draft, kwargs: {draft}}}
"""
NO_PREFETCH = "{policy: none, promote: false}"


@dataclass(frozen=True, slots=True)
class Way:
    """One configuration of drafts.

    Attributes:
        ratio: share of experts with a slot on an emulated device; only these draft. None: any expert drafts, on the CPU.
        sparsity: share of neurons that drafts leave out; None for none.
    """

    top_k: int
    ratio: float | None = None
    tolerance: float = 0.0
    sampled: bool = False
    max_draft: int = 5
    sparsity: float | None = None

    @property
    def experts(self) -> str:
        """The value of the option `experts` of `speculative_draft`."""
        return "any" if self.ratio is None else "resident"

    def rules(self) -> str:
        draft: dict[str, object] = {"draft_top_k": self.top_k, "max_draft": self.max_draft, "schedule": "fixed"}
        if self.tolerance:
            draft |= {"mode": "adaptive", "tolerance": self.tolerance}
        experts = "{}"
        if self.ratio is not None:
            draft |= {"experts": self.experts}
            experts = f"{{gpu: emulated, cache: {{ratio: {self.ratio}}}, prefetch: {NO_PREFETCH}}}"
        if self.sparsity is not None:
            draft |= {"draft_sparsity": self.sparsity}
            experts = "{sparsity: {target: 0, scope: routed}}"
        return RULES.format(experts=experts, draft=_flow(draft))

    def named(self) -> dict[str, object]:
        """Return the configuration as columns of a row."""
        return {
            "draft_top_k": self.top_k,
            "experts": self.experts,
            "resident_ratio": "" if self.ratio is None else self.ratio,
            "tolerance": self.tolerance,
            "decoding": "sampled" if self.sampled else "greedy",
        }


def _flow(options: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in options.items()) + "}"


@dataclass(slots=True)
class Rounds:
    """The recorded rounds.

    Attributes:
        kept: the router's weight of a draft token's experts over the weight of those it chose, for every call of a layer.
        recall: share of a verification's experts that the draft's routers had chosen for the same token, by layer.
        left_out: share of neurons that drafts left out, by layer.
    """

    rounds: list[Round] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    recall: dict[int, list[float]] = field(default_factory=dict)
    left_out: list[float] = field(default_factory=list)

    @property
    def kept_share(self) -> float:
        return sum(self.kept) / len(self.kept)

    @property
    def mean_recall(self) -> float:
        found = [each for layer in self.recall.values() for each in layer]
        return sum(found) / len(found)

    @property
    def tokens_per_round(self) -> float:
        return sum(done.generated for done in self.rounds) / len(self.rounds)

    def acceptance(self) -> list[tuple[int, int]]:
        """Return the numbers of accepted and of judged tokens by position."""
        longest = max(done.compared for done in self.rounds)
        return [(sum(at < done.accepted for done in self.rounds), sum(at < done.compared for done in self.rounds)) for at in range(longest)]

    def judged(self) -> list[tuple[float, bool]]:
        """Return the draft's confidence in each judged token, and whether it was accepted."""
        return [(done.confidences[at], at < done.accepted) for done in self.rounds for at in range(done.compared)]


class _Watch:
    """Records every layer's routing before and after it is reduced for a draft."""

    def __init__(self, model: PreTrainedModel, found: Rounds) -> None:
        self._found = found
        self._switch = model.moegraft.context.draft_switch
        self._drafted: dict[int, list[torch.Tensor]] = {}
        layers = [module for module in model.modules() if isinstance(module, HybridExperts)]
        for number, operator in enumerate(layers):
            self._look(operator, number)

    def _look(self, operator: HybridExperts, number: int) -> None:
        def watch(module: object, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
            _, top_k_index, top_k_weights = inputs
            if self._switch.settings is not None:
                index, _ = self._switch.narrow(top_k_index, top_k_weights)
                self._found.kept.append(_kept(operator, index, top_k_index, top_k_weights))
                self._drafted.setdefault(number, []).append(top_k_index[0].clone())
            else:
                self._compare(number, top_k_index)

        operator.register_forward_pre_hook(watch)

    def _compare(self, number: int, chosen: torch.Tensor) -> None:
        drafted = self._drafted.pop(number, [])
        if len(drafted) == len(chosen) - 1:
            pairs = zip(drafted, chosen, strict=False)  # the last token fed was not fed to the draft
            self._found.recall.setdefault(number, []).extend(float(torch.isin(real, named).float().mean()) for named, real in pairs)


def _kept(operator: HybridExperts, index: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> float:
    scoring = operator.backend.router_calls.scoring() if isinstance(operator.backend, GpuLayer) else None
    if scoring is None:
        return float(weights[index >= 0].sum() / weights.sum())
    drafting = scoring.scores.gather(-1, index.clamp(min=0)).where(index >= 0, 0)
    return float(drafting.sum() / scoring.scores.gather(-1, chosen).sum())


def load(model: str | Path, rules: str) -> PreTrainedModel:
    """Load a model with the rules of a text."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(rules)
        file.flush()
        loaded: PreTrainedModel = optimize_and_load(model, file.name, threads=torch.get_num_threads(), progress=False)
    return loaded


def draft_rounds(model: str | Path, way: Way, prompts: Sequence[torch.Tensor], new_tokens: int) -> Rounds:
    """Continue each prompt (1, P) by `new_tokens` tokens, and return the recorded rounds."""
    loaded, found = load(model, way.rules()), Rounds()
    operator: Any = loaded.moegraft.model_operator
    record = operator._schedule.record

    def kept(done: Round) -> None:
        record(done)
        if done.confidences:
            found.rounds.append(done)

    operator._schedule.record = kept
    _Watch(loaded, found)
    for seed, ids in enumerate(prompts):
        torch.manual_seed(seed)
        arguments: dict[str, Any] = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": way.sampled}
        loaded.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    if way.sparsity is not None:
        layers: list[Any] = [module for module in loaded.modules() if isinstance(module, HybridExperts)]
        found.left_out = [layer.statistics()["sparsity"]["draft_routed_sparsity"] for layer in layers]
    return found
