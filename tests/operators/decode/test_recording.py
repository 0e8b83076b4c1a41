"""What a recording must not pretend to know: each is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from moegraft.cpu_backend import NormSpec, Runtime
from moegraft.operators.decode.native.fit import Affine, FittedStep, RecordedStep, fit, storage_bytes
from moegraft.operators.decode.native.lower import Lowering
from moegraft.operators.decode.native.program import ARENA, NativeStep, OtherSizeError, PythonCall
from moegraft.operators.decode.native.record import NotRecordableError, Recorder

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


def replayed(runtime: Runtime, compute: Compute, position: int) -> tuple[torch.Tensor, list[str]]:
    """Compute by a program that was recorded at two other positions; also returns the calls that stay PyTorch's."""
    step = fitted(runtime, compute)
    lowering = Lowering(step, [], [])
    native = NativeStep(lowering, runtime, [step.outputs["out"]], 2 * position)
    own = {step.inputs["x"].storage: torch.arange(8.0) + position} | step.constants
    tensors = {ARENA: torch.empty(native.arena_bytes, dtype=torch.uint8)}
    tensors |= {buffer: storage_bytes(own[storage]) for storage, buffer in native.buffers.items()}
    for buffer, tensor in tensors.items():
        native.native.bind(buffer, tensor, 0)
    native.native.check(position, position, 0)
    for part in native.parts:
        if isinstance(part, PythonCall):
            native.call(part, tensors, position, 0)
        else:
            native.native.run(position, *part)
    out = native.view(step.outputs["out"], tensors, position, 0).clone()
    return out, [node.name for node in lowering.nodes if node.kind == "call"]


def read(x: torch.Tensor, position: int) -> torch.Tensor:
    return x * x.sum().item()


def branched(x: torch.Tensor, position: int) -> torch.Tensor:
    return x + 1 if bool((x > 6).any()) else x - 1


def drawn(x: torch.Tensor, position: int) -> torch.Tensor:
    return x + torch.rand(8)


def sampled(x: torch.Tensor, position: int) -> torch.Tensor:
    return x + torch.multinomial(x, 1)


def masked(x: torch.Tensor, position: int) -> torch.Tensor:
    return x.masked_select(x > 7)


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
        (masked, "masked_select"),
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


def rows_of_a_table(x: torch.Tensor, position: int) -> torch.Tensor:
    table = torch.arange(3 * position + 12).float().view(-1, 3).T.contiguous().T + x[:3]  # the columns are contiguous, the rows are not
    return table.index_select(0, torch.arange(0, 2 * (position + 2)).view(-1, 2)[:, 0] // 2)


def rows_of_integers(x: torch.Tensor, position: int) -> torch.Tensor:
    return torch.arange(3 * position).view(-1, 3).index_select(0, x[:5].long() - position)


def repeated(x: torch.Tensor, position: int) -> torch.Tensor:
    return x[:6].view(2, 3).repeat(2, 1, 3) + x[:2].view(2, 1).repeat(1, 9)


def padded(x: torch.Tensor, position: int) -> torch.Tensor:
    return torch.nn.functional.pad((x[0] + torch.arange(2 * position + 2)).view(2, -1), (1, 2, 3, 0), value=-1.5)


def scattered(x: torch.Tensor, position: int) -> torch.Tensor:
    index = (x[:3].view(1, 3) - position).to(torch.int32)
    marks = torch.zeros(1, position + 2, dtype=torch.bool).scatter(-1, index, True)
    return marks.float() + torch.arange(position + 2).view(1, -1)


@pytest.mark.parametrize("compute", [rows_of_a_table, rows_of_integers, repeated, padded, scattered], ids=lambda compute: compute.__name__)
@pytest.mark.parametrize("position", [7, 12])
def test_calls_that_become_operations(runtime: Runtime, compute: Compute, position: int) -> None:
    found, calls = replayed(runtime, compute, position)
    assert torch.equal(found, compute(torch.arange(8.0) + position, position))
    assert not calls


def test_a_size_that_depends_on_the_data(runtime: Runtime) -> None:
    """It is replayed as long as it is the recorded one."""

    def above(x: torch.Tensor, position: int) -> torch.Tensor:
        return torch.nonzero(x > 7.0)[:, 0] + x[x > 7.0].long()  # one more in the step from 5 to 6

    for position in (3, 7):
        found, _ = replayed(runtime, above, position)
        assert torch.equal(found, above(torch.arange(8.0) + position, position))
    with pytest.raises(OtherSizeError, match=r"nonzero.*returns \(8, 1\), expected \(11, 1\)"):
        replayed(runtime, above, 11)


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
