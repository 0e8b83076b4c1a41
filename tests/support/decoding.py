"""Decode steps of small injected models, beside the same steps computed layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from moegraft.injection import new_cache, optimize_and_load
from moegraft.operators.decode.native.steps import NativePrograms
from moegraft.operators.decode.replay import StepReplay
from support.families import build_model, case_of

CLOSE = 1e-4  # relative, of logits in float32; states of recurrent layers carry roundings on
Between = Callable[[Any, int], Any]


def new_model(name: str, rules: str = "cpu-exact", dtype: torch.dtype = torch.float32, threads: int = 1) -> PreTrainedModel:
    model: PreTrainedModel = optimize_and_load(build_model(case_of(name)).to(dtype), rules, progress=False, threads=threads)
    return model


shared_model = cache(new_model)  # models that several tests share; each test leaves them as they were


@contextlib.contextmanager
def layer_by_layer() -> Iterator[None]:
    """No step is a program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepReplay, "forward", lambda self, model, plain, args, arguments: plain(*args, **arguments))
        yield


@contextlib.contextmanager
def native_steps() -> Iterator[list[int]]:
    """The numbers of steps that follow each other natively, one for each continuation."""
    fed, steps = NativePrograms.fed, list[int]()

    def noted(self: NativePrograms, continuation: Any, *numbers: Any) -> None:
        before = continuation.done
        fed(self, continuation, *numbers)
        steps.append(continuation.done - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativePrograms, "fed", noted)
        yield steps


def replayed(model: PreTrainedModel) -> int:
    found: int = model.moegraft.statistics()["decode_steps"]["replayed_steps"]
    return found


def reasons(model: PreTrainedModel) -> list[str]:
    found: list[str] = model.moegraft.statistics()["decode_steps"]["reasons"]
    return found


def fed(
    model: PreTrainedModel,
    ids: torch.Tensor,
    sizes: Sequence[int],
    *,
    cache: DynamicCache | None = None,
    between: Between | None = None,
    **arguments: Any,
) -> torch.Tensor:
    """The logits of all tokens of `ids`, given in parts of `sizes`; `between` may return another cache to go on with."""
    cache = new_cache(model) if cache is None else cache
    found, start = [], 0
    with torch.no_grad():
        for step, size in enumerate(sizes):
            ids_of_step = ids[:, start : start + size]
            found.append(model(input_ids=ids_of_step, past_key_values=cache, use_cache=True, **arguments).logits)
            start += size
            if between is not None:
                cache = between(cache, step) or cache
    return torch.cat(found, 1)


def at(turns: Sequence[int], change: Between) -> Between:
    return lambda cache, step: change(cache, step) if step in turns else None


def differences(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each token, relative to the largest logit."""
    return (found - expected).abs().amax((0, 2)) / expected.abs().amax()


def assert_replays(model: PreTrainedModel, steps: Callable[[], torch.Tensor], *, least: int = 0, times: int = 1) -> None:
    """What `steps` returns, logits (B, T, V), equals what it returns without programs, and at least `least` steps were replayed."""
    with layer_by_layer():
        expected = steps()
    before = replayed(model)
    for _ in range(times):
        assert float(differences(steps(), expected).max()) <= CLOSE
    assert replayed(model) - before >= least, reasons(model)


def assert_equal_steps(model: PreTrainedModel, ids: torch.Tensor, sizes: Sequence[int], *, least: int = 1, **options: Any) -> None:
    assert_replays(model, lambda: fed(model, ids, sizes, **options), least=least)


def generated(model: PreTrainedModel, ids: torch.Tensor, tokens: int = 24, **options: Any) -> torch.Tensor:
    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    return generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **{"do_sample": False, **options})


def assert_equal_text(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> None:
    with layer_by_layer():
        expected = generated(model, ids, **options)
    for _ in range(2):
        assert torch.equal(generated(model, ids, **options), expected)
