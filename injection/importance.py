"""How much the inputs of each weight matter, from one pass over a text: what quantisation weighs its errors by.

The error of a matrix product is the sum over its inputs of mean(input^2) * (error of the weights)^2, if inputs are independent. Inputs of
an expert count as the square of the token's routing weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from moegraft.injection.calibration import windows_of
from moegraft.injection.checkpoint.sources import StoredWeights
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.layout import ExpertsLayout, read_layout, why_unsupported
from moegraft.operators.reference import reference_gate
from moegraft.operators.weights import Part, WeightSource

PRIOR_TOKENS = 4.0  # for how many tokens the mean of all experts counts: some experts see few tokens of a text, or none
OUTPUT = "output"  # the key of the head's inputs


@dataclass(slots=True)
class _Experts:
    """Sums over the tokens of each expert: of squared inputs (E, H), of squared neurons (E, I), and of squared routing weights (E,)."""

    layout: ExpertsLayout
    source: WeightSource
    inputs: torch.Tensor
    neurons: torch.Tensor
    tokens: torch.Tensor

    def add(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> None:
        tokens = hidden_states.detach().float().cpu()
        index, weights = top_k_index.cpu(), top_k_weights.detach().float().cpu()
        for expert in range(self.layout.num_experts):
            token, slot = torch.where(index == expert)
            if len(token) == 0:
                continue
            x, weight = tokens[token], weights[token, slot, None].square()
            gate = self._product(x, "gate", expert) if self.layout.gated else None
            neurons = reference_gate(self.layout.gate, gate, self._product(x, "up", expert))
            self.inputs[expert] += (weight * x.square()).sum(0)
            self.neurons[expert] += (weight * neurons.square()).sum(0)
            self.tokens[expert] += weight.sum()

    def _product(self, x: torch.Tensor, part: Part, expert: int) -> torch.Tensor:
        matrix = self.source.read(part, expert).float()
        bias: Part = "gate_bias" if part == "gate" else "up_bias"
        return F.linear(x, matrix, self.source.read(bias, expert).float() if self.layout.bias else None)

    def found(self) -> Mapping[str, torch.Tensor]:
        """Return the importance by part, (E, columns)."""
        count = max(float(self.tokens.sum()), torch.finfo(torch.float32).tiny)
        inputs, neurons = (each + PRIOR_TOKENS * each.sum(0) / count for each in (self.inputs, self.neurons))
        return {"gate": inputs, "up": inputs, "down": neurons}


def _watched(skeleton: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Return the experts modules and linear layers of the stock model, but for what is inside of experts modules."""
    experts = [path for path, module in skeleton.named_modules() if why_unsupported(module) is None]
    for path, module in skeleton.named_modules():
        if path in experts or (isinstance(module, nn.Linear) and not path.startswith(tuple(f"{each}." for each in experts))):
            yield path, module


def measure_importance(
    model: PreTrainedModel,
    weights: StoredWeights,
    skeleton: PreTrainedModel,
    ids: torch.Tensor,
    window: int,
    advance: Callable[[int], None],
) -> dict[str, torch.Tensor]:
    """Return the importance of the inputs of experts and linear layers.

    Args:
        model: loaded, with any rules.
        weights, skeleton: the checkpoint that it was loaded from, and the stock model on meta.
        ids: the text, (T,) int64.
        window: tokens of one forward pass.
        advance: called with a number of tokens; the sum is T.

    Returns:
        By module path, (columns,); for experts by path and part, (E, columns); `OUTPUT` for the head.

    Raises:
        UnsupportedModelError: the text is empty, or an activation is not finite.
    """
    if not len(ids):
        raise UnsupportedModelError("the text has no tokens: the importance of weights cannot be measured")
    linear: dict[str, torch.Tensor] = {}
    of_experts: dict[str, _Experts] = {}

    def add_linear(path: str, x: torch.Tensor) -> None:
        rows = x.detach().float().reshape(-1, x.shape[-1]).square().sum(0).cpu()
        linear[path] = linear[path] + rows if path in linear else rows

    def called(path: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if path in of_experts:
            given = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | dict(kwargs)
            of_experts[path].add(given["hidden_states"], given["top_k_index"], given["top_k_weights"])
        else:
            add_linear(path, args[0])

    with ExitStack() as stack:
        for path, module in _watched(skeleton):
            if not isinstance(module, nn.Linear):
                layout = read_layout(module)
                sizes = (layout.num_experts, layout.hidden), (layout.num_experts, layout.intermediate), (layout.num_experts,)
                of_experts[path] = _Experts(layout, weights.source(path, "experts"), *map(torch.zeros, sizes))
            stack.callback(model.get_submodule(path).register_forward_pre_hook(partial(called, path), with_kwargs=True).remove)
        with torch.inference_mode():
            for part in windows_of(model, ids, window, advance):
                last = model.base_model(input_ids=part[None].to(model.device), use_cache=False)[0]
                add_linear(OUTPUT, last)
    importance = linear | {f"{path}.{part}": each for path, experts in of_experts.items() for part, each in experts.found().items()}
    if not all(bool(each.isfinite().all()) for each in importance.values()):
        raise UnsupportedModelError("an activation is not finite: the importance of weights cannot be measured; give --imatrix none")
    return importance
