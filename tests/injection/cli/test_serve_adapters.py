"""A server whose model has adapters: the request's `model` chooses, one adapter computes at a time, and none shares keys and values."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.serving import Server, ask, messages, one_by_one, openai, serving, until
from transformers import Qwen3MoeForCausalLM
from typer.testing import CliRunner

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.moegraft import app
from moegraft.injection.cli.options import OptionsError
from moegraft.injection.cli.serve.service import Limits, Service

pytest.importorskip("peft", reason="PEFT is not installed (the extra `train`)")

from peft import LoraConfig, PeftModel, get_peft_model

from moegraft.injection.cli.serve.prefix_files import PART_TOKENS
from moegraft.injection.lora import Adapters

NAMES = ("poems", "org/code-1.5")
TEXT = "a question with some length, that fills more than a page"


@pytest.fixture(scope="module")
def folders(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for seed, name in enumerate(NAMES):
        stock = Qwen3MoeForCausalLM.from_pretrained(chat_folder)
        model = get_peft_model(stock, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"))
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, 0, 1.0, generator=generator)
        found[name] = str(tmp_path_factory.mktemp("adapter"))
        model.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def several(chat_folder: Path, folders: dict[str, str], stock: LoadedModel) -> LoadedModel:
    model = optimize_and_load(chat_folder, "cpu-exact", dtype=torch.float32, progress=False, threads=1)
    return LoadedModel("tiny", model, stock.tokenizer, lambda: ["2 x experts"], adapters=Adapters(model, folders))


@pytest.fixture(scope="module")
def server(several: LoadedModel) -> Iterator[Server]:
    with serving(several, Limits(prefill_chunk=20), names=("tiny",)) as found:
        yield found


@pytest.fixture(scope="module")
def expected(chat_folder: Path, folders: dict[str, str], server: Server) -> dict[str, str]:
    """The greedy answers of stock models with stock PEFT, by the name of the adapter."""
    found = {}
    tokenizer = server.service.loaded.tokenizer
    prompt = tokenizer.apply_chat_template(messages(TEXT), return_tensors="pt", add_generation_prompt=True, return_dict=True)
    for name in ("tiny", *NAMES):
        model: Any = Qwen3MoeForCausalLM.from_pretrained(chat_folder)
        if name in folders:
            model = PeftModel.from_pretrained(model, folders[name])
        out = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        found[name] = str(tokenizer.decode(out, skip_special_tokens=True))
    assert len(set(found.values())) == 3
    return found


def test_the_name_of_the_model_chooses_the_adapter(server: Server, expected: dict[str, str]) -> None:
    for name in (*NAMES, "tiny", *NAMES, "tiny"):
        reply = ask(server, TEXT, model=name)
        assert (reply.choices[0].message.content, reply.model) == (expected[name], name)
        text = server.client().completions.create(model=name, prompt="once", max_tokens=4, temperature=0, stream=True)
        assert {chunk.model for chunk in text} == {name}
    with pytest.raises(openai.NotFoundError, match=r"unknown model 'other'; this server has 'tiny' and 'poems' and 'org/code-1\.5'"):
        ask(server, TEXT, model="other")


def test_models_are_listed_with_their_adapters(server: Server) -> None:
    entries = json.loads(server.get("/v1/models"))["data"]
    assert [(entry["id"], entry.get("parent")) for entry in entries] == [("tiny", None), *((name, "tiny") for name in NAMES)]
    assert json.loads(server.get("/v1/models/org/code-1.5"))["parent"] == "tiny"


def test_adapters_share_no_prefix(server: Server, expected: dict[str, str]) -> None:
    """One prompt again and again: the second time with each name, its tokens come from that name's own first time."""
    server.service.engine._decoder._pool.drop_prefixes()  # type: ignore[attr-defined] # what other tests have left
    for cached in (False, True):
        for name in ("tiny", *NAMES):
            reply = ask(server, TEXT, model=name)
            assert reply.choices[0].message.content == expected[name]
            assert bool(reply.usage.prompt_tokens_details.cached_tokens) == cached, name


def test_prefixes_on_disk_are_those_of_the_adapter(chat_folder: Path, folders: dict[str, str], stock: LoadedModel, tmp_path: Path) -> None:
    """An adapter with other weights or another scale is another one, whatever its name."""
    first, second = (folders[name] for name in NAMES)
    scaled = Path(shutil.copytree(first, tmp_path / "scaled"))
    config = json.loads((scaled / "adapter_config.json").read_text())
    (scaled / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))
    limits = Limits(prefix_cache_dir=tmp_path / "prefixes", prefill_chunk=PART_TOKENS)
    for folder, name, known in (
        (first, "poems", False),
        (first, "tiny", False),
        (second, "poems", False),
        (str(scaled), "poems", False),
        (first, "poems", True),
    ):
        model = optimize_and_load(chat_folder, "cpu-exact", dtype=torch.float32, progress=False, threads=1)
        loaded = LoadedModel("tiny", model, stock.tokenizer, lambda: [], adapters=Adapters(model, {"poems": folder}))
        with serving(loaded, limits, names=("tiny",)) as server:
            cached = ask(server, 4 * TEXT, model=name).usage.prompt_tokens_details.cached_tokens
            assert bool(cached) == known, (folder, name)


@pytest.mark.parametrize("together", [True, False], ids=["batches", "one at a time"])
def test_requests_of_several_adapters_at_once(
    together: bool, several: LoadedModel, chat_folder: Path, folders: dict[str, str], expected: dict[str, str]
) -> None:
    """Each step computes sequences of one adapter, each answer is that adapter's, and none waits for ever."""
    loaded = several
    if not together:
        stock = one_by_one(LoadedModel("tiny", Qwen3MoeForCausalLM.from_pretrained(chat_folder).eval(), several.tokenizer, lambda: []))
        model = optimize_and_load(stock.model, "cpu-exact", progress=False, threads=1)
        loaded = LoadedModel("tiny", model, several.tokenizer, lambda: [], adapters=Adapters(model, folders))
    with serving(loaded, Limits(prefill_chunk=8, max_client=64), names=("tiny",)) as server:
        assert bool(server.service.alone_because) != together
        engine = server.service.engine
        seen: list[tuple[set[str | None], int]] = []
        step = engine._decoder.step

        def watched() -> None:
            seen.append(({job.adapter for job in engine._decoder.jobs}, len(engine._decoder.jobs)))
            step()

        engine._decoder.step = watched  # type: ignore[method-assign]
        wanted = [name for _ in range(5) for name in ("tiny", *NAMES)]
        with ThreadPoolExecutor(len(wanted)) as pool:
            replies = list(pool.map(lambda name: ask(server, TEXT, model=name), wanted))
        assert [reply.choices[0].message.content for reply in replies] == [expected[name] for name in wanted]
        assert all(len(adapters) == 1 for adapters, _ in seen)
        assert not together or max(size for _, size in seen) > 1


def test_another_adapter_waits_for_no_more_than_the_running_answers(several: LoadedModel, expected: dict[str, str]) -> None:
    """While one client keeps sending requests for one adapter, that of another client is not overtaken by those that come after it."""
    with serving(several, names=("tiny",)) as server:
        engine = server.service.engine
        order: list[str | None] = []
        admit = engine._decoder.admit

        def noted(job: Any) -> None:
            order.append(job.adapter)
            admit(job)

        engine._decoder.admit = noted  # type: ignore[method-assign]
        hook = several.model.register_forward_pre_hook(lambda *given: threading.Event().wait(0.01))
        with ThreadPoolExecutor(8) as pool:
            poem = partial(ask, server, TEXT, model=NAMES[0])
            first = pool.submit(poem)
            until(lambda: engine.running == 1)
            other = pool.submit(partial(ask, server, TEXT, model=NAMES[1]))
            until(lambda: engine.waiting == 1)
            later = [pool.submit(poem) for _ in range(4)]
            assert {each.result().choices[0].message.content for each in (first, *later)} == {expected[NAMES[0]]}
            assert other.result().choices[0].message.content == expected[NAMES[1]]
        hook.remove()
        assert order == [NAMES[0], NAMES[1], *[NAMES[0]] * 4]


def test_an_adapter_has_a_name_of_its_own(several: LoadedModel) -> None:
    with pytest.raises(OptionsError, match="--adapter poems: the model itself has this name"):
        Service(several, Limits(), ("tiny", "poems"))
    for given, message in (("poems", "give NAME=FOLDER"), ("=x", "give NAME=FOLDER"), ("a=x --adapter a=y", "is given twice")):
        done = CliRunner().invoke(app, ["serve", "--adapter", *given.split()])
        assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1
