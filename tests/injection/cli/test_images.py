"""Images in prompts, beside `generate` of the stock model: in the server's batches, one answer at a time, and in local_chat."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import logging
import os
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, PreTrainedModel
from transformers.utils import import_utils, requires_backends

pytest.importorskip("anthropic", reason="an extra for tests: pip install 'moegraft[test]'")
pytest.importorskip("openai", reason="an extra for tests: pip install 'moegraft[test]'")
pytest.importorskip("pydantic", reason="an extra for tests: pip install 'moegraft[test]'")
pytest.importorskip("PIL", reason="an extra for tests: pip install 'moegraft[test]'")

import anthropic
import openai
from PIL import Image
from support import with_long
from support.browser import browsing, find_chromium
from support.programs import Program
from support.serving import PATIENCE_S, Server, ask, call, serving, until
from support.vision import CASES, VisionCase, as_file, as_url, load_vision_model, picture, save_vision_model

from moegraft.injection import optimize_and_load
from moegraft.injection.checkpoint.quantised import quantisation_of
from moegraft.injection.cli import images as product
from moegraft.injection.cli.chat.conversation import PromptRefusedError, TemplatedChat
from moegraft.injection.cli.images import ImageError, decode_picture, read_image_reader, read_picture, read_url
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.options import SamplingOptions
from moegraft.injection.cli.serve import engine, open_pool
from moegraft.injection.cli.serve.scheduler import Scheduler
from moegraft.injection.cli.serve.service import Limits
from moegraft.injection.meta_model import find_model

A, B = picture(0), picture(1, 190, 100)
TOKENS = 12


def shown(*parts: str | Image.Image) -> dict[str, Any]:
    """A message with texts and images."""
    content: list[dict[str, Any]] = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": {"url": as_url(as_file(part))}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def text_message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


LONG = "so many words " * 24  # a prompt with checkpoints of recurrent states
CHATS: Mapping[str, list[dict[str, Any]]] = {
    "one image": [shown(A, "what?")],
    "another image": [shown(B, "what?")],
    "an image in the middle": [shown("see", A, "what?")],
    "two images": [shown(A, "and", B, "differ?")],
    "text": [text_message("user", "hello there")],
    "an image in an earlier turn": [shown(A, "what?"), text_message("assistant", "abc"), text_message("user", "and now?")],
    "another turn with an image": [shown(A, "what?"), text_message("assistant", "abc"), shown("see", B)],
    "long texts around": [shown(LONG, A, LONG), text_message("assistant", "abc"), text_message("user", "and now?")],
}


def anthropic_client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0, timeout=PATIENCE_S, http_client=server.http)


class Pair:
    """An injected model with its processor, and the stock model."""

    def __init__(self, case: VisionCase, folder: Path) -> None:
        save_vision_model(case, folder)
        self.folder = folder
        self.loaded = load_vision_model(folder)
        self.stock: PreTrainedModel = case.stock_class.from_pretrained(folder).train(False)
        self._answers: dict[str, str] = {}

    def inputs(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """The inputs of a chat as transformers documents them: the template's text and the images, by the model's processor."""
        reader: Any = self.loaded.images
        assert not isinstance(reader, str), reader
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        plain = [
            message
            if isinstance(message["content"], str)
            else {**message, "content": [{"type": "image"} if part["type"] == "image_url" else part for part in message["content"]]}
            for message in messages
        ]
        text = self.loaded.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        given = {"images": [read_url(url, None).image for url in urls]} if urls else {}
        made: dict[str, torch.Tensor] = dict(reader._processor(text=[text], **given, return_tensors="pt"))
        return {name: tensor.to(self.stock.dtype) if tensor.dtype == torch.bfloat16 else tensor for name, tensor in made.items()}

    def answer(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The stock model's greedy answer, computed once for each chat."""
        asked = json.dumps(messages)
        if asked not in self._answers:
            self._answers[asked] = self._answer(messages)
        return self._answers[asked]

    def _answer(self, messages: Sequence[Mapping[str, Any]]) -> str:
        for module in self.stock.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None  # type: ignore[assignment]
        inputs = self.inputs(messages)
        made: Any = self.stock.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
        return str(self.loaded.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if CASES[name].torchvision and importlib.util.find_spec("torchvision") is None:
            pytest.skip("its processor of images needs torchvision")
        if name not in made:
            made[name] = Pair(CASES[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="module")
def pair(pair_of: Callable[[str], Pair]) -> Pair:
    return pair_of("qwen3_vl_moe")


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[Server]:
    with serving(pair.loaded, Limits(max_tokens=20)) as found:
        yield found


def answers(server: Server, messages: Any, **options: Any) -> Any:
    return ask(server, **{"messages": messages, "max_tokens": TOKENS, **options})


def text_of(server: Server, messages: Any, **options: Any) -> str:
    return str(answers(server, messages, **options).choices[0].message.content)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_stock_model(pair_of: Callable[[str], Pair], name: str) -> None:
    pair = pair_of(name)
    inputs = pair.inputs(CHATS["two images"])
    options = {"do_sample": False, "max_new_tokens": TOKENS, "return_dict_in_generate": True, "output_logits": True}
    expected: Any = pair.stock.generate(**inputs, **options)
    with product.without_position_state(pair.loaded.model):  # which `generate` with images leaves to the next call
        found: Any = pair.loaded.model.generate(**inputs, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    without: Any = pair.stock.generate(**pair.inputs(CHATS["text"]), **options)
    assert not torch.allclose(without.logits[0], expected.logits[0], atol=0.1)  # the images matter


@pytest.mark.parametrize("name", with_long(CASES, "qwen3_vl_moe", "qwen3_5_moe", "dots3_note", "ernie4_5_vl_moe", "gemma4"))
def test_answers_are_those_of_the_stock_model(pair_of: Callable[[str], Pair], name: str) -> None:
    """One after the other, of which some begin as earlier ones, and all at once, each twice."""
    pair = pair_of(name)
    expected = {about: pair.answer(messages) for about, messages in CHATS.items()}
    assert len(set(expected.values())) > 4
    with serving(pair.loaded, Limits(max_tokens=20)) as server:
        assert {about: text_of(server, messages) for about, messages in CHATS.items()} == expected
        with ThreadPoolExecutor(8) as pool:
            abouts = [*CHATS, *CHATS]
            assert list(pool.map(lambda about: text_of(server, CHATS[about]), abouts)) == [expected[about] for about in abouts]
        alone = name in ("qwen4_exp", "glm5_next", "dots3_note", "llama4")
        assert (server.service.alone_because is not None) == alone, server.service.alone_because


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_one_at_a_time_nothing_is_left_for_the_next_request(
    pair_of: Callable[[str], Pair], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stock model keeps by how much images shift positions: a text that goes on from a cache must not get that."""
    pair = pair_of(name)
    monkeypatch.setattr(pair.loaded.model.generation_config, "repetition_penalty", 1.0001)  # which changes no answer
    text = [text_message("user", LONG), text_message("assistant", "abc"), text_message("user", "and now?")]
    order = [CHATS["one image"], CHATS["an image in an earlier turn"], text[:1], CHATS["two images"], text[:1], text, *CHATS.values()]
    with serving(pair.loaded, Limits(max_tokens=20, prefill_chunk=64)) as server:
        assert server.service.alone_because
        for messages in order:
            assert text_of(server, messages) == pair.answer(messages)
        cached = answers(server, CHATS["one image"]), answers(server, CHATS["an image in an earlier turn"])
        if name == "qwen3_vl_moe":
            assert cached[1].usage.prompt_tokens_details.cached_tokens >= cached[0].usage.prompt_tokens - 1
        kept = [module.rope_deltas for module in pair.loaded.model.modules() if hasattr(module, "rope_deltas")]
        assert kept and not any(deltas is not None and bool(deltas.any()) for deltas in kept)


def test_marks_of_images_in_texts_are_computed_as_text(pair_of: Callable[[str], Pair]) -> None:
    """The experts of images compute the marks around one as well, and a text's marks are not those of an image before it."""
    pair = pair_of("ernie4_5_vl_moe")
    with serving(pair.loaded, Limits(max_tokens=20)) as server:
        answers(server, [shown("see", A, "what?")])
        reply = answers(server, [text_message("user", "see<|IMAGE_START|> what?")])
        before = TemplatedChat(pair.loaded.tokenizer, [text_message("user", "see")]).prompt().token_ids.index(0)  # up to <end>
        assert reply.usage.prompt_tokens_details.cached_tokens == before


def test_the_prefix_cache_is_that_of_the_image(server: Server, pair: Pair) -> None:
    def cached(messages: Any) -> int:
        reply = answers(server, messages)
        assert reply.choices[0].message.content == pair.answer(messages)
        return int(reply.usage.prompt_tokens_details.cached_tokens)

    first, other = shown("a question about", picture(7), "what?"), shown("a question about", picture(8), "what?")
    end = len(pair.inputs([first])["input_ids"][0])
    cached([first])
    before = TemplatedChat(pair.loaded.tokenizer, [text_message("user", "a question about")]).prompt().token_ids.index(0)  # up to <end>
    assert cached([other]) == before + 1  # and the mark before the image
    assert cached([first]) == end - 1
    assert cached([first, text_message("assistant", "abc"), text_message("user", "and now?")]) >= end - 1
    grown = [first, text_message("assistant", "abc"), shown("see", picture(9))]
    assert cached(grown) == before + 1  # a later image: all are placed again
    assert cached(grown) == len(pair.inputs(grown)["input_ids"][0]) - 1


def test_prefixes_on_disk_are_those_of_the_image(pair: Pair, tmp_path: Path) -> None:
    """After a restart, and beyond the image: the positions of what follows are shifted."""
    first, other = (shown(LONG, picture(number), LONG) for number in (7, 8))
    cached = []
    for messages in ([first], [other], [first, text_message("assistant", "abc"), text_message("user", "and now?")]):
        with serving(pair.loaded, Limits(max_tokens=20, prefix_cache_dir=tmp_path)) as server:
            reply = answers(server, messages)
            assert reply.choices[0].message.content == pair.answer(messages)
            cached.append(reply.usage.prompt_tokens_details.cached_tokens)
    images = pair.inputs([first])["input_ids"][0].tolist()
    last = max(place for place, token in enumerate(images) if token == pair.loaded.model.config.image_token_id)
    assert cached[0] == 0 and cached[1] < last < cached[2]


IMAGES = "document.querySelectorAll('#images img').length"


@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium here (Debian's package chromium brings one)")
def test_the_chat_page_sends_images(server: Server, pair: Pair, loaded: LoadedModel) -> None:
    """Chosen, pasted or dropped; what is no image is not sent, and a page of a model without images offers none."""
    bytes_of = [list(as_file(each)) for each in (A, B)]
    files = f"[...{bytes_of}.map((bytes, place) => new File([new Uint8Array(bytes)], `${{place}}.png`, {{type: 'image/png'}}))"
    files += ", new File(['x'], 'x.txt', {type: 'text/plain'})]"
    give = f"(() => {{ const given = new DataTransfer(); {files}.forEach(file => given.items.add(file)); return given; }})()"
    questions = "document.querySelectorAll('.said.user')"
    with browsing(find_chromium() or "") as tab:
        tab.open(f"{server.address}/")
        tab.until("!document.getElementById('attach').hidden")
        chosen = "const files = document.getElementById('files'); files.files = given.files; files.dispatchEvent(new Event('change'));"
        pasted = "document.getElementById('text').dispatchEvent(new ClipboardEvent('paste', {clipboardData: given, cancelable: true}));"
        dropped = "document.dispatchEvent(new DragEvent('drop', {dataTransfer: given, cancelable: true}));"
        for count, way in enumerate((chosen, pasted, dropped), 1):
            tab.value(f"(given => {{ {way} }})({give})")
            tab.until(f"{IMAGES} === {2 * count}")
        for left in (5, 4, 3, 2):  # the first ones are removed
            tab.value("document.querySelector('#images button').click()")
            assert tab.value(IMAGES) == left
        tab.value("document.getElementById('text').focus()")
        tab.type("what?")
        tab.press("Enter")
        expected = len(pair.inputs([shown(A, B, "what?")])["input_ids"][0])
        tab.until(f"[...document.querySelectorAll('.about')].some(line => line.textContent.startsWith('{expected} tokens read'))")
        assert tab.value(f"{questions}[0].querySelectorAll('img').length") == 2 and tab.value(IMAGES) == 0
        tab.open(f"{server.address}/health")
        tab.open(f"{server.address}/")  # the chat was kept
        tab.until(f"{questions}.length === 1 && {questions}[0].querySelectorAll('img').length === 2")
        assert tab.value(f"[...{questions}[0].querySelectorAll('img')].every(image => image.complete && image.naturalWidth > 0)")
        tab.value("[...document.querySelectorAll('.acts button')].find(one => one.textContent === 'Edit').click()")
        assert tab.value(IMAGES) == 2 and tab.value("document.getElementById('text').value") == "what?"
        assert tab.errors == []
        with serving(loaded) as texts:
            tab.open(f"{texts.address}/")
            tab.until("document.getElementById('model').textContent === 'tiny'")
            assert tab.value("document.getElementById('attach').hidden")
            tab.value(f"(given => {{ {dropped} }})({give})")
            assert tab.value(IMAGES) == 0


def test_batch_invariant_answers(pair: Pair) -> None:
    with serving(pair.loaded, Limits(max_tokens=20, batch_invariant=True, prefill_chunk=16)) as server:
        for messages in [*CHATS.values(), *CHATS.values()]:
            assert text_of(server, messages) == pair.answer(messages)


def test_drafted_answers(pair: Pair, tmp_path: Path) -> None:
    """Drafts of the model itself are verified by the model with the images."""
    rules = tmp_path / "drafts.yaml"
    options = "draft: experts, draft_top_k: 1, max_draft: 3, schedule: fixed"
    replacing = f"- match: {{kind: model}}\n  replace: {{class: speculative_draft, kwargs: {{{options}}}}}\n"
    rules.write_text(f"version: 1\nextends: cpu-exact\nrules:\n{replacing}")
    loaded = load_vision_model(pair.folder, str(rules))
    with serving(loaded, Limits(max_tokens=20)) as server:
        for messages in CHATS.values():
            assert text_of(server, messages) == pair.answer(messages)


def test_a_stream_is_the_answer(server: Server) -> None:
    stream = answers(server, CHATS["two images"], stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == text_of(server, CHATS["two images"])


def test_responses_and_messages_have_images_as_well(server: Server) -> None:
    expected = text_of(server, CHATS["two images"])
    one, other = as_file(A), as_file(B)
    texts = {"type": "input_text", "text": "and"}, {"type": "input_text", "text": "differ?"}
    pictures = [{"type": "input_image", "detail": "auto", "image_url": as_url(data)} for data in (one, other)]
    items: Any = [{"role": "user", "content": [pictures[0], texts[0], pictures[1], texts[1]]}]
    reply: Any = server.client().responses.create(model=server.service.model_id, input=items, max_output_tokens=TOKENS, temperature=0)
    assert reply.output_text == expected
    counted: Any = server.client().responses.input_tokens.count(model=server.service.model_id, input=items)
    assert counted.input_tokens == reply.usage.input_tokens

    def block(data: bytes) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}}

    content: Any = [block(one), {"type": "text", "text": "and"}, block(other), {"type": "text", "text": "differ?"}]
    client = anthropic_client(server)
    given: Any = {"model": server.service.model_id, "messages": [{"role": "user", "content": content}]}
    message: Any = client.messages.create(**given, max_tokens=TOKENS, extra_body={"temperature": 0})
    assert message.content[0].text == expected
    assert client.messages.count_tokens(**given).input_tokens == reply.usage.input_tokens
    with client.messages.stream(**given, max_tokens=TOKENS, extra_body={"temperature": 0}) as stream:
        assert stream.get_final_text() == expected


def test_tools_may_return_images(server: Server, pair: Pair) -> None:
    called = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    data = base64.b64encode(as_file(A)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
    turns: Any = [text_message("user", "look"), {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    count = anthropic_client(server).messages.count_tokens(model=server.service.model_id, messages=turns)
    assert count.input_tokens > 12


def _png(width: int, height: int) -> bytes:
    """The beginning of a PNG of a size, with pixels of no content."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


GOOD = as_file(A)
BAD: Mapping[str, tuple[str, str]] = {
    "truncated": (as_url(GOOD[: len(GOOD) // 2]), "damaged"),
    "truncated in its header": (as_url(GOOD[:20]), "not an image|damaged"),
    "no image": (as_url(b"<svg></svg>"), "not an image"),
    "another format": (as_url(as_file(A, "BMP")), "not an image"),
    "empty": (as_url(b""), "not an image"),
    "a bomb": (as_url(_png(60_000, 60_000)), "pixels"),
    "too large": (as_url(_png(9_000, 9_000)), "9000 x 9000 pixels"),
    "without pixels": (as_url(_png(40, 40)), "damaged"),
    "no base64": ("data:image/png;base64,a*b", "not base64"),
    "a data URL of text": ("data:image/png,abc", "base64,CONTENT"),
    "too thin": (as_url(as_file(Image.new("RGB", (4000, 2)))), "processor refuses"),
    "another machine's": ("https://example.org/a.png", "not fetched"),
    "another machine's, without a cipher": ("http://127.0.0.1:1/a.png", "not fetched"),
    "a file": ("file:///etc/hostname", "reads no files"),
    "no URL": ("a.png", "data URL is expected"),
}


@pytest.mark.parametrize("about", BAD)
def test_bad_images_are_refused_and_hurt_nobody(server: Server, about: str) -> None:
    url, reason = BAD[about]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(text_of, server, CHATS["text"])
        with pytest.raises(openai.BadRequestError, match=reason) as refused:
            answers(server, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
        assert refused.value.param == "messages"
        assert other.result() == text_of(server, CHATS["text"])


def test_more_images_than_context(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        answers(server, [shown(*[picture(seed, 400, 400) for seed in range(60)])])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="at most 64"):
        answers(server, [shown(*[A] * 65)])
    with pytest.raises(openai.BadRequestError, match="other images of the prompt have a part"):
        answers(server, [shown(A, *[Image.new("L", (5000, 5000))] * 3)])


def test_images_of_running_and_waiting_requests_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a processor makes of images takes a thousand times as much memory as a small file."""
    step, going = Scheduler.step, threading.Event()
    monkeypatch.setattr(Scheduler, "step", lambda self: going.wait(PATIENCE_S) and step(self))
    monkeypatch.setattr(engine, "MOST_PREPARED_BYTES", 1000)
    with serving(pair.loaded, Limits(max_tokens=20)) as server, ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(answers, server, CHATS["one image"], n=2)
            until(lambda: server.service.engine.running == 2)
            with pytest.raises(openai.RateLimitError, match="images of other requests"):
                answers(server, CHATS["another image"])
            text = pool.submit(text_of, server, CHATS["text"])
            until(lambda: server.service.engine.waiting == 1)
        finally:
            going.set()
        assert [choice.message.content for choice in first.result().choices] == 2 * [pair.answer(CHATS["one image"])]
        assert text.result() == pair.answer(CHATS["text"])
        assert text_of(server, CHATS["another image"]) == pair.answer(CHATS["another image"])


def test_marks_of_images_in_texts(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=r"2 marks .* for 1 images"):
        answers(server, [shown(A, "and <|image_pad|>")])
    assert text_of(server, [text_message("user", "a text with <|image_pad|>")])


def test_a_long_conversation_loses_its_oldest_images(server: Server, pair: Pair) -> None:
    old = [shown(*[picture(seed, 400, 400) for seed in range(30)]), text_message("assistant", "abc")]
    items: Any = [
        {
            "role": message["role"],
            "content": [
                {"type": "input_image", "image_url": part["image_url"]["url"]}
                if part["type"] == "image_url"
                else {"type": "input_text", "text": part["text"]}
                for part in message["content"]
            ]
            if isinstance(message["content"], list)
            else message["content"],
        }
        for message in [*old, *old, *CHATS["one image"]]
    ]
    reply: Any = server.client().responses.create(
        model=server.service.model_id, input=items, max_output_tokens=TOKENS, temperature=0, truncation="auto"
    )
    assert reply.output_text == pair.answer([*old, *CHATS["one image"]])


def test_parts_that_speak_are_left_out(
    pair_of: Callable[[str], Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Qwen3-Omni's checkpoint the thinker is loaded, with the dtype and the quantisation of the whole."""
    folder = pair_of("qwen3_omni_moe_thinker").folder
    monkeypatch.setattr(logging.getLogger("moegraft"), "propagate", True)
    caplog.clear()  # of what the pair has logged
    with caplog.at_level(logging.WARNING):
        model = optimize_and_load(folder, "cpu-exact", progress=False, threads=1)
    assert type(model).__name__ == "Qwen3OmniMoeThinkerForConditionalGeneration"
    (line,) = [record.message for record in caplog.records if "left out" in record.message or "nothing in the model" in record.message]
    assert line.endswith("only Qwen3OmniMoeThinkerForConditionalGeneration is loaded, which writes text; left out are talker, code2wav")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3_omni_moe"
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "quantization_config": settings}))
    found = find_model(tmp_path, weights=False).config
    assert found.model_type == "qwen3_omni_moe_thinker" and found.dtype == torch.bfloat16
    assert quantisation_of(found) == settings


def test_files_of_one_folder(pair: Pair, tmp_path: Path) -> None:
    folder, outside = tmp_path / "pictures and more", tmp_path / "outside.png"
    folder.mkdir()
    outside.write_bytes(GOOD)
    (folder / "a.png").write_bytes(GOOD)
    (folder / "link.png").symlink_to(outside)
    os.mkfifo(folder / "pipe.png")

    def sent(path: Path | str) -> Any:
        url = path if isinstance(path, str) else path.as_uri()
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]}]

    with serving(pair.loaded, Limits(max_tokens=20, image_folder=folder)) as server:
        assert text_of(server, sent(folder / "a.png")) == pair.answer(CHATS["one image"])
        hidden = [outside, folder / "link.png", folder / "missing.png", f"{folder.as_uri()}/../outside.png", "file://elsewhere/a.png"]
        hidden.append("file://[a/a.png")  # no URL
        for path in hidden:
            with pytest.raises(openai.BadRequestError, match="no such file in the folder"):
                answers(server, sent(path))
        for path in (folder, folder / "pipe.png"):
            with pytest.raises(openai.BadRequestError, match="not a file"):
                answers(server, sent(path))


def test_a_model_without_vision(loaded: LoadedModel) -> None:
    with serving(loaded) as server:
        with pytest.raises(openai.BadRequestError, match="reads text, and no images"):
            answers(server, CHATS["one image"])
        status, _, body = call(server, "POST", "/v1/messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]})
        assert status == 400 and "document input is not supported" in body["error"]["message"]
        assert answers(server, [text_message("user", "hello")]).choices[0].message.content
        assert server.service.max_body == 1 << 20


def test_packages_that_images_need(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        found = read_image_reader(pair.folder, pair.loaded.model, pair.loaded.tokenizer)
        assert isinstance(found, str)
        return found

    def without_torchvision(*args: Any, **kwargs: Any) -> None:
        requires_backends(AutoImageProcessor, ["absent"])

    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "PIL", None)
        assert "need Pillow, which is not installed" in reason()
    missing = (
        lambda: False,
        "\n{0} requires the Absent library but it was not found. Check out the instructions on the\n",
    )
    monkeypatch.setitem(import_utils.BACKENDS_MAPPING, "absent", missing)
    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", without_torchvision)
    assert reason().endswith("(AutoImageProcessor requires the Absent library but it was not found)")


def test_bodies_with_images_may_be_large(server: Server) -> None:
    noise = Image.frombytes("RGB", (1000, 700), os.urandom(3 * 1000 * 700))  # 2 MB, which no format makes smaller
    assert text_of(server, [shown(noise, "what?")])
    assert server.service.max_body == 1 << 24


def test_tokens_of_an_image_see_later_ones(pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only where the logits of the first image show by how much they differ without: in bfloat16 they may, by rounding."""
    pair = pair_of("gemma4")
    monkeypatch.setattr(open_pool, "_tolerance", lambda model, pool: 0.5)
    with serving(pair.loaded, Limits(max_tokens=20)) as server:
        assert {about: text_of(server, messages) for about, messages in CHATS.items()} == {
            about: pair.answer(messages) for about, messages in CHATS.items()
        }


def test_images_whose_tokens_see_later_ones_are_not_read_from_codes(
    pair_of: Callable[[str], Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair, rules = pair_of("gemma4"), tmp_path / "codes.yaml"
    replacing = "- match: {kind: model}\n  replace: {class: quantized_kv_cache, kwargs: {backend: native}}\n"
    rules.write_text(f"version: 1\nextends: cpu-exact\nrules:\n{replacing}")
    loaded, inputs = load_vision_model(pair.folder, str(rules)), pair.inputs(CHATS["two images"])
    found: Any = loaded.model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
    assert loaded.tokenizer.decode(found[0, inputs["input_ids"].shape[1] :]) == pair.answer(CHATS["two images"])
    assert "the cache is not quantised: tokens of an image attend to later ones" in caplog.text
    with serving(loaded, Limits(max_tokens=20)) as server, pytest.raises(openai.BadRequestError, match="not computed over codes"):
        answers(server, CHATS["two images"])


def test_a_batch_that_computes_images_otherwise_refuses_them(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = product.ImageInputs.arguments

    def elsewhere(self: Any, begin: int, end: int) -> dict[str, torch.Tensor]:
        found = arguments(self, begin, end)
        return {**found, "position_ids": found["position_ids"] + (end < len(self.token_ids))}

    with monkeypatch.context() as patched:
        patched.setattr(product.ImageInputs, "arguments", elsewhere)
        server = serving(pair.loaded, Limits(max_tokens=20))
        with server as found:
            with pytest.raises(openai.BadRequestError, match="cannot be computed beside others"):
                answers(found, CHATS["one image"])
            assert text_of(found, CHATS["text"]) == pair.answer(CHATS["text"])


def test_pictures_are_turned_and_without_transparency(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    path = tmp_path / "turned.jpg"
    A.save(path, exif=exif)
    assert read_picture(path).image.size == (100, 130)
    glass = decode_picture(as_file(Image.new("RGBA", (8, 8), (10, 20, 30, 0))))
    assert glass.image.mode == "RGB"
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue")]
    frames[0].save(path.with_suffix(".gif"), save_all=True, append_images=frames[1:])
    assert read_picture(path.with_suffix(".gif")).image.getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(ImageError, match=r"missing.png: .*No such file"):
        read_picture(tmp_path / "missing.png")


def _colour(image: Image.Image, place: tuple[int, int] = (0, 0), **options: Any) -> Any:
    """The colour of a place in an image that was saved as PNG and read again."""
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return decode_picture(file.getvalue()).image.getpixel(place)


def test_what_is_transparent_is_white() -> None:
    black = (0, 0, 0)
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([255, 0, 0, *black])
    assert _colour(Image.new("RGBA", (8, 8), (*black, 0))) == (255, 255, 255)
    assert _colour(Image.new("RGBA", (8, 8), (*black, 128))) == (127, 127, 127)
    assert _colour(Image.new("LA", (8, 8), (0, 0))) == (255, 255, 255)
    assert _colour(palette) == black
    assert _colour(palette, transparency=1) == (255, 255, 255)
    assert _colour(palette, transparency=b"\xff\x00") == (255, 255, 255)
    assert _colour(Image.new("RGB", (8, 8)), transparency=black) == (255, 255, 255)


def test_grey_of_16_bits() -> None:
    grey = Image.fromarray(np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(8, 0))
    assert [_colour(grey, (x, 0))[0] for x in (0, 1, 100, 255)] == [0, 1, 100, 255]
    assert _colour(grey, (100, 0), transparency=65535) == (100, 100, 100)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_exif_data_that_cannot_be_read_change_nothing(form: str) -> None:
    file = io.BytesIO()
    A.save(file, form, exif=b"Exif\x00\x00neither of both")
    assert decode_picture(file.getvalue()).image.size == A.size


def _chat(pair: Pair) -> Any:
    from moegraft.injection.cli.chat.answer import Answerer
    from moegraft.injection.cli.chat.conversation import Conversation
    from moegraft.injection.cli.chat.session import Chat
    from moegraft.injection.cli.output import open_terminal

    sampling = SamplingOptions(temperature=0.0, max_new_tokens=TOKENS)
    conversation = Conversation(pair.loaded.tokenizer, pair.loaded.context_tokens, None, pair.loaded.images)
    return Chat(pair.loaded, Answerer(pair.loaded, sampling), conversation, open_terminal(quiet=True))


def test_a_chat_about_images(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from moegraft.injection.cli.chat.session import run_command

    chat, path = _chat(pair), tmp_path / "a.png"
    path.write_bytes(GOOD)
    run_command(chat, f"/image {path}")
    first = chat.turn("what?")
    assert first.text == pair.answer(CHATS["one image"])
    turns = [*CHATS["one image"], text_message("assistant", first.text), text_message("user", "and now?")]
    second = chat.turn("and now?")
    assert second.text == pair.answer(turns)
    assert second.stats is not None and second.stats.cached_tokens >= first.stats.prompt_tokens
    run_command(chat, f"/save {tmp_path / 'chat.json'}")
    assert '"a.png"' in (tmp_path / "chat.json").read_text() or str(path) in (tmp_path / "chat.json").read_text()
    run_command(chat, f"/save {tmp_path / 'chat.safetensors'}")
    assert not (tmp_path / "chat.safetensors").exists()
    chat.reset()
    assert chat.turn("hello there").text == pair.answer(CHATS["text"])
    run_command(chat, f"/image {tmp_path / 'missing.png'}")
    assert "No such file" in capsys.readouterr().err


def test_images_stay_for_the_next_question_if_one_is_refused(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moegraft.injection.cli.chat.session import run_command

    chat, path = _chat(pair), tmp_path / "a.png"
    path.write_bytes(GOOD)
    run_command(chat, f"/image {path}")
    with pytest.raises(PromptRefusedError):
        chat.turn("long " * 5000)
    assert chat.turn("what?").text == pair.answer(CHATS["one image"])
    run_command(chat, f"/image {path}")
    with monkeypatch.context() as patch:
        patch.setattr(chat.conversation, "prompt", lambda most: refuse())
        with pytest.raises(ImageError):
            chat.turn("and now?")
    turns = [*CHATS["one image"], text_message("assistant", pair.answer(CHATS["one image"])), text_message("user", "and now?")]
    assert chat.turn("and now?").text == pair.answer(turns), "an image that cannot be used does not come again"


def refuse() -> None:
    raise ImageError("an image of no use")


def test_the_command_line(pair: Pair, tmp_path: Path, program: list[str], chat_folder: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(GOOD)

    def run(model: Path) -> tuple[int, str, str]:
        given = ["--model", str(model), "--rules", "cpu-exact", "--dtype", "float32", "-p", "what?", "--temperature", "0", "--quiet"]
        chat = Program([*program[1:], *given, "--max-new-tokens", str(TOKENS), "--image", str(path)], os.environ)
        shown, errors = chat.communicate()
        return chat.wait(), shown, errors

    _, shown, errors = run(pair.folder)
    assert shown.strip() == pair.answer(CHATS["one image"]), errors
    path.write_bytes(GOOD[:99])
    code, _, errors = run(pair.folder)
    assert code and "damaged" in errors and "Traceback" not in errors
    code, _, errors = run(chat_folder)
    assert code and "reads text, and no images" in errors
