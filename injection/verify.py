"""Comparison of an injected model with the stock model of its checkpoint: every replaced module, the logits and the perplexity.

All modules are compared in one forward pass, on the activations of the stock model. One stock module is in memory at a time, so the
stock model need not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from moegraft.injection.checkpoint.keymap import Target
from moegraft.injection.checkpoint.sources import read_parameter, target_of
from moegraft.injection.injected import Injection, injection_of, sparse_layers
from moegraft.injection.meta_model import ModelSource, meta_skeleton, open_weights
from moegraft.operators.base import CACHE, DecodeLoss, InPlaceOperator, Operator
from moegraft.operators.draft import DraftSettings
from moegraft.operators.errors import NotEnoughMemoryError, human_bytes
from moegraft.operators.machine import probe_machine
from moegraft.operators.sparsity import achieved, total_counts, whole
from moegraft.operators.weight_formats import FORMATS, Expected
from moegraft.operators.weights import WeightTypes

EVERY_EXPERT = DraftSettings()  # drafts add no expert to another layer than its own
POSITIONS = 64  # compared at a time: a float64 row of a large vocabulary takes a megabyte


# The errors of an expert's three products are independent and add up.
BY_WEIGHTS: Mapping[str, Expected] = {
    name: form.expected
    or (
        Expected(3e-3, 1e-2, "weights as in the file; prompts round activations to bfloat16 where the CPU multiplies in it")
        if form.floats
        else Expected(1.2e-2, 4e-2, "weights as in the file; 32 activations share a scale of 127 steps, in three products")
    )
    for name, form in FORMATS.items()
}
# Of matrices that are packed to blocks when a model is loaded; the errors of the weights add to those of activations.
BY_ENCODING: Mapping[str, Expected] = {
    name: Expected(error, min(2 * error, 0.95), f"weights rounded to {name}: about {100 * error / 3**0.5:.2g} % each, in three products")
    for name, form in FORMATS.items()
    if form.encoding is not None and (error := form.encoding.error) is not None
}
# The stock module computes in float32, the operator's input and output have the model's dtype.
BY_ACTIVATIONS: Mapping[torch.dtype, Expected] = {
    torch.float32: Expected(0.0, 0.0, "float32 activations"),
    torch.float16: Expected(4e-4, 2e-3, "float16 activations"),
    torch.bfloat16: Expected(3e-3, 1e-2, "bfloat16 activations"),
}


def expected_error(weight_type: str | None, activations: torch.dtype, stored: Container[str] | None = None) -> Expected | None:
    """Return the error to expect, the largest one of several types; None for a weight type whose error is unknown.

    Args:
        stored: the formats of blocks that the file has; by default all.
    """
    names = sorted(WeightTypes.parse(weight_type or "").names)
    parts = [(BY_ENCODING if stored is not None and name in BY_ENCODING and name not in stored else BY_WEIGHTS).get(name) for name in names]
    of_activations = BY_ACTIVATIONS.get(activations)
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or of_activations is None:
        return None
    weights = max(known, key=lambda part: part.limit)
    typical = (weights.typical**2 + of_activations.typical**2) ** 0.5
    reason = f"{weights.reason}; {of_activations.reason}" if of_activations.limit else weights.reason
    return Expected(typical, weights.limit + of_activations.limit, reason)


@dataclass(frozen=True, slots=True)
class LayerError:
    """One injected module compared with the stock one.

    Attributes:
        relative_error: `|output - stock| / |stock|` over all tokens.
        cosine: cosine similarity of the two outputs, flattened.
        expected: None if the error of the weight type is unknown.
    """

    module: str
    operator: str
    weight_type: str | None
    relative_error: float
    cosine: float
    expected: Expected | None

    @property
    def ok(self) -> bool:
        """Whether the error is finite, and within the limit if there is one."""
        return self.relative_error <= (self.expected.limit if self.expected is not None else torch.finfo(torch.float64).max)


@dataclass(frozen=True, slots=True)
class LogitsError:
    """Injected logits compared with stock ones, over all positions.

    Attributes:
        kl_nats: mean of KL(stock || injected), in nats.
        top1_agreement: share of positions with the same most likely token.
        stock_perplexity, injected_perplexity: perplexity of the text.
    """

    positions: int
    kl_nats: float
    top1_agreement: float
    stock_perplexity: float
    injected_perplexity: float


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome.

    Attributes:
        layers: in the order of the model.
        unreached: injected modules that no token of a text reaches, such as those of a vision tower.
        left_out: share of the routed neurons that the injected logits leave out; None without sparsity. Layers are compared with every
            neuron.
        decode_loss: what the injected logits, which are then those of decode steps, add to the error of layers; None where decode steps
            compute what prompts do.
    """

    tokens: int
    layers: tuple[LayerError, ...]
    unreached: tuple[str, ...]
    logits: LogitsError
    left_out: float | None = None
    decode_loss: str | None = None

    @property
    def first_bad(self) -> LayerError | None:
        return next((layer for layer in self.layers if not layer.ok), None)

    @property
    def ok(self) -> bool:
        return self.first_bad is None and self.logits.kl_nats == self.logits.kl_nats  # not NaN


def verify(model: PreTrainedModel, source: ModelSource, ids: torch.Tensor) -> Verification:
    """Compare an injected model with the stock model of its checkpoint; a card that is saved with the model then states the outcome.

    Args:
        model: from `optimize_and_load`.
        source: the checkpoint that it was loaded from.
        ids: (T,) int64 tokens of real text, 2 or more.

    Raises:
        CheckpointError, NotEnoughMemoryError: a stock module cannot be built.
    """
    injection = injection_of(model)
    assert injection is not None, "optimize_and_load marks every model that it returns"
    sparse = list(sparse_layers(model).values())
    layers: dict[str, LayerError] = {}
    with _stock_outputs(model, injection, StockModules(source), layers):
        stock_logits = logits_of(model, ids)
    before = total_counts(sparse)
    loss = _decode_loss(injection)
    injected_logits = logits_of(model, ids) if loss is None else decoded_logits_of(model, ids, loss)
    replaced = [swap.module for swap in injection.plan.swaps if not swap.in_place]
    injection.verifications.append(compare_logits(stock_logits, injected_logits, ids))
    return Verification(
        tokens=len(ids),
        layers=tuple(layers[path] for path in replaced if path in layers),
        unreached=tuple(path for path in replaced if path not in layers),
        logits=injection.verifications[-1],
        left_out=achieved(total_counts(sparse) - before) if any(layer.threshold for layer in sparse) else None,
        decode_loss=None if loss is None else loss.text,
    )


def _decode_loss(injection: Injection) -> DecodeLoss | None:
    """Return what decode steps of a model compute otherwise than prompts, for whatever reasons together."""
    losses = list(dict.fromkeys(loss for swap in injection.plan.swaps if (loss := swap.traits.decode_loss) is not None))
    if not losses:
        return None
    limited = next((loss for loss in losses if loss.settings is not None), None)
    longest = limited or max(losses, key=lambda loss: loss.tokens)  # a limit is that of a pass over as many tokens
    return DecodeLoss(" and ".join(loss.text for loss in losses), longest.tokens, longest.settings)


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits (T, V) of `ids (T,)`, on the CPU."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids[None].to(model.device), use_cache=False).logits
    return logits[0].to("cpu")


def decoded_logits_of(model: PreTrainedModel, ids: torch.Tensor, loss: DecodeLoss) -> torch.Tensor:
    """Return the logits (T, V) of `ids (T,)`, on the CPU, in passes of decoding that have `loss`."""
    injection, rows = injection_of(model), []
    assert injection is not None, "verify asks for an injected model"
    operator = injection.model_operator
    cache = None if operator is None else operator.new_cache(model)
    with torch.inference_mode(), nullcontext() if loss.settings is None else injection.context.draft_switch.drafting(loss.settings):
        for tokens in ids.to(model.device).split(loss.tokens):
            outputs = model(input_ids=tokens[None], use_cache=True, **{CACHE: cache})
            cache = outputs[CACHE]
            rows.append(outputs.logits[0].to("cpu"))
    return torch.cat(rows)


def compare_logits(stock: torch.Tensor, injected: torch.Tensor, ids: torch.Tensor) -> LogitsError:
    """Compare next-token distributions, and how well each predicts the text.

    Args:
        stock, injected: (T, V) of any float dtype.
        ids: (T,) the tokens that the logits were computed on; T is 2 at least.
    """
    kl = agreed = 0.0
    losses = [0.0, 0.0]
    for start in range(0, len(ids), POSITIONS):
        part = slice(start, start + POSITIONS)
        ours, theirs = (logits[part].double().log_softmax(-1) for logits in (injected, stock))
        kl += float(F.kl_div(ours, theirs, log_target=True, reduction="sum"))
        agreed += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
        following = ids[start + 1 : start + POSITIONS + 1]
        for index, logs in enumerate((theirs, ours)):
            losses[index] += float(F.nll_loss(logs[: len(following)], following, reduction="sum")) if len(following) else 0.0
    stock_perplexity, injected_perplexity = (float(torch.tensor(loss / (len(ids) - 1), dtype=torch.float64).exp()) for loss in losses)
    return LogitsError(len(ids), kl / len(ids), agreed / len(ids), stock_perplexity, injected_perplexity)


@contextmanager
def _stock_outputs(model: PreTrainedModel, injection: Injection, stock: StockModules, errors: dict[str, LayerError]) -> Iterator[None]:
    """Compare the output of every injected module with the stock module's, and return the stock output from it.

    So every comparison is on the activations of the stock model, and the error of an early layer does not affect later ones. Operators
    that work within a stock module are disabled meanwhile; the logits show their effect.
    """
    with ExitStack() as stack:
        stack.enter_context(whole(sparse_layers(model).values()))
        stack.enter_context(injection.context.draft_switch.drafting(EVERY_EXPERT))
        for path, operator in injection.operators.items():
            if isinstance(operator, InPlaceOperator):
                stack.enter_context(operator.set_aside(model.get_submodule(path)))
            else:
                hook = operator.register_forward_hook(_comparing(path, operator, stock, errors), with_kwargs=True)
                stack.callback(hook.remove)
        yield


def _comparing(path: str, operator: Operator, stock: StockModules, errors: dict[str, LayerError]) -> Callable[..., torch.Tensor]:
    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        stock_module = stock.make(path)
        dtype = next(stock_module.parameters()).dtype

        def to_stock(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.to("cpu", dtype) if value.is_floating_point() else value.to("cpu")

        expected: torch.Tensor = stock_module(*map(to_stock, args), **{name: to_stock(value) for name, value in kwargs.items()})
        ours, theirs = output.detach().double().flatten().to("cpu"), expected.detach().double().flatten()
        difference, size = float((ours - theirs).norm()), float(theirs.norm())
        relative = difference / size if size else (0.0 if difference == 0 else float("inf"))
        cosine = float(F.cosine_similarity(ours, theirs, dim=0))
        limit = expected_error(operator.weight_type, output.dtype, stock.stored_types(path))
        errors[path] = LayerError(path, operator.name, operator.weight_type, relative, cosine, limit)
        return expected.to(output.dtype).to(output.device)

    return compare


class StockModules:
    """The modules of a checkpoint's stock model, built one at a time."""

    def __init__(self, source: ModelSource) -> None:
        self._skeleton = meta_skeleton(source, torch.float32)
        self._weights = open_weights(source, self._skeleton)
        self._tensors, self._keymap = self._weights.tensors, self._weights.keymap

    def stored_types(self, path: str) -> frozenset[str]:
        """Return the weight types of a module whose weights are stored in blocks."""
        types = self._weights.stored_types(path)
        return frozenset() if types is None else frozenset((types.gate_up, types.down))

    def make(self, path: str) -> nn.Module:
        """Build the module at `path`, in float32 if that fits in memory, else in the stored dtype.

        Raises:
            CheckpointError: a parameter is missing or cannot be read.
            NotEnoughMemoryError: this one module does not fit in memory.
        """
        module = deepcopy(self._skeleton.get_submodule(path))
        targets = {name: target_of(f"{path}.{name}", self._keymap, self._tensors, self._skeleton) for name, _ in module.named_parameters()}
        dtype = self._dtype(path, module, targets)
        # Transformers' own conversion, so that a mistake in the weight sources of operators shows as an error.
        state = {name: read_parameter(target, self._tensors, self._skeleton).to(dtype) for name, target in targets.items()}
        module.load_state_dict(state, assign=True)
        return module.requires_grad_(False).eval()

    def _dtype(self, path: str, module: nn.Module, targets: dict[str, Target]) -> torch.dtype | None:
        """Return float32, or None to keep the stored dtype."""
        stored = [sum(self._tensors[key].nbytes for key in target.all_keys) for target in targets.values()]
        in_float32 = 4 * sum(parameter.numel() for parameter in module.parameters())
        free = probe_machine().available_bytes
        if in_float32 + max(stored, default=0) <= free:
            return torch.float32
        if 2 * sum(stored) <= free:  # the parts and the tensor that they are joined to
            return None
        raise NotEnoughMemoryError(
            f"the stock {path} needs {human_bytes(2 * sum(stored))} besides the injected model and {human_bytes(free)} are free; "
            "a smaller weight type in the rule file leaves more"
        )
