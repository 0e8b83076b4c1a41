"""Every family of the installed transformers: the injected model equals the stock one, or is refused with the reason.

The first two tests keep the table itself honest: none left out, and every case sensitive to its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import combinations
from support.families import build_model, case_of, family_cases, prompt, save_checkpoint, served_cases, stock_model, unlisted_families
from support.family_rows import FamilyCase
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.operators.errors import MoegraftError
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.structure import calls_all_rows

LOGITS_TOLERANCE = 1e-5  # relative, in float32: sums of one product list in two orders
NEW_TOKENS = 24  # two steps are recorded, two compared, and windows of 16 fill
# Signal over noise of one experts module against the stock one, in decibels. Normal weights rounded in groups of 32 to 8 bits leave
# about 46 dB a matrix, to 4 bits about 22 dB; three matrices and rounded activations leave 34 to 39 and 14 to 18 over the families.
SQNR_DB = {"int8": 33.0, "int4": 13.0}
# Attention of other kinds than plain and sliding is refused by transformers' continuous batching itself.
BATCHED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "glm4_moe")


def from_checkpoint() -> list[FamilyCase]:
    return [case for case in served_cases() if case.generates]


def ids_of(case: FamilyCase) -> str:
    return case.model_type


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """By path from `layers` on: a checkpoint of text and images may be loaded as the text model alone."""
    return {path[path.find("layers.") :]: module for path, module in model.named_modules() if path.rpartition(".")[2] == "experts"}


def inject(model: Path | PreTrainedModel, rules: str = "cpu-exact", **options: Any) -> PreTrainedModel:
    injected: PreTrainedModel = optimize_and_load(model, rules, progress=False, threads=1, **options)
    return injected


@torch.no_grad()
def logits_of(model: PreTrainedModel, seed: int = 0) -> torch.Tensor:
    """(2, 9, V) float64."""
    logits: torch.Tensor = model(input_ids=prompt(9, batch=2, seed=seed)).logits
    return logits.double()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def sqnr_db(found: torch.Tensor, expected: torch.Tensor) -> float:
    noise = (found.double() - expected.double()).square().mean()
    return float(10 * torch.log10(expected.double().square().mean() / noise))


def greedy(model: PreTrainedModel, ids: torch.Tensor) -> list[list[int]]:
    """The `NEW_TOKENS` tokens that follow each row of `ids`."""
    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    return generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[:, ids.shape[1] :].tolist()


@torch.no_grad()
def is_greedy(model: PreTrainedModel, ids: torch.Tensor, tokens: list[list[int]]) -> bool:
    """Whether `tokens` are the most likely ones after `ids`: of one pass over all of them, or, where that differs, of `generate`."""
    text = torch.cat((ids, torch.tensor(tokens)), dim=1)
    likeliest = model(input_ids=text[:, :-1]).logits.argmax(-1)[:, ids.shape[1] - 1 :]
    return likeliest.tolist() == tokens or greedy(model, ids) == tokens


@dataclass(frozen=True, slots=True)
class Call:
    """What one experts module was given, as the interface has it, and what it returned."""

    arguments: tuple[torch.Tensor, ...]
    output: torch.Tensor

    @classmethod
    def of(cls, module: nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> Call:
        if not calls_all_rows(module):
            return cls(arguments, output)
        (rows,) = arguments  # of all tokens for the first expert, then for the second one, ...; zero where it is not chosen
        chosen = rows.any(-1)
        index = torch.arange(int(module.num_experts)).repeat_interleave(len(rows) // int(module.num_experts))[chosen, None]  # type: ignore[arg-type]
        return cls((rows[chosen], index, torch.ones(index.shape)), output[chosen])


def recorded(model: PreTrainedModel) -> dict[str, Call]:
    """One call of every experts module, in a forward pass."""
    calls: dict[str, Call] = {}

    def keep(path: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        return lambda module, arguments, output: calls.update({path: Call.of(module, arguments, output)})

    handles = [module.register_forward_hook(keep(path)) for path, module in experts_of(model).items()]
    logits_of(model)
    for handle in handles:
        handle.remove()
    return calls


def test_no_family_is_left_out() -> None:
    assert not unlisted_families(), "these have the shared experts interface and no row in tests/support/family_rows.py"


@pytest.mark.parametrize("case", served_cases(), ids=ids_of)
def test_a_case_would_show_a_wrong_expert(case: FamilyCase) -> None:
    """Without its experts a model says something else, and its routers prefer some experts to others."""
    model = build_model(case)
    logits = logits_of(model)
    calls = recorded(model)
    assert calls, "no experts ran"
    for call in calls.values():
        tokens_of_each = call.arguments[1].flatten().bincount()
        assert tokens_of_each.max() > tokens_of_each.min()
    for module in experts_of(model).values():
        module.register_forward_hook(lambda _module, _arguments, output: torch.zeros_like(output))
    assert relative_error(logits_of(model), logits) > 0.05


@dataclass(frozen=True, slots=True)
class Pair:
    """One checkpoint of several files, loaded both ways."""

    case: FamilyCase
    folder: Path
    stock: PreTrainedModel
    injected: PreTrainedModel


@pytest.fixture(scope="module", params=from_checkpoint(), ids=ids_of)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Bfloat16 weights, computed in float32: those of float32 are tested in place, and from a checkpoint for two families."""
    case: FamilyCase = request.param
    folder = tmp_path_factory.mktemp(case.model_type)
    save_checkpoint(case, folder, dtype=torch.bfloat16, shards=3)
    return Pair(case, folder, stock_model(case, folder), inject(folder, dtype=torch.float32))


def test_every_experts_module_is_replaced(pair: Pair) -> None:
    replaced = experts_of(pair.injected)
    assert set(replaced) == set(experts_of(pair.stock))
    assert all(isinstance(module, HybridExperts) and module.weight_type == "bfloat16" for module in replaced.values())
    assert not [name for name, parameter in pair.injected.named_parameters() if parameter.is_meta or ".experts." in name]


def test_logits_equal_stock(pair: Pair) -> None:
    assert relative_error(logits_of(pair.injected), logits_of(pair.stock)) <= LOGITS_TOLERANCE


def test_bfloat16_experts_are_close(pair: Pair) -> None:
    """`stored` keeps bfloat16 weights: exact under float32 activations, above, and as good as stock under bfloat16 ones."""
    halved = experts_of(inject(pair.folder))
    calls = recorded(pair.stock)
    assert calls, "no experts ran"
    for path, call in calls.items():
        tokens, index, weights = call.arguments
        output = halved[path](tokens.bfloat16(), index, weights)
        assert output.dtype == torch.bfloat16
        assert sqnr_db(output, call.output) >= 40.0


def test_greedy_tokens_equal_stock(pair: Pair) -> None:
    """The last of a pair: a load beside the programs of its steps collects them too."""
    tokens = greedy(pair.injected, prompt(7))
    assert len(tokens[0]) == NEW_TOKENS
    assert is_greedy(pair.stock, prompt(7), tokens)


@pytest.mark.parametrize("case", served_cases(), ids=ids_of)
def test_a_loaded_model_is_injected_in_place(case: FamilyCase) -> None:
    model = build_model(case)
    expected = logits_of(model)
    assert inject(model) is model
    assert relative_error(logits_of(model), expected) <= LOGITS_TOLERANCE


def families_of_float32() -> list[object]:
    return [case if case.model_type in BATCHED[:2] else pytest.param(case, marks=pytest.mark.long) for case in from_checkpoint()]


@pytest.mark.parametrize("case", families_of_float32(), ids=ids_of)
def test_a_float32_checkpoint(case: FamilyCase, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path)
    injected = inject(tmp_path)
    assert {module.weight_type for module in injected.modules() if isinstance(module, HybridExperts)} == {"float32"}
    assert relative_error(logits_of(injected), logits_of(stock_model(case, tmp_path))) <= LOGITS_TOLERANCE


@pytest.mark.parametrize(
    ("weights", "case"), combinations(list(SQNR_DB), served_cases()), ids=lambda value: getattr(value, "model_type", value)
)
def test_quantised_experts_are_close(weights: str, case: FamilyCase) -> None:
    """Module by module, on the stock model's inputs: a changed routing further down is no error of the experts."""
    calls = recorded(build_model(case))
    injected = inject(build_model(case), "cpu", vars={"weights": weights})
    assert logits_of(injected).isfinite().all()
    operators = experts_of(injected)
    for path, call in calls.items():
        module = operators[path]
        assert isinstance(module, HybridExperts) and module.weight_type == weights
        assert sqnr_db(module(*call.arguments), call.output) >= SQNR_DB[weights]


@pytest.mark.parametrize("model_type", BATCHED)
def test_continuous_batching_equals_generate(model_type: str) -> None:
    model = inject(build_model(case_of(model_type)))
    prompts = [prompt(length, seed=length)[0].tolist() for length in (5, 9, 3)]
    settings = GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
    small = ContinuousBatchingConfig(num_blocks=16, block_size=32, max_batch_tokens=64)  # by default it takes most of the memory
    generate_batch: Callable[..., dict[str, Any]] = model.generate_batch  # type: ignore[assignment]
    batched = generate_batch(inputs=prompts, generation_config=settings, continuous_batching_config=small)
    found = {tuple(result.prompt_ids): result.generated_tokens for result in batched.values()}
    assert found == {tuple(ids): greedy(model, torch.tensor([ids]))[0][:16] for ids in prompts}


@pytest.mark.parametrize("case", [case for case in family_cases() if case.reason and case.buildable], ids=ids_of)
def test_what_cannot_be_served_is_refused_by_name(case: FamilyCase, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path)
    with pytest.raises(MoegraftError) as refusal:
        inject(tmp_path)
    assert case.reason is not None and case.reason in str(refusal.value)


@pytest.mark.parametrize("case", [case for case in served_cases() if not case.generates], ids=ids_of)
def test_a_checkpoint_that_generates_no_text_is_refused(case: FamilyCase, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path)
    with pytest.raises(MoegraftError, match=f"no text-generating class for model type '{case.model_type}'"):
        inject(tmp_path)
