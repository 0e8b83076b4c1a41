"""Shared parts of the tests of Triton kernels: their device, poisoned buffers, and tolerances."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._device import _device_constructors
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

# Largest relative error (Frobenius norm) of an output against float64, by dtype of the activations, where tensor cores round operands to
# that dtype. Without them everything is float32: see kernel_cases.TOLERANCE.
# The interpreter truncates to bfloat16 instead of rounding: a bias of 0.3% for each of three roundings.
ROUNDED = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.5e-2 if INTERPRETED else 8e-3}


def quicken_interpreter(overflows: bool) -> None:
    """Let a function that a kernel calls find the language as the kernel's launch has patched it, and check overflows if that is asked for.

    Triton's interpreter scans the whole language in each call of such a function, and computes each sum and product of integers once more
    in 64 bits: together more than half of a launch's time. Before 3.9 a range over numbers that a kernel computes fails with NumPy 2.4,
    which makes no integer of an array of one.
    """
    from triton.runtime import interpreter

    core = interpreter.tl.core
    patch: Callable[[Any], Any] = interpreter._patch_lang
    if patch.__module__ != interpreter.__name__:
        return  # quickened already

    def patch_once(function: Any) -> Any:
        languages = [each for each in function.__globals__.values() if each is core or each is interpreter.tl]
        # What an earlier call has patched is no builtin of the language's own.
        if languages and not any(core.is_builtin(each.load) for each in languages):
            return interpreter._LangPatchScope()
        return patch(function)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_range(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang, interpreter._patch_lang_tensor = patch_once, patch_range
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=overflows)


@contextmanager
def launched(kernels: ModuleType, name: str) -> Iterator[list[torch.Size]]:
    """Collect the shapes of what a launcher, the function `name` of a module of kernels, is given first: a tensor, or several."""
    found: list[torch.Size] = []
    launch = getattr(kernels, name)

    def counting(x: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(x.shape if isinstance(x, torch.Tensor) else x[0].shape)
        return launch(x, *args, **kwargs)

    with mock.patch.object(kernels, name, counting):
        yield found


def with_fused(kinds: Sequence[str], model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Inject a model with the fused operators of these kinds alone."""
    rules = folder / "rules.yaml"
    wanted = (f"{{match: {{kind: {kind}}}, replace: {{class: fused_{kind}}}}}" for kind in kinds)
    rules.write_text(f"rules: [{', '.join(wanted)}]")
    found: PreTrainedModel = optimize_and_load(model, rules, progress=False, threads=1)
    return found


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory from `torch.empty` with NaN, or a number far out of range as an index; silence the interpreter's warnings."""
    _device_constructors()  # PyTorch keeps what it finds, which must be its own `empty`
    empty = torch.empty

    def poison(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    torch.empty = poison
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.empty = empty
