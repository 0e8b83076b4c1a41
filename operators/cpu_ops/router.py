"""`cpu_router` and `fused_router`: experts of tokens, chosen by the C++ kernel for a few and, on a GPU, by a Triton kernel.

Shapes: T tokens, H hidden size, E experts, K experts per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from moegraft.cpu_backend import RouterSpec, Runtime
from moegraft.operators.cpu import as_array, element_name
from moegraft.operators.cpu_ops.in_place import CpuForwardOperator, NotRecognisedError, probe_forward

Route = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # of hidden states and the weight

MAX_TOKENS = 8  # routing a prompt is a product of matrices, which PyTorch computes well

# Tokens to compare: where groups are scored by their best expert or by their best two, few tokens often choose the same experts.
_COMPARED_TOKENS = 512
_FIRST_TOKENS = 8  # on which most wrong forms fail already
_TOLERANCE = 1e-4  # relative, of weights in float32
_GROUP_NAMES = (("num_group", "topk_group"), ("n_group", "topk_group"))
_LOGIT_BIAS = "bias"  # another vector of E numbers is added to the scores for the choice alone
_SCORES = (("softmax", False), ("softmax", True), ("sigmoid", True), ("sigmoid", False), ("chosen_softmax", False))  # normalised or not


class CpuRouter(CpuForwardOperator):
    """A router of up to 8 tokens in one call: logits, scores, the choice and its weights.

    The weight is read as it is stored; families that widen it to float32 for each call (DeepSeek-V3's) move five times the bytes. The rule
    by which the module chooses is found by comparing it with the kernel on random hidden states. The module itself computes more tokens, on
    a GPU, with gradients, in graphs of `torch.compile`, in other dtypes or sizes than at load, and once its `top_k` or biases have changed.
    Logits are summed in another order than PyTorch's: where rounding makes two of them equal, the first expert is chosen.
    """

    name = "cpu_router"
    kind = "router"
    summary = "the router's choice of experts for a few tokens by the C++ kernel, on the CPU"
    max_tokens: int | None = MAX_TOKENS

    attribute_names = ("top_k", "num_experts_per_tok")

    def fit(self, module: nn.Module, weight: torch.Tensor, value: float) -> None:
        self._form = recognise(module, self.route_by, int(value), groups=not self.on_gpu)
        self._route = self.route_by(self._form, weight)
        self._copied = {name: _version(tensor) for name, tensor in _vectors(module).items()}

    def route_by(self, form: RouterForm, weight: torch.Tensor) -> Route:
        """Return the kernel's computation of `form` for a weight of this dtype."""
        return partial(routed, self.runtime, form.spec(weight), form)

    def compute(self, module: nn.Module, x: torch.Tensor, weight: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...] | None:
        form, parameters, buffers = self._form, module._parameters, module._buffers
        if (
            not (x.dim() == 2 or (x.dim() == 3 and form.flattens))
            or (self.max_tokens is not None and x.numel() > self.max_tokens * weight.shape[1])
            or any(_version(parameters.get(name, buffers.get(name))) != version for name, version in self._copied.items())
        ):
            return None
        parts = self._route(x.reshape(-1, x.shape[-1]).contiguous(), weight)
        placed: list[torch.Tensor] = [*parts]
        for position, part in zip(form.order, parts, strict=True):
            placed[position] = part
        return tuple(placed)


class FusedRouter(CpuRouter):
    """`cpu_router` for modules on the CPU; on a GPU a Triton kernel after PyTorch's product for the logits, for any number of tokens.

    Choices of groups are left to PyTorch there.
    """

    name = "fused_router"
    summary = "the router's choice of experts in one kernel: of C++ on the CPU for a few tokens, of Triton on a GPU"
    device_types = ("cpu", "cuda")

    def fit(self, module: nn.Module, weight: torch.Tensor, value: float) -> None:
        super().fit(module, weight, value)
        if self.on_gpu:
            self.max_tokens = None
            self._route(weight.detach()[:1], weight.detach())  # compiles for this dtype

    def route_by(self, form: RouterForm, weight: torch.Tensor) -> Route:
        if not self.on_gpu:
            return super().route_by(form, weight)
        # Triton need not be installed where there is no GPU.
        from moegraft.operators.kernels.small import MAX_EXPERTS, choose_experts

        if weight.shape[0] > MAX_EXPERTS:
            raise NotRecognisedError(f"it has more than {MAX_EXPERTS} experts")
        rule = dict(form.rule)
        dtype = weight.dtype if rule.pop("rounds_logits", False) else torch.float32
        bias = rule.pop("logit_bias", None)
        choose = partial(choose_experts, top_k=form.top_k, weights_type=form.weights_type, **rule)
        return partial(_chosen, choose, form.logits_type, None if bias is None else bias.to(dtype), dtype)


@dataclass(frozen=True, slots=True)
class RouterForm:
    """How a router of E experts computes, in the terms of the kernel's RouterSpec.

    Attributes:
        rule: the arguments of RouterSpec for how experts are scored and chosen, biases as tensors.
        order: the positions of logits, weights and ids in what the module returns.
        flattens: whether it takes (B, T, H) as (B * T, H).
    """

    top_k: int
    rule: Mapping[str, Any]
    order: tuple[int, ...]
    flattens: bool = False
    logits_type: torch.dtype = torch.float32
    weights_type: torch.dtype = torch.float32

    def spec(self, weight: torch.Tensor) -> RouterSpec:
        """Return the specification for a weight (E, H), whose dtype hidden states will have; the biases are copied."""
        rule: dict[str, Any] = {name: as_array(value) if isinstance(value, torch.Tensor) else value for name, value in self.rule.items()}
        return RouterSpec(
            weight.shape[1],
            weight.shape[0],
            self.top_k,
            element_type=element_name(weight.dtype),
            logits_type=element_name(self.logits_type),
            weights_type=element_name(self.weights_type),
            **rule,
        )


def routed(
    runtime: Runtime, spec: RouterSpec, form: RouterForm, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits (T, E), weights (T, K) and ids (T, K) of `x` (T, H), which is contiguous, on the CPU and of the weight's dtype."""
    tokens = x.shape[0]
    logits = x.new_empty((tokens, weight.shape[0]), dtype=form.logits_type)
    weights = x.new_empty((tokens, form.top_k), dtype=form.weights_type)
    index = x.new_empty((tokens, form.top_k), dtype=torch.int64)
    runtime.route(spec, x, weight, logits, weights, index)
    return logits, weights, index


def _chosen(
    choose: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    logits_type: torch.dtype,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    x: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = F.linear(x.to(dtype), weight.to(dtype), bias)
    return logits.to(logits_type), *choose(logits)


def _version(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Return what changes when a tensor is replaced or, outside of inference mode, written to."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)


def recognise(module: nn.Module, route_by: Callable[[RouterForm, torch.Tensor], Route], top_k: int, *, groups: bool = True) -> RouterForm:
    """Return the form that gives on random hidden states what `module` gives, which is loaded and holds a `weight`.

    Forms are compared in float32, where no two logits are equal and the choice has one answer; dtypes and rounding are read off a run in
    the module's own.

    Args:
        route_by: returns the kernel's computation of a form.
        groups: whether the kernel has choices of groups of experts.

    Raises:
        NotRecognisedError: no form does, or several that would differ on other hidden states.
    """
    tensors = {name: held for name, held in {**module._parameters, **module._buffers}.items() if held is not None}
    wide = {name: held.detach().float() for name, held in tensors.items() if held.is_floating_point()}
    weight, dtype, biases = wide["weight"], tensors["weight"].dtype, _biases(_vectors(module))
    experts, hidden = weight.shape
    x = torch.randn(_COMPARED_TOKENS, hidden, generator=torch.Generator().manual_seed(0)).to(weight.device)
    expected, own = probe_forward(module, x, wide), probe_forward(module, x[:2].to(dtype), {})
    order = _order(expected, experts)
    if order is None or _order(own, experts) != order:
        raise NotRecognisedError("it does not return logits, weights and ids alone")
    parts = [expected[position] for position in order]
    fitting = []
    for (score, normalise), grouping in itertools.product(_SCORES, _groupings(module, experts, top_k) if groups else [{}]):
        form = RouterForm(top_k, {"score": score, "normalise": normalise, **grouping, **biases}, order)
        route, scale = route_by(form, weight), None
        for tokens in (_FIRST_TOKENS, _COMPARED_TOKENS):
            scale = _scale([part[:tokens] for part in parts], route(x[:tokens], weight))
            if scale is None:
                break
        else:
            fitting.append((grouping, {**form.rule, "scale": scale}))
    if not fitting or any(grouping != fitting[0][0] for grouping, _ in fitting):
        raise NotRecognisedError("it chooses by a rule that the kernel does not have")
    try:
        batched = probe_forward(module, x[None, :2], wide)
        flattens = isinstance(batched, tuple) and all(isinstance(part, torch.Tensor) and part.dim() == 2 for part in batched)
    except NotRecognisedError:
        flattens = False
    logits, weights = own[order[0]], own[order[1]]
    rounds = dtype != torch.float32 and torch.equal(logits, logits.to(dtype).to(logits.dtype))
    return RouterForm(top_k, {**fitting[0][1], "rounds_logits": rounds}, order, flattens, logits.dtype, weights.dtype)


def _vectors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a router's tensors of one number per expert by name."""
    held, experts = {**module._parameters, **module._buffers}, module.get_parameter("weight").shape[0]
    return {name: tensor for name, tensor in held.items() if tensor is not None and tuple(tensor.shape) == (experts,)}


def _biases(vectors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the biases among a router's vectors by their names in RouterSpec, (E,) float32."""
    names = {name: "logit_bias" if name == _LOGIT_BIAS else "choice_bias" for name in vectors}
    if len(set(names.values())) < len(names):
        raise NotRecognisedError(f"{', '.join(name for name in names if name != _LOGIT_BIAS)} might each be a bias")
    return {names[name]: vector.detach().float().clone() for name, vector in vectors.items()}


def _order(output: Any, experts: int) -> tuple[int, ...] | None:
    if not isinstance(output, tuple) or not all(isinstance(part, torch.Tensor) and part.dim() == 2 for part in output):
        return None
    wide = [part.shape[1] == experts for part in output]
    kinds = ["ids" if part.dtype == torch.int64 else "logits" if is_wide else "weights" for part, is_wide in zip(output, wide, strict=True)]
    order = tuple(kinds.index(kind) for kind in ("logits", "weights", "ids")) if sorted(kinds) == ["ids", "logits", "weights"] else None
    return None if order is None or wide[order[2]] else order


def _groupings(module: nn.Module, experts: int, top_k: int) -> list[dict[str, Any]]:
    """Return how a module may group experts; some hold numbers of groups that they do not use."""
    pairs = ((getattr(module, groups, None), getattr(module, kept, None)) for groups, kept in _GROUP_NAMES)
    groups, kept = next(((a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int)), (1, 1))
    usable = 1 <= kept < groups and experts % groups == 0 and top_k <= experts // groups * kept
    scores = ["two_largest"] if usable and experts > groups else []  # in groups of one both scores are the same
    if usable and kept < top_k:  # else the best experts are in the best groups, and leaving groups out changes nothing
        scores.append("largest")
    return [*({"groups": groups, "kept_groups": kept, "group_score": score} for score in scores), {}]


def _scale(expected: list[torch.Tensor], computed: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float | None:
    """Return the one factor between the weights of the same experts, or None if there is none or logits or choices differ."""
    logits, weights, index = expected
    if index.shape != computed[2].shape or float((logits - computed[0]).norm()) > _TOLERANCE * float(logits.norm()):
        return None
    order, own = index.argsort(dim=-1), computed[2].argsort(dim=-1)
    if not torch.equal(index.gather(-1, order), computed[2].gather(-1, own)):
        return None
    ratios = weights.gather(-1, order) / computed[1].gather(-1, own)
    scale = float(ratios.median())
    return scale if float((ratios / scale - 1).abs().max()) <= _TOLERANCE else None
