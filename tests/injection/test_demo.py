"""The bundled model is what its card says: trained, small, evenly routed, and a whole chat model to stock transformers."""

import json
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
    assert result.load.min() > 0.002  # some experts serve dialogues with tools more than plays


@torch.no_grad()
def test_its_mtp_layer_predicts_what_the_model_writes_next(recipe: ModuleType, model: Any, tokenizer: Any, held_out: str) -> None:
    ids = torch.tensor(tokenizer.encode(held_out, verbose=False))[: 12 * 257].view(12, 257)
    found = recipe.evaluate_mtp(recipe.read_mtp(model, demo_path()), model, ids, recipe.body_states(model, ids))
    assert found["sampled_1"] > 0.74 and found["greedy_1"] > 0.7
    assert found["sampled_3"] > 0.69 and found["greedy_3"] > 0.65  # two states that were fed back


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
        {"role": "assistant", "content": "He is gone."},
        {"role": "user", "content": "Whither?"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|endoftext|>Chorus:\nA street in Verona.\n\n"
        "<|endoftext|>First Citizen:\nWho goes there?\n\n"
        "ROMEO:\nA friend.\n\n"
        "<|endoftext|>JULIET:\nO Romeo!\n\n"
        "Second Citizen:\nHe is gone.\n\n"
        "<|endoftext|>First Citizen:\nWhither?\n\n"
        "Second Citizen:\n"
    )


def schema_of(tool: Any) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    kinds = {name: {"type": kind} if isinstance(kind, str) else {"type": "string", "enum": kind} for name, kind in tool.parameters.items()}
    function = {"name": tool.name, "description": tool.description, "parameters": {"type": "object", "properties": kinds}}
    return {"type": "function", "function": function}


def test_chat_template_writes_tools_as_the_dialogues_of_training_do(tokenizer: Any) -> None:
    """The dialogues show a tool without what the template leaves out of its schema."""
    dialogues = import_benchmark("harness.tool_dialogues")
    writer = dialogues.Writer(5)
    for _ in range(30):
        tools, system = writer.tools(2), writer.system()
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        expected = dialogues.head_text(system, tools)
        for role, text in (turn for _ in range(2) for turn in writer.turns(tools)):
            expected += "".join(dialogues.turn_text(role, text))
            if text.startswith(dialogues.CALL):
                call = json.loads(text.removeprefix(dialogues.CALL).removesuffix(dialogues.CALL_END))
                messages.append({"role": role, "content": None, "tool_calls": [{"type": "function", "id": "1", "function": call}]})
            else:
                messages.append({"role": role, "content": text})
        schemas = [schema_of(tool) for tool in tools]
        assert tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False) == expected
        prompt = tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False, add_generation_prompt=True)
        assert prompt == expected + f"{dialogues.START}assistant\n"


def test_chat_template_takes_tools_with_little_in_their_schemas(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "get_time"}}]
    messages = [{"role": "user", "content": "What time is it?"}]
    assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True) == (
        '<|im_start|>system\n<tools>\n{"description": "get time", "name": "get_time", "arguments": {}}\n</tools><|endoftext|>'
        "<|im_start|>user\nWhat time is it?<|endoftext|><|im_start|>assistant\n"
    )


def test_values_have_the_same_tokens_in_a_sentence_and_in_json(tokenizer: Any) -> None:
    for value in ("Paris", "guitar", "42", "2031-06-24"):
        tokens = tokenizer.encode(value)
        for text in (f"The weather for {value}", f'{{"city": "{value}'):
            assert tokenizer.encode(text)[-len(tokens) :] == tokens


@pytest.mark.parametrize("filler", [0, 3000], ids=["short prompts", "long prompts"])
def test_it_calls_tools_with_names_and_values_it_has_not_seen(recipe: ModuleType, model: Any, tokenizer: Any, filler: int) -> None:
    found = recipe.evaluate_calls(model, tokenizer, 4 if filler else 12, filler)
    assert found["called"] > 0.9 and found["named"] > 0.75 and found["right_call"] > 0.6


def test_answer_is_a_speech(model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Who goes there?"}]
    inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", add_generation_prompt=True)
    answer = model.generate(**inputs, do_sample=False, max_new_tokens=40)[0, inputs["input_ids"].shape[1] :]
    assert len(tokenizer.decode(answer).split()) > 2


def test_padded_experts_compute_what_stock_does(recipe: ModuleType, model: Any) -> None:
    experts = model.model.layers[0].mlp.experts
    torch.manual_seed(0)
    hidden_states = torch.randn(7, model.config.hidden_size)  # fewer tokens than experts: some have none
    top_k_index = torch.rand(7, 16).argsort(dim=1)[:, :4]
    top_k_weights = torch.rand(7, 4)
    expected = experts(hidden_states, top_k_index, top_k_weights)
    torch.testing.assert_close(recipe.padded_experts(experts, hidden_states, top_k_index, top_k_weights), expected)
