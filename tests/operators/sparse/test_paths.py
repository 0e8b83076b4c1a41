"""Every path through a layer against the eager reference: the same function, whatever is read for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support.kernel_cases import relative_error
from support.sparse_cases import SparseCase, sparse_case
from support.triton_cases import DEVICE, INTERPRETED, ROUNDED

from moegraft.cpu_backend import GateSpec
from moegraft.operators.kernels.sparse_weights import sketch_of
from moegraft.operators.kernels.workspace import Workspace
from moegraft.operators.sparse.gpu_layer import SparseGpuLayer
from moegraft.operators.sparse.paths import PATHS, takes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SPARSE_PATHS = ("pair", "ordered", "union")
EXACT = 2e-6  # float32 sums of products of what is stored
NO_NEURON = 1e9
CLAMPED = GateSpec("silu", alpha=1.702, gate_limit=1.0, act_limit=0.6, up_limit=0.8, up_offset=1.0)


def run(
    case: SparseCase, path: str, threshold: float, *, group: int = 1, sketch_margin: float | None = None
) -> tuple[torch.Tensor, tuple[int, int]]:
    """The output, and the neurons that were counted as active and in all."""
    case = case.on_device()
    weights, margin = case.weights, 1.0
    if sketch_margin is not None:
        weights, margin = replace(weights, sketch=sketch_of(weights)), sketch_margin
    layer = SparseGpuLayer(weights, Workspace(torch.device(DEVICE)), lambda *_: "pair", group=group, margin=margin)
    layer.set_threshold(threshold, 0.0)
    out = torch.full(case.hidden_states.shape, float("nan"), device=DEVICE)
    layer.forward(case.hidden_states, case.ids, case.top_k_weights, out, path)
    return out.cpu(), layer.take_counts()


def limit(path: str, dtype: torch.dtype) -> float:
    """Pairs are summed in float32; the other paths round neurons to the dtype between the matrices."""
    return EXACT if path in ("pair", "ordered") or (INTERPRETED and dtype == torch.float32) else ROUNDED[dtype]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_inactive_neurons_count_as_zero(sparsity: float, dtype: torch.dtype, path: str) -> None:
    case = sparse_case(dtype=dtype)
    threshold = case.threshold(sparsity)
    found, counts = run(case, path, threshold)
    expected = case.reference(threshold)
    assert relative_error(expected, case.reference(0.0)) > 0.01  # the threshold does something
    assert relative_error(found, expected) <= limit(path, dtype)
    assert counts == (int((case.activations() >= threshold).sum()), case.ids.numel() * case.weights.neurons)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "shape",
    [
        # tokens, top_k, experts, hidden, neurons
        (1, 1, 1, 32, 32),  # the least there is
        (1, 4, 4, 288, 16),  # K = E; columns that are no multiple of a step
        (3, 2, 5, 33, 7),  # odd sizes: rows that are not aligned
        (1, 1, 2, 32, 1040),  # more neurons than are listed in the gate's own launch
        (19, 1, 2, 32, 40),  # an expert with more pairs than a block
    ],
    ids=str,
)
def test_sizes(shape: tuple[int, ...], path: str) -> None:
    case = sparse_case(*shape)
    if path == "grouped_mm" and not takes(replace(case.weights, gate_up=case.weights.gate_up.bfloat16())):
        pytest.skip("grouped_mm takes rows of whole 16 bytes")
    threshold = case.threshold(0.7)
    assert relative_error(run(case, path, threshold)[0], case.reference(threshold)) <= limit(path, torch.float32)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_no_active_neuron(bias: bool, path: str) -> None:
    case = sparse_case(bias=bias)
    found, counts = run(case, path, NO_NEURON)
    assert counts[0] == 0
    expected = case.reference(NO_NEURON)
    assert torch.equal(found, torch.zeros_like(found)) if not bias else relative_error(found, expected) <= EXACT


@pytest.mark.parametrize("path", PATHS)
def test_all_neurons_active(path: str) -> None:
    case = sparse_case(tokens=3)
    found, counts = run(case, path, 0.0)
    assert counts[0] == counts[1]
    assert relative_error(found, case.reference(0.0)) <= limit(path, torch.float32)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["interleaved", "biases", "gpt_oss", "ungated"])
def test_forms_of_experts(form: str, path: str) -> None:
    options = {
        "interleaved": {"interleaved": True},
        "biases": {"bias": True},
        "gpt_oss": {"interleaved": True, "bias": True, "spec": CLAMPED},
        "ungated": {"gated": False, "bias": True},
    }[form]
    case = sparse_case(3, 2, 4, 72, 40, **options)  # type: ignore[arg-type]
    # below what a limit cuts to one value; and relu2 makes half of the neurons zeros
    threshold = case.threshold(0.7 if form == "ungated" else 0.4)
    assert relative_error(run(case, path, threshold)[0], case.reference(threshold)) <= limit(path, torch.float32)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("group", [4, 8, 16, 32])
def test_groups_of_neurons(group: int, path: str) -> None:
    case = sparse_case(2, 2, 3, 32, 72)  # 72: the last group of 16 and 32 reaches beyond the last neuron
    threshold = case.threshold(0.9)
    found, counts = run(case, path, threshold, group=group)
    expected = case.reference(threshold, group)
    assert relative_error(expected, case.reference(threshold)) > 0.01  # groups keep more
    assert relative_error(found, expected) <= limit(path, torch.float32)
    assert counts[0] == int((case.activations() >= threshold).sum())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("absent", ["some", "a whole token", "all"])
def test_padded_slots(absent: str, path: str) -> None:
    case = sparse_case(4, 2, 3, 32, 40)
    ids = case.ids.clone()
    ids[{"some": (slice(0, 2), 1), "a whole token": (2,), "all": (slice(None),)}[absent]] = -1
    case = replace(case, ids=ids)
    found, counts = run(case, path, 0.1)
    assert relative_error(found, case.reference(0.1)) <= limit(path, torch.float32)
    assert counts[1] == int((ids >= 0).sum()) * case.weights.neurons


@pytest.mark.parametrize("path", PATHS)
def test_all_tokens_on_one_expert(path: str) -> None:
    case = sparse_case(20, 1, 4, 32, 40)
    case = replace(case, ids=torch.full_like(case.ids, 2))
    threshold = case.threshold(0.8)
    assert relative_error(run(case, path, threshold)[0], case.reference(threshold)) <= limit(path, torch.float32)


@pytest.mark.parametrize("path", SPARSE_PATHS)
def test_a_nan_is_seen(path: str) -> None:
    case = sparse_case(2, 1, 2, 32, 32)
    case.hidden_states[1, 3] = float("nan")
    found, _ = run(case, path, NO_NEURON)
    assert not found[0].isnan().any()
    assert found[1].isnan().all()


@pytest.mark.parametrize("path", PATHS)
def test_equal_inputs_give_equal_bits(path: str) -> None:
    case = sparse_case(6, 2, 3, 32, 40)
    assert torch.equal(run(case, path, 0.2)[0], run(case, path, 0.2)[0])


@pytest.mark.parametrize("tokens", [3, 9], ids=["by pair", "grouped"])
@pytest.mark.parametrize("form", ["plain", "gpt_oss", "ungated"])
def test_a_sketch_that_drops_nothing_is_exact(form: str, tokens: int) -> None:
    options = {"plain": {}, "gpt_oss": {"interleaved": True, "bias": True, "spec": CLAMPED}, "ungated": {"gated": False}}[form]
    case = sparse_case(tokens, 2, 3, 72, 40, **options)  # type: ignore[arg-type]
    threshold = case.threshold(0.7 if form == "ungated" else 0.4)
    found, counts = run(case, "pair", threshold, sketch_margin=0.0)
    assert relative_error(found, case.reference(threshold)) <= EXACT
    assert counts == (int((case.activations() >= threshold).sum()), tokens * 2 * 40)


def test_a_sketch_finds_most_neurons_and_invents_none() -> None:
    case = sparse_case(4, 2, 3, 256, 128)
    threshold = case.threshold(0.9)
    active = int((case.activations() >= threshold).sum())
    _, (found, _) = run(case, "pair", threshold, sketch_margin=0.7)
    assert 0.97 * active <= found <= active
    _, (without_margin, _) = run(case, "pair", threshold, sketch_margin=1.0)
    assert without_margin < found


def test_long_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraft.operators.sparse.gpu_layer.MOST_TOKENS", 3)
    case = sparse_case(7, 2, 3, 32, 32)
    assert relative_error(run(case, "pair", 0.2)[0], case.reference(0.2)) <= EXACT


def test_buffers_are_fixed() -> None:
    """What a captured graph reads must still be there: a batch size gets the same memory each time, and a smaller one takes none away."""
    case = sparse_case(3, 2, 3, 32, 32).on_device()
    workspace = Workspace(torch.device(DEVICE))
    layer = SparseGpuLayer(case.weights, workspace, lambda *_: "union")
    out = torch.empty_like(case.hidden_states)

    def held(tokens: int) -> dict[object, int]:
        layer.forward(case.hidden_states[:tokens], case.ids[:tokens], case.top_k_weights[:tokens], out[:tokens])
        return {key: tensor.data_ptr() for key, tensor in workspace._held.items()}

    first = held(3)
    assert held(3) == first
    assert first.items() <= held(1).items()


def test_activations_are_those_of_the_gates() -> None:
    case = sparse_case(5, 2, 3, 64, 40)
    on_device = case.on_device()
    layer = SparseGpuLayer(on_device.weights, Workspace(torch.device(DEVICE)), lambda *_: "pair")
    acted = torch.cat([part.clone() for _, part in layer.activations(on_device.hidden_states, on_device.ids)]).cpu()
    torch.testing.assert_close(acted.abs().flatten(0, 1).double(), case.activations(), rtol=1e-4, atol=1e-5)
