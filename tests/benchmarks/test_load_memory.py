"""Models of the benchmarks in formats of their own: checkpoints are held as they are, and the files for llama.cpp can be loaded."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support import ROOT

from moegraft.injection import optimize_and_load

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.parametrize("name", ["mxfp4", "fp8"])
def test_loading_peaks_at_what_is_held(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, long: bool) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from harness.peers import PeerProcess
    from support.load_memory import make_checkpoint, measure

    if not long and name == "fp8":
        pytest.skip("with --long")
    make_checkpoint(tmp_path, name, scale=3 if long else 6)
    with PeerProcess("stored", nullcontext) as peer:
        found = peer.call(measure, tmp_path)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    # Norms, the embedding and FP8's kv_b are 16 bits wide, and experts are padded to whole cache lines.
    assert stored <= 1.02 * found["held_bytes"] and found["held_bytes"] <= 1.1 * stored
    # Beside the blocks, some MiB of two experts' codes while they are converted; the models of the benchmark are larger.
    assert found["peak_bytes"] <= 1.05 * found["held_bytes"] + (8 << 20)


def test_the_files_for_llama_cpp_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's, which has rows that are no multiple of a block, a dense layer, and keys and values in two tensors."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from harness.llama_cpp import token_weights, write_model
    from harness.models import config_of

    config, path = config_of("deepseek-v2-lite", 2, scale=16), tmp_path / "model.gguf"
    config.save_pretrained(tmp_path)
    write_model(path, config, "q4_k")
    weights = token_weights(path, config)
    # All experts, and the embedding, of which a token reads a row.
    few, many = config.num_experts_per_tok, config.n_routed_experts
    assert weights.read(few, few) <= weights.read(many, few) < weights.read(many, many) < path.stat().st_size
    assert 0.5 < weights.multiplied / (weights.read(few, 0) * 8 / 5) < 2  # at about 5 bits each
    model = optimize_and_load(tmp_path, "cpu", gguf=path, progress=False)
    with torch.inference_mode():
        logits = model(torch.arange(6)[None]).logits
    assert bool(logits.isfinite().all()) and float(logits.float().std()) > 0.01
