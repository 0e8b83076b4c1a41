"""What a recording must not pretend to know: each is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from moegraft.cpu_backend import NormSpec, Runtime
from moegraft.operators.step_program.fitting import Affine, FittedStep, RecordedStep, fit
from moegraft.operators.step_program.recording import NotRecordableError, Recorder

Compute = Callable[[torch.Tensor, int], torch.Tensor]
NORM = NormSpec("float32", 8, 1e-6)
WEIGHT = torch.linspace(-1, 1, 8)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(threads=1)


def recorded(runtime: Runtime, compute: Compute, position: int) -> RecordedStep:
    recorder = Recorder(runtime)
    x = torch.arange(8.0) + position
    inputs = {"x": recorder.memory(x)}
    with torch.no_grad(), recorder.recorded() as recording:
        out = compute(x, position)
    return RecordedStep(position, recording, inputs, {}, {}, {}, {"out": recorder.memory(out, produced=True)})


def fitted(runtime: Runtime, compute: Compute, positions: tuple[int, int] = (5, 6)) -> FittedStep:
    return fit(*(recorded(runtime, compute, position) for position in positions))


def read(x: torch.Tensor, position: int) -> torch.Tensor:
    return x * x.sum().item()


def branched(x: torch.Tensor, position: int) -> torch.Tensor:
    return x + 1 if bool((x > 6).any()) else x - 1


def drawn(x: torch.Tensor, position: int) -> torch.Tensor:
    return x + torch.rand(8)


def sampled(x: torch.Tensor, position: int) -> torch.Tensor:
    return x + torch.multinomial(x, 1)


def masked(x: torch.Tensor, position: int) -> torch.Tensor:
    return x[x > 7]


def python_made(x: torch.Tensor, position: int) -> torch.Tensor:
    return x + torch.tensor([position, 2 * position])[1]


def other_calls(x: torch.Tensor, position: int) -> torch.Tensor:
    return x.exp() if position > 5 else x.sin()


def more_calls(x: torch.Tensor, position: int) -> torch.Tensor:
    return x + 1 if position > 5 else x + 1 + 1


def other_argument(x: torch.Tensor, position: int) -> torch.Tensor:
    return x * (1.5 if position > 5 else 2.5)


def other_type(x: torch.Tensor, position: int) -> torch.Tensor:
    return x.to(torch.float16 if position > 5 else torch.bfloat16).float()


def other_weight(x: torch.Tensor, position: int) -> torch.Tensor:
    return x + (WEIGHT.clone() if position > 5 else -WEIGHT)


def chosen(x: torch.Tensor, position: int) -> torch.Tensor:
    return torch.ones(20)[: position + 1].topk(min(position + 1, 8)).values


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (read, "_local_scalar_dense"),
        (branched, "_local_scalar_dense|is_nonzero"),
        (drawn, "rand"),
        (sampled, "multinomial"),
        (masked, "calls index"),
        (python_made, "Python makes"),
        (other_calls, r"differ in what they compute \(aten.exp.default\)"),
        (more_calls, "1 calls after 2"),
        (other_argument, "an argument of .*mul.* differs"),
        (other_type, "differ"),
        (other_weight, "differs|differ"),
        (chosen, "topk"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_cannot_be_replayed(runtime: Runtime, compute: Compute, reason: str) -> None:
    with pytest.raises(NotRecordableError, match=reason):
        fitted(runtime, compute)


@pytest.mark.parametrize("positions", [(5, 6), (6, 5), (3, 17), (40, 2)])
def test_numbers_follow_the_position(runtime: Runtime, positions: tuple[int, int]) -> None:
    def compute(x: torch.Tensor, position: int) -> torch.Tensor:
        return torch.arange(3, position + 5).float() + 2 * position

    step = fitted(runtime, compute, positions)
    assert step.outputs["out"].sizes == (Affine(2, 1),)
    assert [leaf for call in step.calls for leaf in call.leaves if isinstance(leaf, Affine)] == [Affine(5, 1), Affine(0, 2)]


def test_numbers_that_follow_it_otherwise(runtime: Runtime) -> None:
    with pytest.raises(NotRecordableError, match="does not follow the position"):
        fitted(runtime, lambda x, position: torch.zeros(position // 3 + 1), (4, 7 + 1))


def test_a_recording_that_fails_leaves_the_runtime_as_it_was(runtime: Runtime) -> None:
    def compute(x: torch.Tensor, position: int) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        recorded(runtime, compute, 5)
    assert not {"norm", "linear", "attention"} & set(vars(runtime))


def normed(runtime: Runtime, x: Any) -> torch.Tensor:
    out = torch.empty(1, 8)
    runtime.norm(NORM, x, None, out)
    return out


def test_kernels_are_recorded(runtime: Runtime) -> None:
    step = fitted(runtime, lambda x, position: normed(runtime, x[None] + 1))
    assert [call.name for call in step.calls] == ["add.Tensor", "norm"]
    assert step.calls[1].leaves[1].storage == step.calls[0].outputs[0].storage


def test_a_kernel_over_memory_that_no_tensor_of_the_step_holds(runtime: Runtime) -> None:
    foreign = np.ones((1, 8), np.float32)
    with pytest.raises(NotRecordableError, match="reads memory that no tensor of the step holds"):
        fitted(runtime, lambda x, position: normed(runtime, foreign))
