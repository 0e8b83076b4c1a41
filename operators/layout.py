"""The layout of an experts module: sizes, storage order and gate, found by probing the module rather than by its family."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PretrainedConfig

from moegraft.cpu_backend import ExpertsShape, GateSpec, activations
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.reference import reference_activation, reference_gate
from moegraft.operators.structure import calls_all_rows
from moegraft.operators.weights import Part

TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k", "num_selected_experts")
SHARED_DOWN = ("down_proj", "output_linear")  # names of the down projection of shared experts
# Probing cannot distinguish a wider clamp from no clamp, and no model's activations reach it.
PROBE_RANGE = 64.0
TOLERANCE = 1e-5  # above the difference of two float32 evaluations of one formula
ApplyGate = Callable[[torch.Tensor], torch.Tensor]  # gate and up of N neurons as a module stores their rows, (T, 2N) -> (T, N)


@dataclass(frozen=True, slots=True)
class _StoredForm:
    """How an experts module stores its matrices."""

    gated: bool
    bias: bool
    transposed: bool
    concatenated: bool


def _stored_form(module: nn.Module) -> _StoredForm | None:
    """Return the form of an experts module: the one that it declares, or else the one that its forward pass shows; None without either."""
    if _declares_form(module):
        flags: Any = module
        gated = bool(flags.has_gate)
        return _StoredForm(gated, bool(flags.has_bias), bool(flags.is_transposed), not gated or bool(flags.is_concatenated))
    if module not in _shown:
        _shown[module] = _shown_form(module)
    return _shown[module]


def _declares_form(module: nn.Module) -> bool:
    return hasattr(module, "is_transposed") and hasattr(module, "has_bias")


_shown: WeakKeyDictionary[nn.Module, _StoredForm | None] = WeakKeyDictionary()  # by modules that do not declare their form


def _shown_form(module: nn.Module) -> _StoredForm | None:
    stored = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
    if set(stored) != {"gate_up_proj", "down_proj"} or any(len(shape) != 3 for shape in stored.values()):
        return None
    (_, rows, columns), (_, outputs, inputs) = stored["gate_up_proj"], stored["down_proj"]
    transposed = (rows, columns) == (inputs, 2 * outputs)
    if not transposed and (rows, columns) != (2 * inputs, outputs):
        return None
    apply = partial(_gate_in_forward, module, transposed)
    try:
        with torch.no_grad(), torch.device("cpu"):
            forms = [concatenated for concatenated in (True, False) if _splits_as_stored(apply, concatenated)]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # a forward pass of another form
        return None
    return _StoredForm(True, False, transposed, forms[0]) if forms else None


def _gate_in_forward(module: nn.Module, transposed: bool, gate_up: torch.Tensor) -> torch.Tensor:
    """Apply the gate within a module's forward pass, (T, 2N) -> (T, N), by an expert whose matrices let gate, up and result pass."""
    neurons, hidden = gate_up.shape[-1] // 2, module.get_parameter("down_proj").shape[-1 if transposed else -2]
    matrices = torch.eye(hidden, 2 * neurons, dtype=torch.float32), torch.eye(neurons, hidden, dtype=torch.float32)
    expert = copy.copy(module)
    expert._parameters = {  # in place of the module's own dict, which the copy shares
        name: nn.Parameter((matrix if transposed else matrix.T)[None], requires_grad=False)
        for name, matrix in zip(("gate_up_proj", "down_proj"), matrices, strict=True)
    }
    flat = gate_up.reshape(-1, 2 * neurons)
    rows = nn.functional.pad(flat, (0, hidden - 2 * neurons))
    forward: Callable[..., torch.Tensor] = type(module).forward
    if calls_all_rows(module):
        passed = forward(expert, rows)
    else:
        index = torch.zeros(len(rows), 1, dtype=torch.int64)
        passed = 2 * forward(expert, rows, index, torch.full(index.shape, 0.5, dtype=torch.float32))
    return passed[:, :neurons].reshape(*gate_up.shape[:-1], neurons)


# The probes are float32 whatever the caller's default dtype: `torch.set_default_dtype(torch.bfloat16)` would blur them.
def _values(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _grid(low: float, high: float, count: int) -> torch.Tensor:
    return torch.linspace(low, high, count, dtype=torch.float32)


def _scalars(module: nn.Module) -> list[float]:
    """Return the positive numbers among a module's attributes: its clamps and scales, under any name."""
    numbers = (value for value in vars(module).values() if isinstance(value, int | float) and not isinstance(value, bool))
    return sorted({float(value) for value in numbers if 0 < value < PROBE_RANGE})


def _evaluate(apply: ApplyGate, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Apply a module's own gate to every pair of the two vectors, (G, U)."""
    pairs_gate, pairs_up = torch.meshgrid(gate, up, indexing="ij")
    # Two columns are one neuron, whose gate comes first in both layouts (concatenated and interleaved).
    pairs = torch.stack([pairs_gate.flatten(), pairs_up.flatten()], dim=-1)
    return apply(pairs).view(len(gate), len(up))


def _match_activation(module: nn.Module, values: torch.Tensor, curve: torch.Tensor) -> tuple[str, float] | None:
    plain = [(name, 1.0) for name in activations()]
    scaled = [("silu", alpha) for alpha in (1.702, *_scalars(module))]
    for name, alpha in plain + scaled:
        if torch.allclose(reference_activation(name, values, alpha), curve, rtol=TOLERANCE, atol=TOLERANCE):
            return name, alpha
    return None


def recognise_gate(module: nn.Module) -> GateSpec | None:
    """Return the gate of an experts module as the kernel describes it, or None where the kernel does not support its form.

    The module's `_apply_gate` (or `act_fn` where it has no gate) is evaluated on a grid and compared with every form that the kernel
    supports, with limits among the module's own numbers. Only a form that agrees on the whole grid is returned. Weights are not read, so
    the module may be on meta. What is found is kept for the next call, as long as the module has the same functions and numbers.
    """
    apply = getattr(module, "_apply_gate", None)
    constants = {name: value for name, value in vars(module).items() if value is None or isinstance(value, int | float | str)}
    seen = (type(module), getattr(apply, "__func__", apply), getattr(module, "act_fn", None), getattr(module, "config", None), constants)
    known, gate = _recognised.get(module, (None, None))
    if known is None or any(a is not b for a, b in zip(known[:-1], seen[:-1], strict=True)) or known[-1] != constants:
        gate = _probe_gate(module)
        _recognised[module] = (seen, gate)
    return gate


# By module: what its gate was recognised from, and the gate. A plan asks a dozen times for each layer.
_recognised: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], GateSpec | None]] = WeakKeyDictionary()


def _probe_gate(module: nn.Module) -> GateSpec | None:
    with torch.no_grad(), torch.device("cpu"):
        form = _stored_form(module)
        if form is None:
            return None
        if not form.gated:
            values = _grid(-8.0, 8.0, 257)
            act: Callable[[torch.Tensor], torch.Tensor] = module.act_fn  # type: ignore[assignment]
            ungated = _match_activation(module, values, act(values))
            return None if ungated is None else GateSpec(activation=ungated[0], alpha=ungated[1])
        declared: Any = module
        apply: ApplyGate = declared._apply_gate if _declares_form(module) else partial(_gate_in_forward, module, form.transposed)
        if not _splits_as_stored(apply, form.concatenated):
            return None
        near = _grid(-0.9, 0.9, 37)
        at_zero, at_one = _evaluate(apply, near, _values(0.0, 0.9)).unbind(-1)
        match = _match_activation(module, near, (at_one - at_zero) / 0.9)
        if match is None:
            return None
        name, alpha = match
        offset = float((at_zero / ((at_one - at_zero) / 0.9)).nan_to_num(0.0)[-1])
        return _with_limits(module, apply, name, alpha, round(offset, 3))


def _splits_as_stored(apply: ApplyGate, concatenated: bool) -> bool:
    """Return whether a gate splits gate and up as their storage is described."""
    first, second = _values(0.3, -0.7), _values(0.5, 0.9)  # (gate, up) of two neurons
    joined = torch.cat([first[:1], second[:1], first[1:], second[1:]]) if concatenated else torch.cat([first, second])
    return torch.allclose(apply(joined), torch.cat([apply(first), apply(second)]), rtol=TOLERANCE, atol=TOLERANCE)


def _with_limits(module: nn.Module, apply: ApplyGate, name: str, alpha: float, offset: float) -> GateSpec | None:
    """Fit the clamps one axis at a time; return None unless the result agrees on the whole grid."""
    gate = up = _grid(-PROBE_RANGE, PROBE_RANGE, 129)
    limits = [math.inf, *_scalars(module)]
    make = partial(GateSpec, activation=name, alpha=alpha, up_offset=offset)
    small = _values(0.5)  # inside every clamp
    specs = [make(up_limit=limit) for limit in limits]
    up_limit = _closest(specs, small, up, _evaluate(apply, small, up).flatten()).up_limit
    specs = [make(up_limit=up_limit, gate_limit=first, act_limit=second) for first, second in product(limits, repeat=2)]
    spec = _closest(specs, gate, small, _evaluate(apply, gate, small).flatten())
    # An activation's own rounding is multiplied by up, so the absolute tolerance grows with the range of up.
    agrees = torch.allclose(
        reference_gate(spec, gate[:, None], up[None, :]), _evaluate(apply, gate, up), rtol=TOLERANCE, atol=TOLERANCE * PROBE_RANGE
    )
    return spec if agrees else None


def _closest(specs: list[GateSpec], gate: torch.Tensor, up: torch.Tensor, expected: torch.Tensor) -> GateSpec:
    """Return the first spec of least error; a clamp before a saturating activation and one after it nearly agree."""
    return min(specs, key=lambda spec: float((reference_gate(spec, gate, up) - expected).abs().max()))


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """Sizes, gate and storage order of one experts module.

    Stored forms (transformers 5, `use_experts_implementation`): `gate_up_proj (E, 2I, H)` or, transposed, `(E, H, 2I)`;
    `down_proj (E, H, I)` or `(E, I, H)`; gate rows first, or interleaved with the up rows; `up_proj` where there is no gate.
    """

    num_experts: int
    hidden: int
    intermediate: int
    gated: bool
    bias: bool
    transposed: bool
    interleaved: bool
    gate: GateSpec

    @property
    def shape(self) -> ExpertsShape:
        return ExpertsShape(
            num_experts=self.num_experts, hidden=self.hidden, intermediate=self.intermediate, gated=self.gated, bias=self.bias
        )

    def parts(self) -> tuple[Part, ...]:
        matrices: tuple[Part, ...] = ("gate", "up", "down") if self.gated else ("up", "down")
        biases: tuple[Part, ...] = ("gate_bias", "up_bias", "down_bias") if self.gated else ("up_bias", "down_bias")
        return matrices + biases if self.bias else matrices

    def part_shape(self, part: Part) -> tuple[int, ...]:
        """Return the shape of one expert's piece in `nn.Linear` orientation."""
        rows = self.hidden if part.startswith("down") else self.intermediate
        if part.endswith("_bias"):
            return (rows,)
        return (rows, self.intermediate if part == "down" else self.hidden)

    def parameter(self, part: Part) -> str:
        """Return the name of the module's parameter that holds `part`."""
        matrix, _, bias = part.partition("_")
        name = "down_proj" if matrix == "down" else "gate_up_proj" if self.gated else "up_proj"
        return f"{name}_bias" if bias else name

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names of the module's parameters that hold matrices, in its own order."""
        return self.parameter("up"), self.parameter("down")

    def stored_shape(self, matrix: str) -> tuple[int, int, int]:
        """Return the shape of one of `matrices` as the module stores it, all experts together."""
        rows, columns = self.part_shape("down" if matrix == "down_proj" else "up")
        rows *= 2 if self.gated and matrix != "down_proj" else 1
        return (self.num_experts, columns, rows) if self.transposed else (self.num_experts, rows, columns)

    def cut(self, part: Part, stored: torch.Tensor) -> torch.Tensor:
        """Return one expert's piece as a view of `stored`, that expert's slice of the stored parameter."""
        piece = stored if part.endswith("_bias") or not self.transposed else stored.T
        return piece[self.rows(part)]

    def rows(self, part: Part) -> slice:
        """Return the rows of a part in one expert's slice of the stored parameter, in `nn.Linear` orientation."""
        if part.startswith("down") or not self.gated:
            return slice(None)
        index = 0 if part.startswith("gate") else 1
        return slice(index, None, 2) if self.interleaved else slice(index * self.intermediate, (index + 1) * self.intermediate)


def why_unsupported(module: nn.Module) -> str | None:
    """Return why a module does not follow the shared experts interface of transformers 5, or None where it does.

    A module that does not declare its form follows it where its forward pass computes what one of the declared forms does.
    """
    form = _stored_form(module)
    if form is None:
        return f"{type(module).__name__} does not follow transformers' shared experts interface (use_experts_implementation)"
    if getattr(module, "has_post_expert_norm", False):
        return f"{type(module).__name__} normalises each expert's output, which the kernel does not support"
    needed = {"down_proj", "gate_up_proj" if form.gated else "up_proj"}
    if form.bias:
        needed |= {f"{name}_bias" for name in needed}
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    if parameters != needed:
        return f"{type(module).__name__} holds {_names(parameters)} where {_names(needed)} is expected"
    if recognise_gate(module) is None:
        return f"{type(module).__name__} has a gate function of a form that the kernel does not support"
    return None


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "no parameter"


def read_layout(module: nn.Module) -> ExpertsLayout:
    """Return the layout of a module that `why_unsupported` accepts; the module may be on meta.

    Raises:
        ValueError: the module is unsupported.
    """
    reason = why_unsupported(module)
    if reason is not None:
        raise ValueError(reason)
    down = module.get_parameter("down_proj")
    num_experts, hidden, intermediate = down.shape
    form, gate = _stored_form(module), recognise_gate(module)
    assert form is not None and gate is not None, "why_unsupported checks both"
    if form.transposed:
        hidden, intermediate = intermediate, hidden
    return ExpertsLayout(
        num_experts=num_experts,
        hidden=hidden,
        intermediate=intermediate,
        gated=form.gated,
        bias=form.bias,
        transposed=form.transposed,
        interleaved=not form.concatenated,
        gate=gate,
    )


def experts_per_token(config: PretrainedConfig) -> int:
    """Return the number of experts per token.

    Raises:
        UnsupportedModelError: the config does not state it.
    """
    text: Any = config.get_text_config()
    top_k = next((value for name in TOP_K_NAMES if isinstance(value := getattr(text, name, None), int)), None)
    if top_k is None:
        raise UnsupportedModelError(f"the config of {config.model_type} does not state the number of experts per token")
    return top_k


def shared_intermediate(path: str, model: nn.Module) -> int:
    """Return the number of shared neurons beside the experts at `path`: in the same block or, as in Granite, in the same layer."""
    block, _, _ = path.rpartition(".")
    layer, _, _ = block.rpartition(".")
    for owner in (block, layer):
        shared = [child for name, child in model.get_submodule(owner).named_children() if "shared" in name]
        downs = [module for child in shared for name, module in child.named_modules() if name.rpartition(".")[2] in SHARED_DOWN]
        total = sum(int(module.in_features) for module in downs if hasattr(module, "in_features"))
        if total:
            return total
    return 0
