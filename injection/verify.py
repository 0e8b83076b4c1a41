"""The two forward passes of a verification, and what follows from them.

Every injected module against the stock one on the same inputs, in one forward pass that is the stock model's.

Two models' logits on one text: how far apart their next-token distributions are, and how well each predicts the text.

Single modules of the stock model, made from the checkpoint when they are wanted.

How far an operator's output may be from the stock module's, by the type of its weights and activations, and why.

Real prose to verify on where the user gives none: Abraham Lincoln's address at Gettysburg, 1863, in the public domain.

A picture of the error of every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from moegraft.injection.checkpoint import LazyTensor
from moegraft.injection.checkpoint.keymap import Target
from moegraft.injection.checkpoint.loader import open_weights
from moegraft.injection.checkpoint.sources import convert
from moegraft.injection.graft import Injection
from moegraft.injection.model_source import ModelSource, meta_skeleton
from moegraft.injection.rules.rule import layer_of
from moegraft.operators.base import InPlaceOperator, Operator
from moegraft.operators.errors import CheckpointError, NotEnoughMemoryError, UnsupportedModelError
from moegraft.operators.machine import probe_machine
from moegraft.operators.sparsity import achieved, total_counts

GIB = 1 << 30


class StockModules:
    """The modules of a checkpoint's stock model by path, each with its own weights and code; nothing is kept."""

    def __init__(self, source: ModelSource) -> None:
        """
        Raises:
            CheckpointError: the checkpoint cannot be opened.
        """
        self._skeleton = meta_skeleton(source, torch.float32)
        weights = open_weights(source, self._skeleton)
        self._tensors = weights.tensors
        self._keymap = weights.keymap

    def make(self, path: str) -> nn.Module:
        """The module at `path`, in float32 where that fits in memory and as stored where it does not.

        Raises:
            CheckpointError: a parameter is missing or cannot be read.
            NotEnoughMemoryError: there is no memory for this one module.
        """
        module = deepcopy(self._skeleton.get_submodule(path))
        targets = {name: self._target(f"{path}.{name}") for name, _ in module.named_parameters()}
        dtype = self._dtype(path, module, targets)
        # Read by transformers' own conversion, so that a mistake in the operators' way of reading shows as an error.
        state = {name: self._read(target).to(dtype) for name, target in targets.items()}
        module.load_state_dict(state, assign=True)
        return module.requires_grad_(False).eval()

    def _target(self, name: str) -> Target:
        targets = self._keymap.targets
        target = targets.get(name) or targets.get(self._skeleton.all_tied_weights_keys.get(name, ""))
        if target is None:
            folder = next(iter(self._tensors.values())).file.parent
            raise CheckpointError(f"{folder}: nothing in this checkpoint feeds {name}; a shard or keys are missing")
        return target

    def _read(self, target: Target) -> torch.Tensor:
        if target.converter is not None:
            return convert(target, self._tensors, self._skeleton)
        return self._tensors[target.all_keys[0]][...]

    def _dtype(self, path: str, module: nn.Module, targets: dict[str, Target]) -> torch.dtype | None:
        """float32, or None to keep what is stored."""
        stored = [sum(tensor.nbytes for tensor in self._tensors_of(target)) for target in targets.values()]
        whole = 4 * sum(parameter.numel() for parameter in module.parameters())
        free = probe_machine().available_bytes
        if whole + max(stored, default=0) <= free:
            return torch.float32
        if 2 * sum(stored) <= free:  # the parts and what they are joined to
            return None
        raise NotEnoughMemoryError(
            f"the stock {path} needs {2 * sum(stored) / GIB:.1f} GiB beside the injected model and {free / GIB:.1f} GiB are free; "
            "a smaller weight type in the rule file leaves more"
        )

    def _tensors_of(self, target: Target) -> list[LazyTensor]:
        return [self._tensors[key] for key in target.all_keys]


@dataclass(frozen=True, slots=True)
class Expected:
    """A relative error, `|output - stock| / |stock|` in the Frobenius norm.

    Attributes:
        typical: what bell-shaped weights give.
        limit: above it, something else than rounding is wrong.
    """

    typical: float
    limit: float
    reason: str


# Errors of the three products of an expert add up as independent ones: gate and up meet in a product, down adds its own.
BY_WEIGHTS: Mapping[str, Expected] = {
    "float32": Expected(1e-6, 1e-4, "float32 sums in another order"),
    "float16": Expected(4e-4, 2e-3, "weights of 11 bits, each off by up to 0.05 %"),
    "bfloat16": Expected(3e-3, 1e-2, "weights and, with bfloat16 activations, products of 8 bits, each off by up to 0.4 %"),
    "int8": Expected(1.5e-2, 4e-2, "32 weights share a scale of 127 steps, as do 32 activations: about 0.5 % each, in three products"),
    "q4_k": Expected(1.2e-2, 4e-2, "weights as the file has them; 32 activations share a scale of 127 steps, in three products"),
    "q6_k": Expected(1.2e-2, 4e-2, "weights as the file has them; 32 activations share a scale of 127 steps, in three products"),
    "int4": Expected(1.5e-1, 3e-1, "32 weights share a scale of 8 steps: about 8 % each, in three products"),
}
# The stock module is computed in float32, the operator takes and gives the model's dtype.
BY_ACTIVATIONS: Mapping[torch.dtype, Expected] = {
    torch.float32: Expected(0.0, 0.0, "float32 activations"),
    torch.float16: Expected(4e-4, 2e-3, "float16 activations"),
    torch.bfloat16: Expected(3e-3, 1e-2, "bfloat16 activations"),
}


def expected_error(weight_type: str | None, activations: torch.dtype) -> Expected | None:
    """What to expect, or None for a weight type whose error is not known; of `gate_up+down`, the larger."""
    parts = [BY_WEIGHTS.get(name) for name in (weight_type or "").split("+")]
    given = BY_ACTIVATIONS.get(activations)
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or given is None:
        return None
    weights = max(known, key=lambda part: part.limit)
    typical = (weights.typical**2 + given.typical**2) ** 0.5
    reason = weights.reason if not given.limit else f"{weights.reason}; {given.reason}"
    return Expected(typical, weights.limit + given.limit, reason)


@dataclass(frozen=True, slots=True)
class LayerError:
    """One injected module beside the stock one.

    Attributes:
        relative_error: `|output - stock| / |stock|` over all tokens.
        cosine: of the two outputs as one long vector each.
        expected: None where nothing is known of the weight type.
    """

    module: str
    operator: str
    weight_type: str | None
    relative_error: float
    cosine: float
    expected: Expected | None

    @property
    def ok(self) -> bool:
        """Finite, and within the limit where there is one."""
        return self.relative_error <= (self.expected.limit if self.expected is not None else torch.finfo(torch.float64).max)


def injection_of(model: PreTrainedModel) -> Injection:
    """What `optimize_and_load` did to a model."""
    injection = model.moegraft
    assert isinstance(injection, Injection), "an injected model says what was done to it"
    return injection


@contextmanager
def stock_in_place(model: PreTrainedModel, stock: StockModules, found: list[LayerError]) -> Iterator[None]:
    """While it lasts, every injected module gives the stock module's output, and its own is compared with that.

    The model so computes what the stock model does with one stock module in memory at a time, and each comparison is on
    the activations of the stock model: an early layer's error does not blur those after it. Operators that work within a stock module
    are set aside meanwhile; what they change shows in the logits alone.
    """
    with ExitStack() as undone:
        for path, operator in injection_of(model).operators.items():
            undone.enter_context(operator.set_aside(model.get_submodule(path)))
            if not isinstance(operator, InPlaceOperator):  # those work within a stock module, or drive the model
                hook = operator.register_forward_hook(_comparing(path, operator, stock, found), with_kwargs=True)
                undone.callback(hook.remove)
        yield


def _comparing(path: str, operator: Operator, stock: StockModules, found: list[LayerError]) -> Callable[..., torch.Tensor]:
    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        reference_module = stock.make(path)
        dtype = next(reference_module.parameters()).dtype
        given = [_cast(value, dtype) for value in args]
        reference: torch.Tensor = reference_module(*given, **{name: _cast(value, dtype) for name, value in kwargs.items()})
        found.append(layer_error(path, operator, output, reference))
        return reference.to(output.dtype).to(output.device)

    return compare


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to("cpu", dtype) if value.is_floating_point() else value.to("cpu")


def layer_error(path: str, operator: Operator, output: torch.Tensor, reference: torch.Tensor) -> LayerError:
    """Compares two outputs of one module, of any dtypes."""
    ours, theirs = output.detach().double().flatten().to("cpu"), reference.detach().double().flatten()
    difference, size = float((ours - theirs).norm()), float(theirs.norm())
    relative = difference / size if size else (0.0 if difference == 0 else float("inf"))
    weight_type = operator.weight_type
    expected = expected_error(weight_type, output.dtype)
    cosine = float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))
    return LayerError(path, operator.name, weight_type, relative, cosine, expected)


CHUNK = 64  # positions at a time: a float64 row of a large vocabulary has a megabyte


@dataclass(frozen=True, slots=True)
class LogitsError:
    """Injected against stock, over all positions.

    Attributes:
        kl_nats: mean of KL(stock || injected), in nats.
        top1_agreement: share of positions where both find the same token likeliest.
        stock_perplexity, injected_perplexity: of the text's own next tokens.
    """

    positions: int
    kl_nats: float
    top1_agreement: float
    stock_perplexity: float
    injected_perplexity: float


def compare_logits(stock: torch.Tensor, injected: torch.Tensor, ids: torch.Tensor) -> LogitsError:
    """
    Args:
        stock, injected: (T, V) of any float dtype.
        ids: (T,) the tokens that the logits were computed on; T is 2 at least.
    """
    kl = agreed = 0.0
    losses = [0.0, 0.0]
    for start in range(0, len(ids), CHUNK):
        part = slice(start, start + CHUNK)
        ours, theirs = (logits[part].double().log_softmax(-1) for logits in (injected, stock))
        kl += float(F.kl_div(ours, theirs, log_target=True, reduction="sum"))
        agreed += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
        following = ids[start + 1 : start + CHUNK + 1]
        for index, logs in enumerate((theirs, ours)):
            losses[index] += float(F.nll_loss(logs[: len(following)], following, reduction="sum")) if len(following) else 0.0
    perplexities = [float(torch.tensor(loss / (len(ids) - 1), dtype=torch.float64).exp()) for loss in losses]
    return LogitsError(len(ids), kl / len(ids), agreed / len(ids), perplexities[0], perplexities[1])


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found.

    Attributes:
        layers: in the order of the model.
        unreached: injected modules that text does not pass, such as those of a vision tower.
        left_out: share of routed neurons that the injected logits are without; None where rules ask for no sparsity. Layers are
            compared with every neuron.
    """

    tokens: int
    layers: tuple[LayerError, ...]
    unreached: tuple[str, ...]
    logits: LogitsError
    left_out: float | None = None

    @property
    def first_bad(self) -> LayerError | None:
        return next((layer for layer in self.layers if not layer.ok), None)

    @property
    def ok(self) -> bool:
        return self.first_bad is None and self.logits.kl_nats == self.logits.kl_nats  # NaN is no KL


def verify(model: PreTrainedModel, source: ModelSource, ids: torch.Tensor) -> Verification:
    """Compares an injected model with the stock model of its checkpoint.

    Args:
        model: as `optimize_and_load` returns it.
        source: what it was loaded from.
        ids: (T,) int64 tokens of real text, 2 or more.

    Raises:
        CheckpointError, NotEnoughMemoryError: a stock module cannot be made.
    """
    stock = StockModules(source)
    layers: list[LayerError] = []
    sparse = [operator.sparsity for operator in injection_of(model).operators.values() if operator.sparsity is not None]
    with torch.no_grad():
        with stock_in_place(model, stock, layers):
            stock_logits = _logits(model, ids)
        before = total_counts(sparse)
        injected_logits = _logits(model, ids)
    wanted = [swap.module for swap in injection_of(model).plan.swaps if not swap.in_place]
    by_path = {layer.module: layer for layer in layers}
    return Verification(
        tokens=len(ids),
        layers=tuple(by_path[path] for path in wanted if path in by_path),
        unreached=tuple(path for path in wanted if path not in by_path),
        logits=compare_logits(stock_logits, injected_logits, ids),
        left_out=achieved(total_counts(sparse) - before) if any(layer.threshold for layer in sparse) else None,
    )


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """(T, V), on the CPU."""
    logits: torch.Tensor = model(input_ids=ids[None].to(model.device), use_cache=False).logits
    return logits[0].to("cpu")


SAMPLE_TEXT = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and dedicated to the \
proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and so dedicated, can long endure. We \
are met on a great battle-field of that war. We have come to dedicate a portion of that field, as a final resting place for those who \
here gave their lives that that nation might live. It is altogether fitting and proper that we should do this.

But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this ground. The brave men, living and \
dead, who struggled here, have consecrated it, far above our poor power to add or detract. The world will little note, nor long \
remember what we say here, but it can never forget what they did here. It is for us the living, rather, to be dedicated here to the \
unfinished work which they who fought here have thus far so nobly advanced. It is rather for us to be here dedicated to the great task \
remaining before us -- that from these honored dead we take increased devotion to that cause for which they gave the last full measure \
of devotion -- that we here highly resolve that these dead shall not have died in vain -- that this nation, under God, shall have a new \
birth of freedom -- and that government of the people, by the people, for the people, shall not perish from the earth.
"""


MISSING = "%s draws with matplotlib, which is not installed; install it with: pip install 'moegraft[bench]'"


def require_matplotlib(option: str) -> None:
    """
    Args:
        option: what would draw, for the message.

    Raises:
        UnsupportedModelError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedModelError(MISSING % option) from error


def plot(found: Verification, path: Path) -> None:
    """Writes a PNG: relative error by layer, one series an operator and weight type, with the limit of each.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    series: dict[str, list[tuple[int, float]]] = {}
    for place, layer in enumerate(found.layers):
        number = layer_of(layer.module)
        name = f"{layer.operator}, {layer.weight_type or 'unknown weights'}"
        series.setdefault(name, []).append((place if number is None else number, layer.relative_error))
    limits = {f"{layer.operator}, {layer.weight_type}": layer.expected.limit for layer in found.layers if layer.expected}
    for name, points in series.items():
        (line,) = axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=name)
        if name in limits:
            axes.axhline(limits[name], color=line.get_color(), linestyle="--", linewidth=0.8, label=f"limit, {name}")
    axes.set(xlabel="layer", ylabel="relative error", yscale="log", title=f"injected against stock, {found.tokens} tokens")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150, format="png")
