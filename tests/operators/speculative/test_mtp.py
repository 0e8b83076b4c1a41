"""`draft: mtp`: a checkpoint's layers for multi-token prediction draft, as transformers' own do, and do not change the text."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_layers
from safetensors.torch import load_file, save_file
from support.families import build_model, case_of, greedy, prompt
from support.mtp import assert_plain_steps_change_no_draft, proposals, write_checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.candidate_generator import MTPCandidateGenerator

from moegraft.injection import build_meta_model, new_cache, optimize_and_load, plan
from moegraft.injection.checkpoint.gguf.export import plan_export, read_types, with_written_mtp, write_export
from moegraft.injection.cli.chat.prompt_cache import read_ahead
from moegraft.operators.decode import mtp
from moegraft.operators.decode.mtp_layers import mtp_layers
from moegraft.operators.errors import MoegraftError

if not hasattr(getattr(transformers.modeling_layers, "MtpModel", None), "forward_layer"):
    pytest.skip("this transformers cannot compute MTP layers one by one", allow_module_level=True)

STEPS = 40
WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 16}
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},  # latent attention
    "three layers": {"layers": 3},
    "glm4_moe": {"share": 0.02},
    "inkling_text": {"share": 0.02},  # short convolutions, whose states are rolled back
    "mellum": WINDOWS,  # a window in the MTP layer, whose tensors have names of their own
    "qwen3_moe": {"share": 0.01, "mlp_only_layers": []},  # a layer that neither the config nor transformers declares
    "dense": {"mlp_only_layers": [3]},  # beside experts in the body
    "qwen3_next": {"share": 0.02, "mlp_only_layers": []},  # full attention after a body that ends with linear attention
    "qwen3_5_moe_text": {"share": 0.02, "mtp_num_hidden_layers": 1},
    "qwen3_5_moe": {"share": 0.02, "mtp_num_hidden_layers": 1},  # a language model within a larger one
}
Folders = Callable[[str], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """`checkpoints(case)`: the folder of a tiny checkpoint with MTP layers, and its stock model."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def make(name: str) -> tuple[Path, PreTrainedModel]:
        if name not in made:
            folder = tmp_path_factory.mktemp("mtp")
            model_type = {"three layers": "deepseek_v3", "dense": "qwen3_moe"}.get(name, name)
            made[name] = folder, write_checkpoint(folder, model_type, **CASES[name])
        return made[name]

    return make


def rules(folder: Path, **options: Any) -> Path:
    options = {"draft": "mtp", "schedule": "fixed", "max_draft": 3} | options
    kwargs = ", ".join(f"{name}: {value}" for name, value in options.items())
    path = folder / "rules.yaml"
    path.write_text(
        f"version: 1\nextends: cpu-exact\nrules:\n- match: {{kind: model}}\n  replace: {{class: speculative_draft, kwargs: {{{kwargs}}}}}\n"
    )
    return path


def load(folder: Path, gguf: Path | None = None, **options: Any) -> PreTrainedModel:
    return optimize_and_load(folder, rules(folder, **options), gguf=gguf, progress=False)


def statistics(model: PreTrainedModel) -> Any:
    return model.moegraft.model_operator.statistics()


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("deepseek_v3", 1),
        ("deepseek_v3", 4),  # three times its own state fed back
        ("three layers", 2),  # the third layer falls behind
        ("three layers", 4),
        ("glm4_moe", 3),
        ("mellum", 2),
        ("inkling_text", 3),
        ("qwen3_moe", 3),
        ("qwen3_next", 2),
        ("qwen3_5_moe", 2),
    ],
)
def test_greedy_text_is_that_of_plain_decoding(name: str, depth: int, checkpoints: Folders) -> None:
    folder, stock = checkpoints(name)
    model = load(folder, max_draft=depth)
    for length in (1, 20):  # a prompt that is shorter than the layers look ahead
        assert torch.equal(greedy(model, prompt(length)), greedy(stock, prompt(length)))
    found = statistics(model)
    assert len(found["acceptance_by_position"]) == depth
    assert 0.4 < found["acceptance_by_position"][0] < 1, "the layers are made to be right often"
    steps = model.moegraft.statistics()["decode_steps"]
    assert steps["replayed_steps"] > 0 and steps["reasons"] == []
    assert steps["replayed_steps"] > found["rounds"], "the steps of MTP layers are programs too"


@pytest.mark.parametrize("name", ["deepseek_v3", "three layers", "glm4_moe", "mellum", "inkling_text"])
def test_drafts_are_those_of_transformers(name: str, checkpoints: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, stock = checkpoints(name)
    depth: int = CASES[name].get("layers", 1)
    found = proposals(monkeypatch)
    expected: dict[int, list[int]] = {}
    theirs = MTPCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = theirs(self, input_ids, *args, **kwargs)
        if ids.shape[1] > input_ids.shape[1]:
            expected[input_ids.shape[1]] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    if name not in ("mellum", "inkling_text"):  # the classes name the layers of the released models
        after = [rf"model\.layers\.{number}\." for number in range(3, 3 + depth)]
        monkeypatch.setattr(type(stock), "_keys_to_ignore_on_load_unexpected", after)
    model, stock = load(folder, max_draft=depth), type(stock).from_pretrained(folder)
    ids = prompt(20)
    assert torch.equal(greedy(model, ids), greedy(stock, ids, use_mtp=True))
    lengths = [length for length in found if length + depth < ids.shape[1] + STEPS]
    assert len(lengths) > 5
    assert {length: found[length] for length in lengths} == {length: expected.get(length) for length in lengths}


def eager_drafts(folder: Path, stock: PreTrainedModel, text: torch.Tensor, depth: int) -> list[int]:
    """Return the tokens that a layer in the form of Qwen3-Next predicts after `text` (1, T), computed from the stored tensors.

    Each token takes a pass over the whole text.
    """
    stored = {name[4:]: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name.startswith("mtp.")}
    config = copy.deepcopy(stock.config.get_text_config())
    config.layer_types, config.mlp_only_layers = ["full_attention"], [] if "layers.0.mlp.gate.weight" in stored else [0]
    decoder: Any = stock.get_decoder()
    layer = type(decoder.layers[0])(config, 0).train(False)
    own = {name[len("layers.0.") :]: tensor for name, tensor in stored.items() if name.startswith("layers.0.")}
    if "mlp.experts.0.up_proj.weight" in own:
        by_expert = [
            [own.pop(f"mlp.experts.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")] for expert in range(config.num_experts)
        ]
        own["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in by_expert])
        own["mlp.experts.down_proj"] = torch.stack([down for _, _, down in by_expert])
    layer.load_state_dict(own)

    def norm(states: torch.Tensor, name: str) -> torch.Tensor:
        weight = stored[f"{name}.weight"] + (config.model_type != "qwen3_moe")  # in the others the norm's weight is what is added to 1
        return torch.nn.functional.rms_norm(states, states.shape[-1:], weight, config.rms_norm_eps)

    states, drafted = decoder(input_ids=text[:, :-1]).last_hidden_state, []
    for _ in range(depth):
        tokens = torch.cat([text[:, 1:], torch.tensor([drafted], dtype=torch.int64)], dim=-1)
        embedded = stock.get_input_embeddings()(tokens)
        inputs = torch.cat([norm(embedded, "pre_fc_norm_embedding"), norm(states, "pre_fc_norm_hidden")], dim=-1) @ stored["fc.weight"].T
        size = inputs.shape[1]
        positions = decoder.rotary_emb(inputs, torch.arange(size)[None])
        mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
        latest = norm(layer(inputs, position_embeddings=positions, attention_mask=mask), "norm")[:, -1:]
        drafted.append(int(stock.lm_head(latest)[0, -1].argmax()))
        states = torch.cat([states, latest], dim=1)
    return drafted


@pytest.mark.parametrize("name", ["qwen3_moe", "dense", "qwen3_next", "qwen3_5_moe"])
@torch.no_grad()
def test_drafts_are_those_of_the_stored_layer(name: str, checkpoints: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, stock = checkpoints(name)
    found = proposals(monkeypatch)
    ids = greedy(load(folder, max_draft=2), prompt(20))
    drafted = {length: tokens for length, tokens in found.items() if len(tokens) == 2}
    assert len(drafted) > 5
    assert drafted == {length: eager_drafts(folder, stock, ids[:, :length], 2) for length in drafted}


@pytest.mark.parametrize("name", ["three layers", "glm4_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"])
def test_layers_of_gguf_files_draft_the_same(name: str, checkpoints: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = checkpoints(name)
    files: list[Path | None] = [None, folder / "model.gguf"]
    if name in ("glm4_moe", "qwen3_5_moe_text"):  # those whose MTP layers llama.cpp's converter writes
        meta = with_written_mtp(build_meta_model(folder, weights=True))
        assert meta.weights is not None
        export = plan_export(meta.weights, meta.skeleton, read_types("F32"))
        write_export(export, tmp_path / "exported.gguf", folder, "tiny", {}, lambda nbytes: None)
        files.append(tmp_path / "exported.gguf")
    found, texts, drafted = proposals(monkeypatch), [], []
    for gguf in files:
        texts.append(greedy(load(folder, gguf), prompt(20)))
        drafted.append(dict(found))
        found.clear()
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert len(drafted[0]) > 5 and all(each == drafted[0] for each in drafted)


@pytest.mark.parametrize("name", ["three layers", "mellum"])
def test_plain_steps_between_drafts_do_not_change_them(name: str, checkpoints: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_plain_steps_change_no_draft(load(checkpoints(name)[0]), monkeypatch)


def test_a_later_call_goes_on_with_the_same_cache(checkpoints: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = load(checkpoints("deepseek_v3")[0]), proposals(monkeypatch)
    whole = greedy(model, prompt(20), max_new_tokens=60)
    expected, cache = dict(found), new_cache(model)
    found.clear()
    ids = prompt(20)
    for _ in range(4):
        ids = greedy(model, ids, max_new_tokens=15, past_key_values=cache)
    assert torch.equal(ids, whole)
    both = [length for length in found if length in expected and len(found[length]) == len(expected[length])]
    assert any(length > 60 for length in both)
    assert {length: found[length] for length in both} == {length: expected[length] for length in both}


@pytest.mark.parametrize("name", ["three layers", "mellum", "inkling_text"])
def test_a_prompt_in_chunks_is_read_whole(name: str, checkpoints: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = load(checkpoints(name)[0]), proposals(monkeypatch)
    whole, expected = greedy(model, prompt(60)), dict(found)
    found.clear()
    cache = read_ahead(model, prompt(60)[0].tolist(), None, 16)
    assert torch.equal(greedy(model, prompt(60), past_key_values=cache), whole)
    assert found == expected


def test_drafts_go_on_where_a_text_was_cut(checkpoints: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a chat does whose template changes the end of an answer. An entry or two at the cut are missing."""
    model, found = load(checkpoints("three layers")[0]), proposals(monkeypatch)
    ids, cache = prompt(40), new_cache(model)
    greedy(model, ids, past_key_values=cache)
    cache.crop(50 - cache.get_seq_length())
    other = torch.cat([greedy(model, ids)[:, :50], prompt(8)], dim=-1)
    found.clear()
    plain = greedy(model, other, past_key_values=new_cache(model))
    expected = dict(found)
    found.clear()
    assert torch.equal(greedy(model, other, past_key_values=cache), plain)
    streams = mtp_layers(model).streams[cache]
    assert all(each.get_seq_length() > 70 for each in streams.caches), "most of the text before the cut is still there"
    same = [found[length] == expected[length] for length in found if length in expected]
    assert sum(same) > 0.7 * len(same)


def test_an_interrupted_draft_leaves_nothing_to_go_on_with(checkpoints: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, stock = checkpoints("deepseek_v3")
    model = load(folder)
    cache, feed, calls = new_cache(model), mtp.MtpStreams.feed, 0

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return feed(self, *args, **kwargs)

    monkeypatch.setattr(mtp.MtpStreams, "feed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, prompt(20), past_key_values=cache)
    ids = greedy(stock, prompt(20))[:, : cache.get_seq_length() + 1]
    assert torch.equal(greedy(model, ids, past_key_values=cache), greedy(stock, ids))
    assert mtp_layers(model).streams[cache].position == cache.get_seq_length()


def test_a_cache_that_holds_a_part_of_the_prompt_is_gone_on_with(checkpoints: Folders) -> None:
    folder, stock = checkpoints("three layers")
    model = load(folder)
    cache = new_cache(model)
    model(prompt(20)[:, :12], past_key_values=cache, use_cache=True)  # tokens whose states the layers have not seen
    assert torch.equal(greedy(model, prompt(20), past_key_values=cache), greedy(stock, prompt(20)))
    assert statistics(model)["accepted_tokens"] > 0


def test_experts_of_mtp_layers_have_slots_too(checkpoints: Folders, tmp_path: Path) -> None:
    folder, stock = checkpoints("deepseek_v3")
    file = tmp_path / "rules.yaml"
    file.write_text(
        "version: 1\nrules:\n"
        "- match: {kind: experts}\n  replace: {class: hybrid_experts, kwargs: {gpu: emulated, cache: {ratio: 0.5}}}\n"
        "- match: {kind: model}\n  replace: {class: speculative_draft, kwargs: {draft: mtp, schedule: fixed}}\n"
    )
    model = optimize_and_load(folder, file, progress=False, threads=1)
    assert torch.equal(greedy(model, prompt(20)), greedy(stock, prompt(20)))
    assert 0.4 < statistics(model)["acceptance_by_position"][0] < 1
    assert any(line.startswith("3 x experts") and "3 of 6 in slots" in line for line in model.moegraft.placement())
    model.moegraft.close()


def test_the_measured_schedule_leaves_the_text_as_it_is(checkpoints: Folders) -> None:
    folder, stock = checkpoints("glm4_moe")
    model = load(folder, schedule="marginal", max_draft=4)
    for length in (5, 12):
        assert torch.equal(greedy(model, prompt(length), max_new_tokens=80), greedy(stock, prompt(length), max_new_tokens=80))


WORDS, DRAWS = 2, 400


def test_sampled_text_has_the_distribution_of_the_full_model(checkpoints: Folders) -> None:
    folder, stock = checkpoints("deepseek_v3")
    model, ids = load(folder, max_draft=1), prompt(6)
    chosen = {"do_sample": True, "top_k": WORDS, "temperature": 1.5}

    def after(text: torch.Tensor) -> torch.Tensor:
        values, tokens = (stock(text).logits[0, -1].float() / 1.5).topk(WORDS)
        return torch.zeros(stock.config.vocab_size).scatter(0, tokens, values.softmax(-1))

    expected: dict[tuple[int, ...], float] = {}
    with torch.no_grad():
        for first in after(ids).nonzero().flatten().tolist():
            text = torch.cat([ids, torch.tensor([[first]])], -1)
            for second in after(text).nonzero().flatten().tolist():
                longer = torch.cat([text, torch.tensor([[second]])], -1)
                for third in after(longer).nonzero().flatten().tolist():
                    expected[first, second, third] = float(after(ids)[first] * after(text)[second] * after(longer)[third])
    torch.manual_seed(0)
    drawn: Counter[tuple[int, ...]] = Counter()
    for _ in range(DRAWS):
        cache = DynamicCache(config=model.config)  # steps of the same place in each text are recorded in vain
        drawn[tuple(model.generate(ids, max_new_tokens=3, past_key_values=cache, **chosen)[0, ids.shape[1] :].tolist())] += 1
    assert drawn.keys() <= expected.keys()
    assert 0.05 < statistics(model)["acceptance_by_position"][0] < 0.95
    chi_square = sum((drawn[text] - DRAWS * share) ** 2 / (DRAWS * share) for text, share in expected.items())
    assert chi_square < 24.3, "8 texts: beyond the 99.9th percentile"


def test_mtp_layers_are_planned_like_the_bodys(checkpoints: Folders) -> None:
    folder, _ = checkpoints("three layers")
    without = plan(build_meta_model(folder, weights=True), "cpu-exact")
    meta = build_meta_model(folder, weights=True)
    planned = plan(meta, rules(folder))
    assert not any(swap.module.startswith("mtp.") for swap in without.swaps)
    bodies = [swap for swap in planned.swaps if re.fullmatch(r"model\.layers\.2\..*", swap.module)]
    for number in range(3):
        own = [swap for swap in planned.swaps if swap.module.startswith(f"mtp.layers.{number}.")]
        assert [(swap.operator, swap.footprint) for swap in own] == [(swap.operator, swap.footprint) for swap in bodies]
    more = planned.bytes_by_device["cpu"] - without.bytes_by_device["cpu"]
    stored = sum(
        tensor.nbytes for name, tensor in load_file(folder / "model.safetensors").items() if int((re.findall(r"\d+", name) or [0])[0]) > 2
    )
    assert 0.9 * stored < more < 2.1 * stored  # packed experts are padded
    assert plan(meta, "cpu-exact").bytes_by_device == without.bytes_by_device  # the same meta model, with other rules


def test_rules_number_mtp_layers_after_the_body(checkpoints: Folders, tmp_path: Path) -> None:
    folder, _ = checkpoints("three layers")
    file = tmp_path / "rules.yaml"
    for layers, modules in (("2-3", ["model.layers.2.mlp", "mtp.layers.0.mtp_block.mlp"]), ("1", ["model.layers.1.mlp"])):
        file.write_text(
            f"version: 1\nrules:\n- match: {{kind: experts, layers: '{layers}'}}\n  replace: {{class: hybrid_experts}}\n"
            "- match: {kind: model}\n  replace: {class: speculative_draft, kwargs: {draft: mtp}}\n"
        )
        planned = plan(build_meta_model(folder), file)
        assert [swap.module for swap in planned.swaps if swap.module] == [f"{module}.experts" for module in modules]


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("rule", ["cpu-exact", "draft"])
def test_layers_and_what_they_repeat_are_left_out_without_warnings(
    name: str, rule: str, checkpoints: Folders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repeated = {f"model.layers.3.{tensor}.weight": torch.ones(3, 4) for tensor in ("embed_tokens", "shared_head.head")}
    folder = changed(checkpoints(name)[0], tmp_path / "model", lambda tensors: tensors.update(repeated if name == "deepseek_v3" else {}))
    of_mtp = re.compile(r"mtp\.|model\.layers\.3\.(?!embed|shared_head\.head)")
    nbytes = sum(tensor.nbytes for key, tensor in load_file(folder / "model.safetensors").items() if of_mtp.match(key))
    assert build_meta_model(folder).mtp_bytes == nbytes > 0
    optimize_and_load(folder, rule if rule == "cpu-exact" else rules(tmp_path), progress=False)
    assert not [record for record in caplog.records if "nothing in the model reads" in record.message]


def changed(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    to.mkdir()
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def without(pattern: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if re.search(pattern, name)]:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without(r"layers\.3\."), r"rules\.yaml:5:.*there are none.*draft with 'experts' or 'ngram'"),
        (without(r"layers\.3\.eh_proj"), r"feeds mtp\.layers\.0\.eh_proj\.weight"),
        (without(r"layers\.3\.mlp\.experts\.2\.up_proj"), r"layers\.3\.mlp\.experts\.2\.up_proj"),
        (lambda tensors: tensors.update({"model.layers.3.enorm.weight": torch.ones(7)}), r"model\.layers\.3\.enorm\.weight: shape \(7,\)"),
    ],
    ids=["no layers", "no projection", "an expert", "a shape"],
)
def test_a_damaged_checkpoint_is_refused(change: Any, reason: str, checkpoints: Folders, tmp_path: Path) -> None:
    folder = changed(checkpoints("deepseek_v3")[0], tmp_path / "damaged", change)
    with pytest.raises(MoegraftError, match=reason):
        optimize_and_load(folder, rules(tmp_path), progress=False)


def refusal(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder / "model")
    with pytest.raises(MoegraftError) as raised:
        plan(build_meta_model(folder / "model", weights=True), rules(folder))
    return str(raised.value)


def tiny(model_type: str) -> PreTrainedModel:
    return build_model(case_of(model_type))


def test_families_and_versions_without_mtp_layers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "neither transformers nor the config of Qwen3MoeForCausalLM declares MTP layers" in refusal(tiny("qwen3_moe"), tmp_path)
    incomplete = tiny("qwen3_moe")
    incomplete.config.mtp_num_hidden_layers = 1
    assert "states MTP layers (mtp_num_hidden_layers), and the checkpoint has none" in refusal(incomplete, tmp_path)
    assert "without `mtp_layer_types` is ambiguous" in refusal(tiny("bailing_hybrid"), tmp_path)
    assert "neither transformers nor the config of MiMoV2FlashForCausalLM" in refusal(tiny("mimo_v2_flash"), tmp_path)
    with pytest.raises(MoegraftError, match="a model in memory has lost them"):
        plan(tiny("deepseek_v3"), rules(tmp_path))
    monkeypatch.delattr(transformers.modeling_layers.MtpModel, "forward_layer")
    assert "install 5.23 or newer" in refusal(tiny("deepseek_v3"), tmp_path)


def test_a_sparsity_of_drafts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MoegraftError, match="draft mtp runs none of the model's own experts"):
        plan(tiny("deepseek_v3"), rules(tmp_path, draft_sparsity=0.5))
