"""`fused_attention`: `cpu_attention` for modules on the CPU; on a GPU, decode steps by Triton kernels.

Shapes: B sequences, H hidden size, Q query heads, KV heads of keys and values, D columns of a head, S places of the cache.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import StaticLayer

from moegraft.cpu_backend import Runtime
from moegraft.operators.base import CACHE
from moegraft.operators.cpu_ops.attention import SUPPORTED, UNREAD_TENSORS, CpuAttention, asks_for_weights
from moegraft.operators.cpu_ops.in_place import NotRecognisedError, let_answer, probe
from moegraft.operators.cpu_ops.norm import FusedNorm
from moegraft.operators.linear import JointLinear

logger = logging.getLogger(__name__)
_READ = frozenset({"hidden_states", "position_embeddings", "attention_mask", CACHE})
_TESTED_PLACES = 8  # of the cache of a self-test
_TESTED_TOKENS = 5  # in it before the one that is compared
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # relative, of a self-test
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_LIMITS = ("clip_qkv", "attn_logit_softcapping")  # of configs, for values that random hidden states do not reach
_STATES = ("keys", "values", "cumulative_length")  # of a layer of the cache


@dataclass(frozen=True, slots=True)
class Form:
    """What a module does between its projections and the cache.

    Attributes:
        rotary: the columns of a head that are rotated, 0 for none.
        angles: the cosines of a token that the module is given, `rotary` or a half of it.
        head_norm: epsilon, offset and rounding of the norms of each head's queries and keys (`kernels.attention.HeadNorm`), if it has them.
        norms_rows: whether its norms are of all heads together.
        gated: whether queries have gates beside them, by which the result is multiplied (Qwen3-Next's).
    """

    rotary: int
    angles: int
    head_norm: tuple[float, float, bool] | None
    norms_rows: bool
    gated: bool


class FusedAttention(CpuAttention):
    """`cpu_attention` for modules on the CPU; on a GPU, the attention of a decode step in three launches beside the projections.

    PyTorch makes about 25: norms of queries and keys, ten for the rotation, five for the cache, copies of keys and values for the heads
    that share them, masks and products. Here the first launch does all up to the cache, and the others read only the tokens there are,
    once for all heads that share them (`kernels.attention`). It answers steps of one token over a cache of fixed size with full attention,
    as `generate` makes it for captured steps; all other calls, and modules of other forms, are PyTorch's. The form of a module is found by
    comparing it with the kernels on random hidden states.
    """

    name = "fused_attention"
    summary = "attention: by the C++ kernel on the CPU, and of decode steps by Triton kernels on a GPU"

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._joint: JointLinear | None = None
        self._widths: tuple[int, ...] = ()  # of the cosines that modules of the model may be given

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        near, above = model.get_submodule(path), path
        while above and next(near.parameters(), None) is None:  # modules whose projections are packed may hold none
            above = above.rpartition(".")[0]
            near = model.get_submodule(above)
        self._device, self._dtype = next(near.parameters(), torch.empty(0)).device, model.dtype
        frequencies = [getattr(each, "inv_freq", None) for each in model.modules()]
        counts = {each.numel() for each in frequencies if isinstance(each, torch.Tensor)}
        self._widths = tuple(sorted({width for count in counts for width in (2 * count, count)}, reverse=True))
        super().on_model_loaded(model, path)

    def install(self, module: Any) -> dict[str, object]:
        if not self.on_gpu:
            return super().install(module)
        if module.config._attn_implementation not in SUPPORTED or self._dtype not in _TOLERANCE:
            raise NotRecognisedError(f"its attention is {module.config._attn_implementation} in {self._dtype}")
        with self.kernels_compile():
            self._form = self._recognise(module)
        try:
            self._joint = JointLinear.of([module.q_proj, module.k_proj, module.v_proj])
        except torch.OutOfMemoryError as error:
            logger.info("fused_attention: projections are not joined: %s", error)
        return let_answer(self, module)

    def answer(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.on_gpu:
            return super().answer(module, *args, **kwargs)
        x, cache = kwargs.get("hidden_states"), kwargs.get(CACHE)
        layers, number = getattr(cache, "layers", ()), module.layer_idx
        layer: Any = layers[number] if number < len(layers) else None
        if args or type(x) is not torch.Tensor or type(layer) is not StaticLayer or not _only_holds(cache):
            return None
        if not self._reads(module, x, layer, kwargs):
            return None
        return self._compute(module, self._form, x, kwargs["attention_mask"], kwargs.get("position_embeddings"), layer)

    def _reads(self, module: Any, x: torch.Tensor, layer: Any, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the kernels compute what the module would, for hidden states `x` and a layer of the cache."""
        config: Any = module.config
        form, keys = (self._device, self._dtype), layer.keys
        if torch.is_grad_enabled() or x.dim() != 3 or x.shape[1] != 1 or (x.device, x.dtype) != form or not layer.is_initialized:
            return False
        if any(len(each) != len(x) or (each.device, each.dtype) != form or not each.is_contiguous() for each in (keys, layer.values)):
            return False
        norms = (module.q_norm, module.k_norm) if self._form.head_norm else ()
        if any(not hasattr(norm, "weight") or norm._forward_hooks or norm._forward_pre_hooks for norm in norms):
            return False
        tensors = {name for name, given in kwargs.items() if isinstance(given, torch.Tensor)}
        if kwargs.get("dropout") or not tensors <= _READ | UNREAD_TENSORS:
            return False
        if config._attn_implementation not in SUPPORTED or asks_for_weights(config, kwargs):
            return False
        return self._reads_mask(kwargs.get("attention_mask"), keys) and self._reads_angles(kwargs.get("position_embeddings"), x)

    def _reads_mask(self, mask: object, keys: torch.Tensor) -> bool:
        if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.dtype not in (torch.bool, keys.dtype):
            return False
        same = mask.device == keys.device and mask.shape[0] in (1, len(keys)) and mask.shape[1:3] == (1, 1)
        return same and mask.shape[3] >= keys.shape[2] and mask.stride(3) == 1

    def _reads_angles(self, angles: object, x: torch.Tensor) -> bool:
        if not self._form.angles:
            return angles is None  # else the module may rotate in a way that the kernels lack
        if not isinstance(angles, tuple) or len(angles) != 2:
            return False
        form = (1, self._form.angles), x.dtype, x.device
        return all(
            isinstance(each, torch.Tensor)
            and each.dim() == 3
            and len(each) in (1, len(x))
            and len(each) == len(angles[0])
            and (each.shape[1:], each.dtype, each.device) == form
            and each.stride(2) == 1
            and each.stride(0) == angles[0].stride(0)
            for each in angles
        )

    def _compute(self, module: Any, form: Form, x: torch.Tensor, mask: torch.Tensor, angles: Any, layer: Any) -> tuple[torch.Tensor, None]:
        """Return what the module returns for hidden states (B, 1, H), and add their keys and values to a layer of the cache."""
        # Triton need not be installed where there is no GPU.
        from moegraft.operators.kernels.attention import HeadNorm, decode_attention

        layers = module.q_proj, module.k_proj, module.v_proj
        joint = None if self._joint is None else self._joint.outputs(layers, x)
        query, key, value = (layer(x) for layer in layers) if joint is None else joint
        if form.norms_rows:
            query, key = module.q_norm(query), module.k_norm(key)
        norms = form.head_norm and (HeadNorm(module.q_norm.weight, *form.head_norm), HeadNorm(module.k_norm.weight, *form.head_norm))
        out = decode_attention(
            (query, key, value),
            angles if form.angles else None,
            form.rotary,
            norms,
            (layer.keys, layer.values, layer.cumulative_length),
            mask,
            float(module.scaling),
            getattr(module, "sinks", None),
            gated=form.gated,
        )
        return module.o_proj(out), None

    def _recognise(self, module: Any) -> Form:
        """Return the form with which the kernels answer as the module's own computation does.

        Raises:
            NotRecognisedError: there is none.
        """
        # Triton need not be installed where there is no GPU.
        from moegraft.operators.kernels.attention import MAX_COLUMNS

        columns, number = getattr(module, "head_dim", None), getattr(module, "layer_idx", None)
        usual = all(hasattr(module, name) for name in ("scaling", *_PROJECTIONS))
        if not isinstance(columns, int) or not isinstance(number, int) or not usual:
            raise NotRecognisedError("it lacks a number or a projection of usual attention")
        if columns > MAX_COLUMNS:
            raise NotRecognisedError(f"its heads have more than {MAX_COLUMNS} columns")
        if any(getattr(module.config, name, None) is not None for name in _LIMITS):
            raise NotRecognisedError("it limits large values")
        head_norm, norms_rows = None, False
        if isinstance(getattr(module, "q_norm", None), nn.Module):
            forms = {self._norm_form(getattr(module, name, None), columns) for name in ("q_norm", "k_norm")}
            if len(forms) > 1:
                raise NotRecognisedError("its norms of queries and of keys differ")
            head_norm = forms.pop()
            norms_rows = head_norm is None
        for width in (*self._widths, 0):
            for rotary, gated in product({width, 2 * width}, (False, True)):
                form = Form(rotary, width, head_norm, norms_rows, gated)
                if rotary <= columns and self._fits(module, form):
                    return form
        raise NotRecognisedError("it computes something else between its projections, or in another order")

    def _norm_form(self, norm: Any, columns: int) -> tuple[float, float, bool] | None:
        """Return epsilon, offset and rounding of a norm of each head; None for one of whole rows.

        Raises:
            NotRecognisedError: the norm is of another kind.
        """
        if getattr(norm, "weight", None) is None or norm.weight.numel() != columns:
            return None
        operator, stand_in = FusedNorm(self.runtime), copy.copy(norm)
        operator.install(stand_in)
        return operator.form

    def _fits(self, module: Any, form: Form) -> bool:
        """Return whether the kernels answer a step as the module does, and leave the same keys and values in the cache."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self._device, self._dtype)

        x = random(2, 1, module.config.hidden_size)
        angles = (random(1, 1, form.angles), random(1, 1, form.angles)) if form.angles else None
        places = torch.arange(_TESTED_PLACES, device=self._device)
        first = torch.tensor([0, 1], device=self._device).view(2, 1, 1, 1)  # of the second sequence, whose first token is padding
        mask = (places <= _TESTED_TOKENS) & (places >= first)
        if module.config._attn_implementation != "sdpa":
            mask = x.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(x.dtype).min)
        try:
            widths = [probe(getattr(module, name), x).shape[2] for name in ("k_proj", "v_proj")]
            heads = widths[0] // module.head_dim
            held = [random(2, heads, _TESTED_TOKENS, width // heads) for width in widths]
            caches = [Cache(layers=[StaticLayer(_TESTED_PLACES) for _ in range(module.layer_idx + 1)]) for _ in range(2)]
            for cache in caches:
                cache.update(held[0], held[1], module.layer_idx)
            expected_layer, layer = (cache.layers[module.layer_idx] for cache in caches)
            kwargs = {} if angles is None else {"position_embeddings": angles}
            own = partial(type(module).forward, module, hidden_states=x, attention_mask=mask, **kwargs)
            expected = probe(own, **{CACHE: caches[0]})[0]
            found = probe(self._compute, module, form, x, mask, angles, layer)[0]
        except NotRecognisedError:
            return False  # as for angles of another width than the module's
        pairs = [(found, expected), *((getattr(layer, name), getattr(expected_layer, name)) for name in _STATES)]
        tolerance = _TOLERANCE[self._dtype]
        return all(a.shape == b.shape and float((a - b).float().norm()) <= tolerance * float(b.float().norm()) for a, b in pairs)


def _only_holds(cache: Any) -> bool:
    """Return whether an update of a cache is that of one of its layers, and nothing more, such as moving another to the GPU."""
    return getattr(cache.update, "__func__", None) is Cache.update and not cache.offloading
