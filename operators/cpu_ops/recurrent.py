"""`cpu_recurrent`: the rules of recurrent layers by the C++ kernels.

The layers of transformers call functions of their files: a short convolution, then the gated delta rule or a selective scan, each in a
form for one token and one for many. A module that this operator replaces runs the code of its own forward pass, in which the names of
these functions stand for the kernels; so there is no code per family.

Shapes: B sequences, T tokens, H heads, K columns of keys, V of values, C channels, N columns of a state.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moegraft.cpu_backend import Runtime
from moegraft.operators.base import CACHE
from moegraft.operators.cpu import ELEMENT_CODES
from moegraft.operators.cpu_ops.in_place import CpuOperator, NotRecognisedError, let_answer, probe
from moegraft.operators.custom_ops import needs_gradient
from moegraft.operators.decode.states import CONVOLUTIONS, KEEPS_PAST, RECURRENT, KeptPass, NotKeptError, kept_pass
from moegraft.operators.structure import recurrent_functions

_TOLERANCE = 1e-4  # relative, of the self-tests in float32
_EPSILON = 1e-6  # of the norms of queries and keys
_NO_LIMITS = (-math.inf, math.inf)
_MOST_TAPS, _MOST_COLUMNS = 8, 512  # of the kernels
Tensor = torch.Tensor
Function = Callable[..., Any]


class _Pass(threading.local):
    """What a thread computes with a layer.

    Attributes:
        before: the state of the cache before the pass; None where there is none.
        kept: where the states after each of its tokens go, if the layer keeps them.
    """

    before: Tensor | None = None
    kept: KeptPass | None = None


class CpuRecurrent(CpuOperator):
    """Gated delta rules, selective scans and short convolutions of a layer by C++ kernels, one call each.

    A prompt's tokens are computed one after the other like those that are generated, with the same results bit for bit: the part of a
    state that a thread works on stays in its cache. What is faster on a GPU, chunks of tokens (Yang et al. 2024, arXiv:2412.06464), needs
    more products.

    Each function is compared with its kernel on random tensors first. It computes itself what the kernel does not know: tensors on a GPU,
    gradients, several sequences in one row, states in 16 bits, and everything in graphs of `torch.compile`. A scan without an argument for
    the state before (Jamba's of many tokens) goes on from the cache's; by itself it would begin again.

    Where a pass verifies a draft, the kernels also write the states after each of its tokens, to which the cache may return.
    """

    name = "cpu_recurrent"
    kind = "recurrent"
    summary = "the rules of recurrent layers by C++ kernels, on the CPU"
    fallback_level = logging.WARNING

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._pass = _Pass()

    def install(self, module: nn.Module) -> dict[str, object]:
        cls: Any = type(module)  # mypy takes a module's __hash__ for that of its class
        stock = inspect.unwrap(cls.forward)
        kernels = {}
        for name, rule in recurrent_functions(cls).items():
            kernel = getattr(self, rule)(stock.__globals__[name])  # rules are the methods of these names
            kernels[name] = functools.wraps(stock.__globals__[name])(kernel)
        self._arguments = [*inspect.signature(stock).parameters][1:]
        self._forward = types.FunctionType(
            stock.__code__, {**stock.__globals__, **kernels}, stock.__name__, stock.__defaults__, stock.__closure__
        )
        self._forward.__kwdefaults__ = stock.__kwdefaults__
        replaced = let_answer(self, module)
        setattr(type(module), KEEPS_PAST, True)
        return replaced

    def answer(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the forward pass of `module` computes; None for a call that is left to the module."""
        if any(hasattr(child, "_hf_hook") for child in module._modules.values()):
            return None  # accelerate's hooks bring the weights of children in place that only the family's own wrapper knows
        with self._state_of(module, args, kwargs):
            return self._forward(module, *args, **kwargs)

    @contextmanager
    def _state_of(self, module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        cache = given.get("cache_params", given.get(CACHE))
        layers = getattr(cache, "layers", ())
        place: Any = module.layer_idx
        layer = layers[place] if isinstance(place, int) and place < len(layers) else None
        has_state = getattr(layer, "has_previous_state", {}).get(0, False)
        self._pass.before = getattr(layer, "recurrent_states", {}).get(0) if has_state else None
        self._pass.kept = kept_pass(layer)
        try:
            yield
        finally:
            self._pass.before = self._pass.kept = None

    def _knows(self, *tensors: Tensor | None) -> bool:
        """Whether the kernels can read these tensors."""
        given = [tensor for tensor in tensors if tensor is not None]
        plain = (
            type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.dtype in ELEMENT_CODES and not tensor.is_neg()
            for tensor in given
        )
        return all(plain) and all(tensor.numel() for tensor in given) and not needs_gradient(*given)

    def _states(self, before: Tensor | None, shape: Sequence[int]) -> tuple[Tensor | None, Tensor, Sequence[Tensor]] | None:
        """Return the state before a pass, where that after it goes, and where those after earlier tokens go; None if these are unknown."""
        kept = self._pass.kept
        if kept is None:
            return None if before is None else before.float().contiguous(), torch.empty(*shape, dtype=torch.float32), ()
        own = kept.before.get(RECURRENT)
        if own is None or own.dtype != torch.float32 or not own.is_contiguous() or own.numel() != math.prod(shape):
            return None
        kept.written.add(RECURRENT)
        *past, state = (tensor.view(*shape) for tensor in kept.after[RECURRENT])
        return own.view(*shape), state, past

    def _last(self, state: Tensor) -> Tensor:
        """Return the state after a pass, which is already in its place where the layer keeps earlier ones."""
        kept = self._pass.kept
        return state if kept is None else kept.after[RECURRENT][-1]

    def delta_rule(self, stock: Function) -> Function:
        def kernel(forms: tuple[int, ...], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            g: Any = kwargs.get("g")
            beta, before = kwargs.get("beta"), kwargs.get("initial_state")
            keys = key.shape[-1]
            known = not args and g is not None and beta is not None and g.dim() in forms and kwargs.get("cu_seqlens") is None
            if not known or not self._knows(query, key, value, g, beta, before) or keys > _MOST_COLUMNS:
                return NotImplemented
            states = self._states(before, (value.shape[0], value.shape[2], keys, value.shape[3]))
            if states is None:
                return NotImplemented
            before, state, past = states
            out = query.new_empty(value.shape)
            rows = [_rows(tensor) for tensor in (query, key, value)]
            decay = _rows(g) if g.dim() == 4 else g
            epsilon = _EPSILON if kwargs.get("use_qk_l2norm_in_kernel") else -1.0
            self.runtime.recurrent("delta_rule", [out, state, *rows, decay, beta, before], [keys**-0.5, epsilon], past)
            return out, self._last(state) if kwargs.get("output_final_state") else None

        return self._in_forms(stock, kernel, _delta_answers, (3, 4), "the gated delta rule")

    def conv_update(self, stock: Function) -> Function:
        def kernel(
            hidden_states: Tensor,
            conv_state: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            activation: str | None = None,
            **kwargs: Any,
        ) -> Any:
            same = hidden_states.dtype == conv_state.dtype == weight.dtype and weight.shape[1] - 1 <= conv_state.shape[2]
            if not same or not self._convolves(hidden_states, weight, bias, activation) or not self._knows(conv_state):
                return NotImplemented
            return self._convolved(hidden_states, conv_state, weight, bias, activation)

        return self._tested(stock, kernel, _conv_update_answers, "a short convolution")

    def conv(self, stock: Function) -> Function:
        def kernel(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any) -> Any:
            same = hidden_states.dtype == weight.dtype and kwargs.get("seq_idx") is None
            if not same or not self._convolves(hidden_states, weight, bias, activation):
                return NotImplemented
            return self._convolved(hidden_states, None, weight, bias, activation)

        return self._tested(stock, kernel, _conv_answers, "a short convolution")

    def _convolves(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> bool:
        return activation in (None, "silu", "swish") and weight.shape[1] <= _MOST_TAPS and x.dim() == 3 and self._knows(x, weight, bias)

    def _convolved(self, x: Tensor, state: Tensor | None, weight: Tensor, bias: Tensor | None, activation: str | None) -> Any:
        past: Sequence[Tensor] = ()
        if (kept := self._pass.kept) is not None:
            past = kept.after[CONVOLUTIONS][:-1]
            if past[0].dtype != x.dtype:
                return NotImplemented
            kept.written.add(CONVOLUTIONS)
        out = x.new_empty(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)  # what follows reads the channels of a token
        self.runtime.recurrent("short_conv", [out, state, x, weight, bias], [float(activation is not None)], past)
        return out

    def state_update(self, stock: Function) -> Function:
        def kernel(
            forms: tuple[int, ...],
            state: Tensor,
            hidden_states: Tensor,
            dt: Tensor,
            A: Tensor,  # the families' names
            B: Tensor,
            C: Tensor,
            D: Tensor | None = None,
            z: Tensor | None = None,
            dt_bias: Tensor | None = None,
            dt_softplus: bool = False,
            **kwargs: Any,
        ) -> Any:
            tensors = (hidden_states, dt, A, B, C, D, z, dt_bias)
            known = hidden_states.dim() in forms and state.dtype == torch.float32 and state.is_contiguous()
            if not known or not self._knows(state, *tensors):
                return NotImplemented
            operands = _one_by_head(*tensors) if hidden_states.dim() == 3 else _one_by_channel(*tensors)
            if operands is None:
                return NotImplemented
            x, dts, a, b, c, d, gate, bias = operands
            held = state if state.dim() == 4 else state.unsqueeze(2)
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            self._scan([out, held, x, dts, a, b, c, d, bias, gate, held], dt_softplus)
            return out.view(hidden_states.shape)

        return self._in_forms(stock, kernel, _update_answers, (2, 3), "a selective state update")

    def chunk_scan(self, stock: Function) -> Function:
        def kernel(
            hidden_states: Tensor,
            dt: Tensor,
            A: Tensor,
            B: Tensor,
            C: Tensor,
            *args: Any,
            D: Tensor | None = None,
            dt_bias: Tensor | None = None,
            initial_states: Tensor | None = None,
            dt_softplus: bool = False,
            dt_limit: tuple[float, float] = (0.0, math.inf),
            return_final_states: bool = False,
            **kwargs: Any,
        ) -> Any:
            unknown = kwargs.get("z") is not None or kwargs.get("seq_idx") is not None or (D is not None and D.dim() != 1)
            tensors = (hidden_states, dt, A, B, C, D, dt_bias, initial_states)
            if unknown or not self._knows(*tensors) or B.shape[3] > _MOST_COLUMNS:
                return NotImplemented
            states = self._states(initial_states, (*hidden_states.shape[:1], *hidden_states.shape[2:], B.shape[3]))
            if states is None:
                return NotImplemented
            before, state, past = states
            out = hidden_states.new_empty(hidden_states.shape, dtype=torch.float32)
            if past:  # as single tokens, whose time steps have no limits
                out, dt_limit = torch.empty_like(hidden_states, memory_format=torch.contiguous_format), _NO_LIMITS
            operands = [out, state, hidden_states, dt, A, _rows(B), _rows(C), D, dt_bias, None, before]
            self._scan(operands, dt_softplus, dt_limit, past)
            return (out, self._last(state)) if return_final_states else out

        return self._tested(stock, kernel, _chunk_answers, "a scan of Mamba-2")

    def scan(self, stock: Function) -> Function:
        def kernel(
            hidden_states: Tensor,
            dt: Tensor,
            A: Tensor,
            B: Tensor,
            C: Tensor,
            D: Tensor | None = None,
            z: Tensor | None = None,
            delta_bias: Tensor | None = None,
            delta_softplus: bool = False,
            return_last_state: bool = False,
            **kwargs: Any,
        ) -> Any:
            before = self._pass.before
            if not self._knows(hidden_states, dt, A, B, C, D, z, delta_bias, before) or A.shape[1] > _MOST_COLUMNS:
                return NotImplemented
            states = self._states(before, (*hidden_states.shape[:2], 1, A.shape[1]))
            if states is None:
                return NotImplemented
            before, state, past = states
            x = hidden_states.transpose(1, 2).unsqueeze(3)
            b, c = (_rows(tensor.transpose(1, 2).unsqueeze(2)) for tensor in (B, C))
            out = x.new_empty(x.shape, dtype=x.dtype if past else torch.float32)
            gate = None if z is None else z.transpose(1, 2).unsqueeze(3)
            start = None if before is None else before.view(state.shape)
            operands = [out, state, x, dt.transpose(1, 2), _rows(A), b, c, D, delta_bias, gate, start]
            self._scan(operands, delta_softplus, past=past)
            scanned = out.squeeze(3).transpose(1, 2)
            return (scanned, self._last(state.squeeze(2))) if return_last_state else scanned

        return self._tested(stock, kernel, _scan_answers, "a selective scan")

    def _scan(
        self, operands: list[Tensor | None], softplus: bool, limits: tuple[float, float] = _NO_LIMITS, past: Sequence[Tensor] = ()
    ) -> None:
        self.runtime.recurrent("selective_scan", operands, [float(softplus), *map(float, limits)], past)

    def _in_forms(
        self,
        stock: Function,
        kernel: Function,
        answers: Callable[[int, Function], list[Tensor]],
        forms: tuple[int, ...],
        rule: str,
    ) -> Function:
        """Return the kernel in the forms, by dimensions of an operand and its first argument, in which it agrees with a function."""
        agreed = tuple(dims for dims in forms if self._agrees(functools.partial(answers, dims), stock, functools.partial(kernel, (dims,))))
        if not agreed:
            raise NotRecognisedError(f"{stock.__name__} computes something else than {rule}")
        return self._or_own(functools.partial(kernel, agreed), stock)

    def _tested(self, stock: Function, kernel: Function, answers: Callable[[Function], list[Tensor]], rule: str) -> Function:
        if not self._agrees(answers, stock, kernel):
            raise NotRecognisedError(f"{stock.__name__} computes something else than {rule}")
        return self._or_own(kernel, stock)

    def _or_own(self, kernel: Function, stock: Function) -> Function:
        """Return a function that calls `stock` where the kernel does not know the arguments and returns NotImplemented."""

        def answered(*args: Any, **kwargs: Any) -> Any:
            result = kernel(*args, **kwargs)
            if result is NotImplemented and self._pass.kept is not None:
                raise NotKeptError
            return stock(*args, **kwargs) if result is NotImplemented else result

        return answered

    def _agrees(self, answers: Callable[[Function], list[Tensor]], stock: Function, kernel: Function) -> bool:
        """Whether a function and its kernel give the same answers."""
        try:
            expected = probe(answers, stock)
        except NotRecognisedError:
            return False
        with torch.no_grad():
            computed = answers(kernel)
        return all(  # a kernel that does not know these arguments has given NotImplemented
            isinstance(one, Tensor) and one.shape == other.shape and float((one - other).norm()) <= _TOLERANCE * float(other.norm())
            for one, other in zip(computed, expected, strict=True)
        )


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _one_by_head(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None, bias: Tensor | None
) -> tuple[Any, ...] | None:
    """Return the operands of one token of Mamba-2 for the kernel; None where its numbers of a head differ by channel.

    Given: x, dt and z (B, H, C), A (H, C, N), B and C (B, G, N), D and the bias (H, C).
    """
    numbers = [tensor for tensor in (dt, d, bias) if tensor is not None]
    if a.dim() != 3 or b.dim() != 3 or b.shape[2] > _MOST_COLUMNS:
        return None
    shared = all(tensor.shape[-1] == 1 or tensor.stride(-1) == 0 for tensor in numbers)
    if not shared or any(a.shape[dim] != 1 and a.stride(dim) != 0 for dim in (1, 2)):
        return None
    dts, ds, biases = (None if tensor is None else tensor[..., 0] for tensor in (dt, d, bias))
    assert dts is not None, "a token has a time step"
    gate = None if z is None else z[:, None]
    return x[:, None], dts[:, None], a[:, 0, 0], _rows(b)[:, None], _rows(c)[:, None], ds, gate, biases


def _one_by_channel(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None, bias: Tensor | None
) -> tuple[Any, ...] | None:
    """Return the operands of one token of Mamba for the kernel: each channel is a head of its own.

    Given: x, dt and z (B, C), A (C, N), B and C (B, N), D and the bias (C,).
    """
    if x.dim() != 2 or a.dim() != 2 or b.dim() != 2 or b.shape[1] > _MOST_COLUMNS:
        return None
    gate = None if z is None else z[:, None, :, None]
    return x[:, None, :, None], dt[:, None], _rows(a), _rows(b)[:, None, None], _rows(c)[:, None, None], d, gate, bias


# What functions answer for random tensors. Each is called with all its forms of arguments.


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _delta_answers(dims: int, function: Function) -> list[Tensor]:
    query, key, value = _random(2, 5, 2, 8, seed=0) * 1e-2, _random(2, 5, 2, 8, seed=1) * 1e-2, _random(2, 5, 2, 6, seed=2)
    given: dict[str, Any] = {"g": -_random(*(2, 5, 2, 8)[:dims], seed=3).abs(), "beta": _random(2, 5, 2, seed=4).sigmoid()}
    results: list[Tensor] = []
    for before in (None, _random(2, 2, 8, 6, seed=5)):
        for normalises in (False, True):
            options = {"initial_state": before, "output_final_state": True, "use_qk_l2norm_in_kernel": normalises}
            results += function(query, key, value, **given, **options)
    return results


def _conv_update_answers(function: Function) -> list[Tensor]:
    x, weight, bias = _random(2, 5, 3, seed=0), _random(5, 4, seed=1), _random(5, seed=2)
    results: list[Tensor] = []
    for given, activation in ((None, "silu"), (bias, None)):
        state = _random(2, 5, 4, seed=3)
        results += [function(x, state, weight, given, activation), state]
    return results


def _conv_answers(function: Function) -> list[Tensor]:
    x, weight, bias = _random(2, 5, 7, seed=0), _random(5, 4, seed=1), _random(5, seed=2)
    return [function(x, weight, given, activation=activation) for given, activation in ((None, "silu"), (bias, None))]


def _update_answers(dims: int, function: Function) -> list[Tensor]:
    """In Mamba-2's form (3 dimensions), whose numbers are those of a head, or in Mamba's (2), whose channels have their own."""
    if dims == 3:
        operands = [
            _random(2, 4, 3, seed=1),
            _random(2, 4, 1, seed=2).expand(-1, -1, 3),
            (-_random(4, 1, 1, seed=3).exp()).expand(-1, 3, 8),
            _random(2, 2, 8, seed=4),
            _random(2, 2, 8, seed=5),
            _random(4, 1, seed=6).expand(-1, 3),
        ]
        state, gate, bias = _random(2, 4, 3, 8, seed=0), _random(2, 4, 3, seed=7), _random(4, 1, seed=8).expand(-1, 3)
    else:
        operands = [
            _random(2, 4, seed=1),
            _random(2, 4, seed=2),
            -_random(4, 8, seed=3).exp(),
            _random(2, 8, seed=4),
            _random(2, 8, seed=5),
            _random(4, seed=6),
        ]
        state, gate, bias = _random(2, 4, 8, seed=0), _random(2, 4, seed=7), _random(4, seed=8)
    results: list[Tensor] = []
    for z in (None, gate):
        results += [function(state, *operands, z=z, dt_bias=bias, dt_softplus=True), state.clone()]
    return results


def _chunk_answers(function: Function) -> list[Tensor]:
    x, dt, a = _random(2, 5, 4, 3, seed=0), _random(2, 5, 4, seed=1), -_random(4, seed=2).exp()
    b, c, d, bias = (_random(*size, seed=seed) for seed, size in enumerate(((2, 5, 2, 8), (2, 5, 2, 8), (4,), (4,)), 3))
    results: list[Tensor] = []
    for before, limits in ((None, (0.0, math.inf)), (_random(2, 4, 3, 8, seed=7), (0.1, 0.8))):
        options: dict[str, Any] = {"D": d, "dt_bias": bias, "dt_softplus": True, "dt_limit": limits, "return_final_states": True}
        results += function(x, dt, a, b, c, chunk_size=4, initial_states=before, **options)
    return results


def _scan_answers(function: Function) -> list[Tensor]:
    x, dt, a = _random(2, 4, 5, seed=0), _random(2, 4, 5, seed=1), -_random(4, 8, seed=2).exp()
    b, c, d, bias = (_random(*size, seed=seed) for seed, size in enumerate(((2, 8, 5), (2, 8, 5), (4,), (4,)), 3))
    results: list[Tensor] = []
    for z in (None, _random(2, 4, 5, seed=7)):
        results += function(x, dt, a, b, c, D=d, z=z, delta_bias=bias, delta_softplus=True, return_last_state=True)
    return results
