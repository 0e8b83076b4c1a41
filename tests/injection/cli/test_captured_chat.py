"""A chat whose decode steps are captured: the answers of one that goes layer by layer, and turns that go on from what is known."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.gpus import where
from transformers import AutoTokenizer

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.chat.answer import Answerer
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.options import SamplingOptions

RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{gpu: "{gpu}", cache: {{ratio: 0.5}}, decode: {decode}}}}}
"""


@pytest.fixture
def turns(chat_folder: Path, tmp_path: Path, gpu: str):  # type: ignore[no-untyped-def]
    def turns(decode: str, prefill_chunk: int) -> tuple[list[str], list[int], int]:
        """Texts, known tokens and replayed steps of three turns."""
        path = tmp_path / "rules.yaml"
        path.write_text(RULES.format(gpu=gpu, decode=decode))
        model = optimize_and_load(chat_folder, path, progress=False, threads=1, **where(gpu))
        loaded = LoadedModel("tiny", model, AutoTokenizer.from_pretrained(chat_folder), lambda: [])
        answerer = Answerer(loaded, SamplingOptions(do_sample=False, max_new_tokens=12), prefill_chunk=prefill_chunk)
        said, texts, known = "<user>hello there<end><assistant>", [], []
        for question in ("and then", "go on", "why"):
            answer = answerer.answer(loaded.tokenizer(said)["input_ids"], lambda text: None)
            assert answer.stats is not None
            texts.append(answer.text)
            known.append(answer.stats.cached_tokens)
            said += f"{answer.text}<end><user>{question}<end><assistant>"
        (engine,) = model.moegraft.context.gpu_engines
        return texts, known, engine.statistics.replayed

    return turns


@pytest.mark.parametrize("prefill_chunk", [0, 8])
def test_turns_go_on_and_answer_the_same(prefill_chunk: int, turns, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    texts, known, replayed = turns("eager", prefill_chunk)
    assert replayed == 0 and known[0] == 0 and known[1] > 0
    with caplog.at_level(logging.INFO, "moegraft"):
        found, found_known, replayed = turns("graph", prefill_chunk)
    assert (found, found_known) == (texts, known) and replayed > 20
    assert "layer by layer" not in caplog.text, caplog.text
