"""The bundled model is what its card says: trained, small, evenly routed, and a whole chat model to stock transformers."""

import logging
from types import ModuleType
from typing import Any

import pytest
import torch
from support import import_benchmark
from transformers import AutoModelForCausalLM, AutoTokenizer

from moegraft.injection.demo import demo_path

EXCERPT = 24_000  # characters of the held-out text; about 9,000 tokens


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return import_benchmark("train_demo")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_path())


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def held_out(recipe: ModuleType) -> str:
    text: str = import_benchmark("harness.texts").held_out()
    return text[:EXCERPT]


@pytest.fixture(scope="module")
def result(recipe: ModuleType, model: Any, tokenizer: Any, held_out: str) -> Any:
    return recipe.evaluate(model, tokenizer, held_out)


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in demo_path().iterdir() if path.is_file()) <= 12_000_000


def test_weights_are_bfloat16() -> None:
    assert AutoModelForCausalLM.from_pretrained(demo_path(), dtype="auto").dtype == torch.bfloat16


def test_stock_transformers_loads_it_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        AutoModelForCausalLM.from_pretrained(demo_path())
    finally:
        library.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_architecture(model: Any) -> None:
    config = model.config
    assert config.model_type == "qwen3_moe"
    assert config.num_hidden_layers >= 4
    assert (config.num_experts, config.num_experts_per_tok) == (16, 4)
    assert config.hidden_size % 32 == config.moe_intermediate_size % 32 == 0  # whole blocks of the low-bit formats


def test_it_has_learnt_held_out_text(result: Any) -> None:
    assert result.loss < 3.4  # nats a token; ln(1024) = 6.93 knows nothing
    assert result.bits_per_byte < 2.15


def test_every_expert_is_used(result: Any, model: Any) -> None:
    assert result.load.shape == (model.config.num_hidden_layers, model.config.num_experts)
    assert result.load.min() > 0.01


@torch.no_grad()
def test_its_mtp_layer_predicts_what_the_model_writes_next(recipe: ModuleType, model: Any, tokenizer: Any, held_out: str) -> None:
    ids = torch.tensor(tokenizer.encode(held_out, verbose=False))[: 12 * 257].view(12, 257)
    found = recipe.evaluate_mtp(recipe.read_mtp(model, demo_path()), model, ids, recipe.body_states(model, ids))
    assert found["sampled_1"] > 0.78 and found["greedy_1"] > 0.72
    assert found["sampled_3"] > 0.74 and found["greedy_3"] > 0.68  # two states that were fed back


def test_tokenizer_round_trips(tokenizer: Any, held_out: str) -> None:
    for text in (held_out, "  spaces,\n\n\nlines\tand Unicode: naïve œuvre 蘭 🎭\r\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_cut_after_a_speech_has_the_same_tokens(tokenizer: Any, held_out: str) -> None:
    cut = held_out.index("\n\n", EXCERPT // 2) + 2
    assert tokenizer.encode(held_out[:cut]) + tokenizer.encode(held_out[cut:]) == tokenizer.encode(held_out)


def test_chat_template_renders_turns_as_scenes(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "A street in Verona."},
        {"role": "user", "content": "Who goes there?"},
        {"role": "assistant", "content": "ROMEO:\nA friend.\n\n"},
        {"role": "user", "content": "JULIET:\nO Romeo!"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|endoftext|>Chorus:\nA street in Verona.\n\n"
        "<|endoftext|>First Citizen:\nWho goes there?\n\n"
        "ROMEO:\nA friend.\n\n"
        "<|endoftext|>JULIET:\nO Romeo!\n\n"
    )


def test_shipped_template_is_the_recipe_s(recipe: ModuleType) -> None:
    assert (demo_path() / "chat_template.jinja").read_text() == recipe.CHAT_TEMPLATE


def test_answer_opens_with_another_speaker(model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Who goes there?"}]
    inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", add_generation_prompt=True)
    answer = model.generate(**inputs, do_sample=False, max_new_tokens=40)[0, inputs["input_ids"].shape[1] :]
    heading, rest = tokenizer.decode(answer).split("\n", 1)
    assert heading.endswith(":") and heading[0].isupper()
    assert rest.strip()


def test_padded_experts_compute_what_stock_does(recipe: ModuleType, model: Any) -> None:
    experts = model.model.layers[0].mlp.experts
    torch.manual_seed(0)
    hidden_states = torch.randn(7, model.config.hidden_size)  # fewer tokens than experts: some have none
    top_k_index = torch.rand(7, 16).argsort(dim=1)[:, :4]
    top_k_weights = torch.rand(7, 4)
    expected = experts(hidden_states, top_k_index, top_k_weights)
    torch.testing.assert_close(recipe.padded_experts(experts, hidden_states, top_k_index, top_k_weights), expected)
