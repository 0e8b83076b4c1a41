"""How much memory does loading take? Peak anonymous memory of stock `from_pretrained` and of `optimize_and_load`, side by side.

Each provider loads the same checkpoint in a process of its own, whose RssAnon is sampled. Mapped file pages do not count, since the
operating system may drop them at any time. The required bound is 110% of the packed experts and the other weights, and 105% for
checkpoints whose weights stay in the format of the file: MXFP4 in the shapes of gpt-oss-20b, FP8 in those of DeepSeek-V2-Lite, of four
layers each and with a small vocabulary (`--stored-scale` makes them smaller).
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from harness.peers import PeerProcess
from harness.record import Recorder, parser
from transformers import PreTrainedConfig

MIB = 1 << 20
PROVIDERS = ("stock", "cpu-exact", "cpu")
MODEL_TYPES = {"gpt_oss": "mxfp4", "deepseek_v2": "fp8"}
FORMATS = tuple(MODEL_TYPES.values())


def make_checkpoint(folder: Path, layers: int, dtype: torch.dtype) -> None:
    """Write a random Qwen3-MoE checkpoint that consists mostly of experts, about 72 MiB per layer in float32."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=2048,
        num_experts=48, num_experts_per_tok=4, moe_intermediate_size=256, intermediate_size=512, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder, max_shard_size="200MB")


STORED_RULES = """
rules:
- match: {kind: experts}
  replace: {class: hybrid_experts, kwargs: {weights: stored}}
- match: {kind: linear, name: '\\.([qkvo]|q_[ab]|kv_a|gate|up|down)_proj(_with_mqa)?$'}
  replace: {class: quantized_linear, kwargs: {weights: stored}}
"""


def stored_config(name: str, scale: int = 1, layers: int = 4) -> PreTrainedConfig:
    """Return a config with the shapes of gpt-oss-20b for `mxfp4`, or of DeepSeek-V2-Lite for `fp8`, divided by `scale`."""
    from transformers import DeepseekV2Config, GptOssConfig

    def size(full: int, multiple: int) -> int:
        return max(full // scale // multiple, 1) * multiple

    common: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": 4096, "max_position_embeddings": 4096, "dtype": torch.bfloat16}
    if name == "mxfp4":
        config = GptOssConfig(**common, hidden_size=size(2880, 64), intermediate_size=size(2880, 64), num_local_experts=32)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 150000.0}
        return config
    return DeepseekV2Config(
        **common, hidden_size=size(2048, 128), moe_intermediate_size=size(1408, 128), intermediate_size=size(10944, 128),
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_attention_heads=16, num_key_value_heads=16,
    )  # fmt: skip


def make_stored(folder: Path, name: str, scale: int, layers: int = 4) -> None:
    """Write a random checkpoint in a format of its own, a file for each layer: `mxfp4` with gpt-oss's shapes or `fp8` with DeepSeek's."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = stored_config(name, scale, layers)
    if name == "mxfp4":
        settings: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    else:
        settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(0)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 120, shape, dtype=torch.uint8, generator=random)

    def stored(key: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        if name == "mxfp4" and key.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, rows = shape
            return {f"{key}_blocks": codes(experts, rows, inputs // 32, 16), f"{key}_scales": codes(experts, rows, inputs // 32)}
        if name == "fp8" and key.endswith("_proj.weight") and len(shape) == 2:
            blocks = [-(-each // 128) for each in shape]
            return {key: codes(*shape).view(torch.float8_e4m3fn), f"{key}_scale_inv": torch.full(blocks, 0.01)}
        if name == "fp8" and key.endswith(("gate_up_proj", "down_proj")):
            module, _, last = key.rpartition(".")
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            each = shape[1] // len(parts), shape[2]
            names = (f"{module}.{expert}.{part}.weight" for expert in range(shape[0]) for part in parts)
            return {name: tensor for key in names for name, tensor in stored(key, each).items()}
        return {key: torch.full(shape, 0.01, dtype=torch.bfloat16)}

    files: dict[str, dict[str, torch.Size]] = {}
    for key, tensor in model.state_dict().items():
        layer = key.split(".")[2] if ".layers." in key else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[key] = tensor.shape
    index = {}
    for file, shapes in files.items():
        tensors = {key: tensor for name, shape in shapes.items() for key, tensor in stored(name, tuple(shape)).items()}
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    body = json.loads(config.to_json_string()) | {"quantization_config": settings, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(body))
    (folder / "rules.yaml").write_text(STORED_RULES)


def rss_anon_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def sampled_peak() -> Iterator[list[int]]:
    """Sample RssAnon every 2 ms; the first number of the list is the peak."""
    peak, stop = [0], threading.Event()

    def run() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], rss_anon_bytes())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield peak
    stop.set()
    thread.join()


def measure(provider: str, folder: Path) -> dict[str, float]:
    """Load once, in a process of its own, and report the peak and the bytes held afterwards."""
    from transformers import AutoModelForCausalLM

    from moegraft.injection import optimize_and_load

    AutoModelForCausalLM.from_config  # noqa: B018 (the import's own memory belongs to the baseline)
    if provider == "stored":  # which imports much more, on first use
        with tempfile.TemporaryDirectory() as small:
            make_stored(Path(small), MODEL_TYPES[json.loads((folder / "config.json").read_text())["model_type"]], 64, layers=2)
            optimize_and_load(small, Path(small) / "rules.yaml", progress=False)
    baseline = rss_anon_bytes()
    start = time.perf_counter()
    with sampled_peak() as peak:
        if provider == "stock":
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        else:
            rules = folder / "rules.yaml" if provider == "stored" else provider
            model = optimize_and_load(folder, rules, progress=False)
    seconds = time.perf_counter() - start
    held = sum(parameter.nbytes for parameter in model.parameters())
    held += sum(swap.footprint.total_bytes for swap in model.moegraft.plan.swaps) if provider != "stock" else 0
    return {"peak_bytes": peak[0] - baseline, "held_bytes": held, "seconds": seconds}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--stored-scale", type=int, default=1)
    given = options.parse_args()
    rows = Recorder("load_memory", write=given.write)
    for name in ("float32", "bfloat16", *FORMATS):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if name in FORMATS:
                make_stored(folder, name, given.stored_scale)
            else:
                make_checkpoint(folder, given.layers, getattr(torch, name))
            checkpoint_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            for provider in ("stored",) if name in FORMATS else PROVIDERS:
                with PeerProcess(provider, nullcontext, provider) as peer:
                    found = peer.call(measure, folder)
                held, peak = found["held_bytes"], found["peak_bytes"]
                row = {"provider": provider, "checkpoint_dtype": name, "checkpoint_mib": round(checkpoint_bytes / MIB)}
                row |= {"held_mib": round(held / MIB), "peak_mib": round(peak / MIB), "peak_over_held": round(peak / held, 3)}
                rows.add({**row, "seconds": round(found["seconds"], 2)})


if __name__ == "__main__":
    main()
