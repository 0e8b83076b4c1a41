"""A uniform interface to the routers of every family: their scores of all experts, and their choices.

Caches read the scores; prefetching applies the routers of later layers to the current hidden states. A router is called as its block calls
it and chooses by its family's own rule, biases and groups included. Its output is read by shapes and dtypes: families differ in the order
of the tensors and in the function from logits to scores.

Shapes: T tokens, E experts, K experts per token, H hidden.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.structure import ROUTER_NAMES

# The functions from logits to scores that families use. A router's function is the one that explains its weights best.
SCORE_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "probabilities": lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}
ALIKE = 0.98  # of the chosen experts; rounding decides between equals
PROBED = 256  # tokens
EXPLAINS = 0.02  # share of a token's weight: bfloat16 rounding changes weights by up to 0.004, another function by more than this


@dataclass(frozen=True, slots=True)
class RouterOutput:
    """The output of a router: logits or scores (T, E or more), and where it chooses, weights and ids (T, K) of the chosen experts.

    Some routers return the weights of all experts instead, (T, E) with zeros for those that are not chosen, and no ids.
    """

    logits: torch.Tensor
    top_k_weights: torch.Tensor | None
    top_k_index: torch.Tensor | None
    all_weights: torch.Tensor | None = None

    @classmethod
    def read(cls, output: Any, num_experts: int) -> Self:
        """Read the output of a router's forward pass.

        Raises:
            ValueError: no floating-point tensor with a column for each expert is in `output`.
        """
        parts = [part for part in (output if isinstance(output, tuple | list) else (output,)) if isinstance(part, torch.Tensor)]
        index = next((part for part in parts if not part.is_floating_point()), None)
        wide = [part for part in parts if part.is_floating_point() and part.shape[-1] >= num_experts]
        if not wide:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts) or "no tensor"
            raise ValueError(f"a router of {num_experts} experts returned {shapes}, without scores of all experts")
        # A layer that chooses all its experts returns two wide tensors, with the logits last where its ids are first.
        logits = wide[-1] if index is None or parts[0] is index else wide[0]
        rest = [part for part in parts if part is not logits and part.is_floating_point()]
        weights = next((part for part in rest if index is not None and part.shape == index.shape), None)
        if index is None:
            return cls(_flat(logits), None, None, _flat(wide[0]) if len(wide) > 1 else None)
        return cls(_flat(logits), None if weights is None else _flat(weights), _flat(index))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])


def score_function(output: RouterOutput) -> str:
    """Return the name of the function in `SCORE_FUNCTIONS` that the weights of the chosen experts follow, up to a factor per token.

    The result is `softmax` where no function fits, or where a token has one expert, whose weight cannot be compared.
    """
    logits = output.logits.float()
    if bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < EXPLAINS).all()):
        return "probabilities"
    if output.top_k_index is None or output.top_k_weights is None or output.top_k_index.shape[-1] < 2:
        return "softmax"
    weights = _shares(output.top_k_weights.float())
    errors = {
        name: float((_shares(function(logits).gather(-1, output.top_k_index.long())) - weights).abs().max())
        for name, function in SCORE_FUNCTIONS.items()
        if name != "probabilities"
    }
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < EXPLAINS else "softmax"


def _shares(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)


def scores_of(router_output: Any, num_experts: int, function: str | None = None) -> torch.Tensor:
    """Return each expert's share of a token's scores: (T, E) float32, rows sum to 1 (less where a router may choose no expert).

    Args:
        router_output: the output of the router's forward pass: logits (T, E) alone, or with weights and ids in any order.
        function: the name in `SCORE_FUNCTIONS` of the family's function from logits to scores; by default inferred from the output.

    Raises:
        ValueError: there are no scores of all experts in `router_output`.
    """
    read = RouterOutput.read(router_output, num_experts)
    name = function or score_function(read)
    scores = SCORE_FUNCTIONS[name](read.logits.float())
    if name in ("sigmoid", "sqrtsoftplus"):
        scores = _shares(scores[:, :num_experts])
    return scores[:, :num_experts]


@dataclass(frozen=True, slots=True)
class RouterRows:
    """What chooses experts by the products of a token with one row of weights for each.

    Attributes:
        weight: (E, H).
        bias: (E,) of the logits; None for none.
        choice_bias: (E,), added to the sigmoid of the logits for the choice (DeepSeek-V3); None where the largest logits are chosen.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    choice_bias: torch.Tensor | None

    def to(self, device: torch.device) -> RouterRows:
        """Return the same on a device."""
        return RouterRows(*(None if each is None else each.to(device) for each in (self.weight, self.bias, self.choice_bias)))  # type: ignore[arg-type]

    @torch.no_grad()
    def choose(self, tokens: torch.Tensor, top_k: int) -> torch.Tensor:
        """Return the ids (T, K) int64 of the likeliest experts for tokens (T, H), the likeliest first."""
        scores = F.linear(tokens.float(), self.weight.float())
        if self.bias is not None:
            scores = scores + self.bias
        if self.choice_bias is not None:
            scores = scores.sigmoid() + self.choice_bias
        return scores.topk(top_k, dim=-1).indices


class Router:
    """One layer's router, called as its block calls it.

    Attributes:
        path: the path of the experts module that it routes to.
    """

    def __init__(self, path: str, module: nn.Module, block: nn.Module, num_experts: int) -> None:
        self.path = path
        self.module = module
        self.num_experts = num_experts
        self._block = block
        self._function: str | None = None
        parameters = list(inspect.signature(module.forward).parameters.values())[1:]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        # By name, not by value: weights that are loaded later replace these tensors.
        self._held = [p.name for p in named if isinstance(getattr(block, p.name, None), torch.Tensor)]
        self._callable = all(p.name in self._held or p.default is not p.empty for p in named)
        self._windowed: bool | None = None  # whether the router needs (1, T, H); None before the first call

    def _call(self, hidden_states: torch.Tensor) -> Any:
        """Call `forward` without hooks, which observe the model's own calls, not predictions."""
        return self.module.forward(hidden_states, **{name: getattr(self._block, name) for name in self._held})

    def read(self, output: Any) -> RouterOutput:
        """Return the router's `output` by its parts, with the choice in weights of all experts."""
        read = RouterOutput.read(output, self.num_experts)
        if read.all_weights is None:
            return read
        weights, index = read.all_weights.topk(self.top_k(), dim=-1)
        return RouterOutput(read.logits, weights, index)

    def scores(self, output: Any) -> torch.Tensor:
        """Return `scores_of` the router's `output`, (T, E) float32; the function from logits to scores is inferred once."""
        read = self.read(output)
        if self._function is None and len(read.logits):
            self._function = score_function(read)
        return scores_of(output, self.num_experts, self._function)

    @torch.no_grad()
    def route(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the ids (T, K) int64 that the router chooses on hidden states (T, H), the likeliest first.

        These may be an earlier layer's. It is an approximation where a router reads more than hidden states and its block's tensors: token
        ids (hash layers of DeepSeek-V4), or another layer's state (Zaya).
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if not self._callable:
            # The matrix with one row of weights per expert gives the logits.
            rows = (p for p in self.module.parameters() if p.dim() == 2 and p.shape[0] >= self.num_experts)
            weight = next(rows, None)
            if weight is None:
                raise UnsupportedModelError(f"{self.path}: its router {type(self.module).__name__} has no row of weights for each expert")
            return F.linear(tokens, weight[: self.num_experts].to(tokens.dtype)).topk(self.top_k(), dim=-1).indices
        if self._windowed is None:
            # (T, H) is tried first: nearly all routers accept it, and some gather along a wrong axis when given (1, T, H).
            try:
                RouterOutput.read(self._call(tokens[:1]), self.num_experts)
                self._windowed = False
            except (ValueError, IndexError, RuntimeError):
                self._windowed = True  # if this fails as well, the call below raises the error
        output = self._call(tokens[None] if self._windowed else tokens)
        read = self.read(output)
        if read.top_k_index is None:
            read = self._routed_by_block(tokens, read)
        assert read.top_k_index is not None, "a router's decision has ids of experts"
        index = read.top_k_index.long()
        weights = self.scores(output).gather(-1, index) if read.top_k_weights is None else read.top_k_weights
        return index.gather(-1, weights.argsort(dim=-1, descending=True, stable=True))  # many routers do not sort

    def rows(self) -> RouterRows | None:
        """Return the router's rows where it has one for each expert.

        They leave out what a router does beside, such as groups of experts and a norm: see `chooses_by_rows`.
        """
        parameters = dict(self.module.named_parameters())
        rows = [each for each in parameters.values() if each.dim() == 2 and len(each) == self.num_experts]
        biases = [each for name, each in parameters.items() if name.rpartition(".")[2] == "bias" and each.shape == (self.num_experts,)]
        if len(rows) != 1 or len(biases) > 1:
            return None
        held = [each for name in self._held if (each := getattr(self._block, name)).shape == (self.num_experts,)]  # MiniMax-M2's
        correction = getattr(self.module, "e_score_correction_bias", held[0] if held else None)
        return RouterRows(rows[0].detach(), biases[0].detach() if biases else None, None if correction is None else correction.detach())

    @torch.no_grad()
    def chooses_by_rows(self) -> int:
        """Return the number of experts per token of a router that chooses what its rows do, of random tokens; 0 for another."""
        rows = self.rows()
        own = ((self.num_experts,), None if rows is None else tuple(rows.weight.shape))
        if rows is None or any(tuple(each.shape) not in own for each in (*self.module.parameters(), *self.module.buffers())):
            return 0  # a scale of its input is hardly seen in random tokens
        drawn = torch.randn(PROBED, rows.weight.shape[1], generator=torch.Generator().manual_seed(0))
        tokens = drawn.to(rows.weight.device, rows.weight.dtype)
        chosen = self.route(tokens)
        found = rows.choose(tokens, chosen.shape[1])
        alike = float((found[:, :, None] == chosen[:, None, :]).any(-1).float().mean()) >= ALIKE
        return chosen.shape[1] if alike else 0

    def top_k(self) -> int:
        """Return the number of experts per token.

        Raises:
            UnsupportedModelError: neither the router nor its block states it.
        """
        count = getattr(self.module, "top_k", getattr(self._block, "top_k", None))
        if not isinstance(count, int):
            raise UnsupportedModelError(
                f"{self.path}: its router {type(self.module).__name__} does not state the number of experts per token"
            )
        return count

    def _routed_by_block(self, tokens: torch.Tensor, read: RouterOutput) -> RouterOutput:
        """Complete the output of a router that returns logits alone, where its block chooses (Jamba before transformers 5.2x)."""
        choose = getattr(self._block, "route_tokens_to_experts", None)
        if choose is None:
            return RouterOutput(read.logits, None, read.logits.topk(self.top_k(), dim=-1).indices)
        given = {"hidden_states": tokens, "router_logits": read.logits}
        chosen = choose(**{name: given[name] for name in inspect.signature(choose).parameters})
        return RouterOutput.read((read.logits, *chosen), self.num_experts)


def experts_paths(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that hold a layer's routed experts, injected or not, in the model's order."""
    paths = (path for path, module in model.named_modules() if path.rpartition(".")[2] == "experts" and hasattr(module, "num_experts"))
    return tuple(path for path in paths if sibling_router(model.get_submodule(path.rpartition(".")[0])) is not None)


def sibling_router(block: nn.Module) -> nn.Module | None:
    """Return the router of a block with experts; None where it has none of its own."""
    routers = (getattr(block, name, None) for name in ROUTER_NAMES)
    return next((module for module in routers if isinstance(module, nn.Module)), None)


def router_of(model: nn.Module, experts_path: str) -> Router:
    """Return the router of the experts module at `experts_path`, a module of the same block; the model may be on meta.

    Raises:
        UnsupportedModelError: the block has no router.
    """
    experts: Any = model.get_submodule(experts_path)  # its attributes are not declared in a common class
    module = sibling_router(model.get_submodule(experts_path.rpartition(".")[0]))
    if module is None:
        names = " or ".join(f"'{name}'" for name in ROUTER_NAMES)
        raise UnsupportedModelError(f"{experts_path}: its block has no module {names} that routes tokens to {type(experts).__name__}")
    return Router(experts_path, module, model.get_submodule(experts_path.rpartition(".")[0]), int(experts.num_experts))


def routers_of(model: nn.Module) -> dict[str, Router]:
    """Return every layer's router by the path of its experts, in the model's order."""
    return {path: router_of(model, path) for path in experts_paths(model)}


class ChosenRows:
    """Lets a block that is made to call its experts with a row of each token for each expert call them with rows of chosen ones alone.

    Such a block (Llama 4) multiplies hidden states by the scores of all experts, which its router returns as (T, E) with zeros for those
    that are not chosen, and adds up what the experts return for E * T rows. It computes the same from the scores of K experts, (T, K), for
    K * T rows. The router is made to return these, and the experts are called with the choice as those of other families are: `(K * T, H),
    ids (K * T, 1) int64, weights (K * T, 1)`, all 1 since the rows are multiplied already.
    """

    def __init__(self, block: nn.Module, experts: nn.Module, num_experts: int) -> None:
        router = sibling_router(block)
        assert router is not None, "a block with experts has a router"
        self._router = Router("", router, block, num_experts)
        self._chosen = threading.local()  # of the thread's last call of the router: (T, K) int64
        router.register_forward_hook(self._routed)
        experts.register_forward_pre_hook(self._called)

    def _routed(self, _module: nn.Module, _args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        scores, *others = output
        top_k_scores, self._chosen.index = scores.topk(self._router.top_k(), dim=-1)
        return (top_k_scores, *others)

    def _called(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if len(args) != 1:
            return args
        (rows,) = args
        index = self._chosen.index.T.reshape(-1, 1)
        if len(index) != len(rows):
            raise UnsupportedModelError(
                f"{type(module).__name__} was called with {len(rows)} rows where its router chose {len(index)} experts for all tokens"
            )
        return rows, index, rows.new_ones(index.shape)
