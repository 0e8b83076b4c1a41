"""`cpu_router`: the experts of a few tokens, chosen by the C++ kernel.

By which rule a family's router chooses experts, found by trying its module.

Shapes: T tokens, H hidden size, E experts, K experts a token.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from moegraft.cpu_backend import RouterSpec, Runtime
from moegraft.operators.base import InPlaceOperator
from moegraft.operators.context import InjectionContext
from moegraft.operators.cpu import as_array, describe, element_name, is_plain
from moegraft.operators.cpu_ops.in_place import as_it_was, compute_by

# Tokens: where groups are scored by their best expert or by their best two, a few of them often choose the same.
_TRIED = 512
_FIRST = 8
_TOLERANCE = 1e-4  # relative, of weights in float32
_TOP_K_NAMES = ("top_k", "num_experts_per_tok")
_GROUP_NAMES = (("num_group", "topk_group"), ("n_group", "topk_group"))
_BIAS = "bias"  # of the logits; another vector of E numbers is added for the choice alone


@dataclass(frozen=True, slots=True)
class RouterForm:
    """The kernel's words for a router, as RouterSpec explains them.

    Attributes:
        order: where logits, weights and ids stand in what the module returns.
        flattens: (B, T, H) is taken as (B * T, H).
    """

    top_k: int
    score: str
    normalise: bool
    groups: int
    kept_groups: int
    group_score: str
    order: tuple[int, int, int]
    flattens: bool = False
    scale: float = 1.0
    rounds_logits: bool = False
    logits_type: torch.dtype = torch.float32
    weights_type: torch.dtype = torch.float32

    def spec(self, weight: torch.Tensor, biases: Biases) -> RouterSpec:
        """For a weight (E, H), whose dtype hidden states are to have."""
        return RouterSpec(
            weight.shape[1],
            weight.shape[0],
            self.top_k,
            element_type=element_name(weight.dtype),
            logits_type=element_name(self.logits_type),
            weights_type=element_name(self.weights_type),
            rounds_logits=self.rounds_logits,
            score=self.score,
            normalise=self.normalise,
            scale=self.scale,
            groups=self.groups,
            kept_groups=self.kept_groups,
            group_score=self.group_score,
            choice_bias=None if biases.choice is None else as_array(biases.choice),
            logit_bias=None if biases.logits is None else as_array(biases.logits),
        )


@dataclass(frozen=True, slots=True)
class Biases:
    """(E,) float32, each or None: added to the logits, and to the scores for the choice alone."""

    logits: torch.Tensor | None
    choice: torch.Tensor | None

    @classmethod
    def of(cls, module: nn.Module, experts: int) -> Self:
        """
        Raises:
            ValueError: the module has more vectors of E numbers than one knows what to do with.
        """
        vectors = vectors_of(module, experts)
        logits = vectors.pop(_BIAS, None)
        if len(vectors) > 1:
            raise ValueError(f"{', '.join(vectors)} might each be a bias")
        choice = next(iter(vectors.values()), None)
        return cls(*(None if bias is None else bias.detach().float().contiguous() for bias in (logits, choice)))


def vectors_of(module: nn.Module, experts: int) -> dict[str, torch.Tensor]:
    """What a router holds beside its weight: vectors of a number for each expert, by name."""
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None and tuple(tensor.shape) == (experts,)}


def top_k_name(module: nn.Module) -> str | None:
    """The attribute that says how many experts a token takes."""
    return next((name for name in _TOP_K_NAMES if isinstance(getattr(module, name, None), int)), None)


def routed(
    runtime: Runtime, spec: RouterSpec, form: RouterForm, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (T, E), weights (T, K) and ids (T, K) of hidden states (T, H); all contiguous and on the CPU, x and weight of one dtype."""
    tokens = x.shape[0]
    logits = x.new_empty((tokens, weight.shape[0]), dtype=form.logits_type)
    weights = x.new_empty((tokens, form.top_k), dtype=form.weights_type)
    index = x.new_empty((tokens, form.top_k), dtype=torch.int64)
    runtime.route_at(spec, x.data_ptr(), weight.data_ptr(), tokens, logits.data_ptr(), weights.data_ptr(), index.data_ptr())
    return logits, weights, index


def form_of(module: nn.Module, runtime: Runtime) -> RouterForm | None:
    """The form that gives on random hidden states what `module` gives; None where none does.

    The module is loaded, and holds a `weight` (E, H) on the CPU.

    Tried in float32, where no two logits are equal and the choice has one answer; dtypes and rounding are read off a run in the
    module's own.
    """
    weight = module._parameters["weight"]
    assert weight is not None, "the caller has looked"
    experts = weight.shape[0]
    x = torch.randn(_TRIED, weight.shape[1], generator=torch.Generator().manual_seed(0))
    wide, plain = _in_float32(module), type(module).forward  # no hook is told of made-up tokens
    try:
        with torch.no_grad():
            expected, own = plain(wide, x), plain(module, x[:2].to(weight.dtype))
        biases = Biases.of(module, experts)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
        return None
    order = _order(expected, experts)
    if order is None or _order(own, experts) != order:
        return None
    full = wide._parameters["weight"].detach()
    parts = [expected[at] for at in order]
    fitting = []
    for form in _candidates(module, experts, order):
        spec = form.spec(full, biases)
        # Most fail on the first tokens.
        if _scale([part[:_FIRST] for part in parts], routed(runtime, spec, form, x[:_FIRST], full)) is None:
            continue
        scale = _scale(parts, routed(runtime, spec, form, x, full))
        if scale is not None:
            fitting.append(_typed(replace(form, scale=scale, flattens=_flattens(wide, x)), own, weight.dtype))
    grouping = {(form.groups, form.kept_groups, form.group_score) for form in fitting}
    return fitting[0] if len(grouping) == 1 else None  # two that fit would differ on other tokens


def _flattens(wide: Any, x: torch.Tensor) -> bool:
    try:
        with torch.no_grad():
            found = type(wide).forward(wide, x[None, :2])
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
        return False
    return isinstance(found, tuple) and all(isinstance(part, torch.Tensor) and part.dim() == 2 for part in found)


def _in_float32(module: nn.Module) -> Any:
    """The module with float32 copies of what it holds."""
    made = copy.copy(module)
    widened = {name: None if held is None else nn.Parameter(held.detach().float(), False) for name, held in module._parameters.items()}
    buffers = {name: held.float() if held is not None and held.is_floating_point() else held for name, held in module._buffers.items()}
    made.__dict__ = {**module.__dict__, "_parameters": widened, "_buffers": buffers}
    return made


def _order(output: Any, experts: int) -> tuple[int, int, int] | None:
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(part, torch.Tensor) and part.dim() == 2 for part in output):
        return None
    index = [at for at, part in enumerate(output) if part.dtype == torch.int64]
    wide = [at for at, part in enumerate(output) if part.is_floating_point() and part.shape[1] == experts]
    if len(index) != 1 or len(wide) != 1 or output[index[0]].shape[1] == experts:
        return None
    return wide[0], 3 - wide[0] - index[0], index[0]


def _candidates(module: nn.Module, experts: int, order: tuple[int, int, int]) -> Iterator[RouterForm]:
    name = top_k_name(module)
    if name is None:
        return
    top_k = getattr(module, name)
    scores = (("softmax", False), ("softmax", True), ("sigmoid", True), ("sigmoid", False), ("chosen_softmax", False))
    for (score, normalise), (groups, kept, by) in itertools.product(scores, _groupings(module, experts, top_k)):
        yield RouterForm(top_k, score, normalise, groups, kept, by, order)


def _groupings(module: nn.Module, experts: int, top_k: int) -> list[tuple[int, int, str]]:
    """Groups, those kept, and how they are scored; some modules hold numbers of groups that they do not use."""
    found = ((getattr(module, groups, None), getattr(module, kept, None)) for groups, kept in _GROUP_NAMES)
    groups, kept = next(((a, b) for a, b in found if isinstance(a, int) and isinstance(b, int)), (1, 1))
    usable = 1 <= kept < groups and experts % groups == 0 and top_k <= experts // groups * kept
    grouped = [(groups, kept, "two_largest")] if usable and experts > groups else []  # of groups of one, both say the same
    if usable and kept < top_k:  # else the best experts are in the best groups: no group is left out that matters
        grouped.append((groups, kept, "largest"))
    return [*grouped, (1, 1, "two_largest")]


def _scale(expected: list[torch.Tensor], found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float | None:
    """The one factor between the weights of the same experts, if logits and choices are the same and there is one."""
    logits, weights, index = expected
    if index.shape != found[2].shape or float((logits - found[0]).norm()) > _TOLERANCE * float(logits.norm()):
        return None
    order, own = index.argsort(dim=-1), found[2].argsort(dim=-1)
    if not torch.equal(index.gather(-1, order), found[2].gather(-1, own)):
        return None
    ratios = weights.gather(-1, order) / found[1].gather(-1, own)
    scale = float(ratios.median())
    return scale if float((ratios / scale - 1).abs().max()) <= _TOLERANCE else None


def _typed(form: RouterForm, own: tuple[torch.Tensor, ...], dtype: torch.dtype) -> RouterForm:
    logits, weights = own[form.order[0]], own[form.order[1]]
    rounds = dtype != torch.float32 and torch.equal(logits, logits.to(dtype).to(logits.dtype))
    return replace(form, rounds_logits=rounds, logits_type=logits.dtype, weights_type=weights.dtype)


logger = logging.getLogger(__name__)

FEW_TOKENS = 8  # a prompt's routers are a product of matrices, which PyTorch computes well


@dataclass(frozen=True, slots=True)
class CpuRouterOptions:
    """`cpu_router` has no options."""


@dataclass(frozen=True, slots=True)
class RouterState:
    """What the calls of one router share."""

    runtime: Runtime
    spec: RouterSpec
    form: RouterForm
    dtype: torch.dtype
    shape: torch.Size  # of the weight
    top_k_name: str
    biases: Mapping[str, tuple[int, int]]  # which tensors the spec has copies of: where they were, and their versions

    def holds(self, module: nn.Module) -> bool:
        """Whether the module still says what was copied from it."""
        return module.__dict__.get(self.top_k_name) == self.form.top_k and all(
            _mark(module._parameters.get(name, module._buffers.get(name))) == mark for name, mark in self.biases.items()
        )


def _mark(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Another once a tensor was replaced or, outside of inference mode, written to."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)


class CpuRouter(InPlaceOperator):
    """A router of up to 8 tokens in one call: logits, scores, the choice and its weights.

    The module stays, with its weight, which is read as it is stored; families that widen it to float32 for each call (DeepSeek-V3's)
    move five times the bytes. By which rule it chooses is found by trying it. More tokens, tensors on a GPU, gradients, other dtypes or
    sizes than at load, graphs of `torch.compile`, and a module whose `top_k` or biases have changed are left to the module, as before.
    Logits are summed in another order than PyTorch's: where rounding makes two of them equal, the first expert is chosen.
    """

    name = "cpu_router"
    kind = "router"
    options_type = CpuRouterOptions
    summary = "the router's choice of experts for a few tokens by the C++ kernel, on the CPU"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime
        self._placed = False

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: CpuRouterOptions) -> str | None:
        return None  # one that chooses by a rule of its own is left as it is, which a load finds out

    @classmethod
    def build(cls, module: nn.Module, options: CpuRouterOptions, context: InjectionContext) -> Self:
        return cls(context.runtime)

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        module = model.get_submodule(path)
        weight = module._parameters.get("weight")  # some have it in a layer of their own
        form = form_of(module, self._runtime) if weight is not None and weight.dim() == 2 and is_plain(weight) else None
        if weight is None or form is None:
            logger.info("cpu_router: %s (%s) chooses by a rule of its own, or elsewhere, and stays as it is", path, type(module).__name__)
            return
        name, experts = top_k_name(module), weight.shape[0]
        assert name is not None, "no form was found without"
        marks = {name: _mark(tensor) for name, tensor in vectors_of(module, experts).items()}
        spec = form.spec(weight, Biases.of(module, experts))
        compute_by(module, _forward, RouterState(self._runtime, spec, form, weight.dtype, weight.shape, name, marks))
        self._placed = True

    def set_aside(self, module: nn.Module) -> AbstractContextManager[None]:
        return as_it_was(module)

    def placement(self) -> str:
        return f"router: {self.name}, {f'the CPU ({describe(self._runtime)})' if self._placed else 'as before'}"


def _forward(module: nn.Module, state: RouterState, x: Any) -> tuple[torch.Tensor, ...] | None:
    """What the kernel chooses for `x`; None for what is left to the module."""
    weight = module._parameters["weight"]
    if (
        torch.compiler.is_compiling()
        or type(x) is not torch.Tensor
        or weight is None
        or not x.dtype == weight.dtype == state.dtype
        or weight.shape != state.shape
        or not (x.dim() == 2 or (x.dim() == 3 and state.form.flattens))
        or x.shape[-1] != weight.shape[1]
        or x.numel() > FEW_TOKENS * weight.shape[1]
        or not (x.is_cpu and is_plain(weight))
        or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        or not state.holds(module)
    ):
        return None
    parts = routed(state.runtime, state.spec, state.form, x.reshape(-1, x.shape[-1]).contiguous(), weight)
    placed: list[torch.Tensor] = [*parts]
    for at, part in zip(state.form.order, parts, strict=True):
        placed[at] = part
    return tuple(placed)
