"""What does training beside packed experts cost?

    python benchmarks/training.py                 # a layer of experts of Qwen3-30B-A3B's shapes; two minutes on two cores
    python benchmarks/training.py --parts model   # steps of a model of four such layers; needs peft, 5 GB of disk and 12 of memory

- layer (`results/training.csv`): forward plus backward of one layer's frozen experts, with the gradients of hidden states and routing
  weights, as adapters of attention and router need them; beside transformers with bfloat16 weights. `ratio` is the median over rounds of
  tokens/s over those of transformers with `grouped_mm`; `cosine` compares the gradients of hidden states with its.
- model (`results/training_model.csv`): whole steps of AdamW on LoRA of all linear layers, with activations checkpointed, of a model with
  Qwen3-30B-A3B's layers, four of its 48, and a vocabulary of 8,192, so that the head has no more than its share. Each provider is a process
  that loads one checkpoint of random weights; steps alternate. `peak_gib` is the peak of anonymous memory (RssAnon) in a step, `loaded_gib`
  that before the first one. A provider with `experts` has adapters of the experts as well.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpu_experts import HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, draw_weights, pack, routings, stock
from harness.checkpoints import write_checkpoint
from harness.memory import rss_anon_bytes, sampled_peak
from harness.models import config_of
from harness.peers import PeerProcess
from harness.record import Recorder, parser
from harness.rounds import alternate, median_ratio, percentiles
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moegraft.injection import optimize_and_load
from moegraft.operators.context import InjectionContext
from moegraft.operators.experts.hybrid import HybridExperts, HybridExpertsOptions

BASE = "transformers-grouped_mm"
WEIGHT_TYPES = ("bfloat16", "int8", "int4")
MODEL_LAYERS, MODEL_VOCABULARY, ROW = 4, 8192, 1024  # of the part `model`; tokens of a row of its batch
GIB = 1 << 30
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def operator(weights: dict[str, torch.Tensor], weight_type: str) -> HybridExperts:
    with torch.device("meta"):
        module = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=NUM_EXPERTS))
    made = HybridExperts.build(module, HybridExpertsOptions(weights=weight_type), InjectionContext(torch.bfloat16))  # type: ignore[arg-type]
    made.on_cpu.packed = pack(weights, weight_type)[0]
    return made


def layer(tokens: int, rounds: int) -> Iterator[dict[str, object]]:
    weights = draw_weights()
    experts: dict[tuple[str, str], Experts] = {(each.name, "bfloat16"): each.run for each in stock(weights, torch.get_num_threads())}
    sizes = dict.fromkeys(experts, 3 * HIDDEN * INTERMEDIATE * NUM_EXPERTS * 2)
    for weight_type in WEIGHT_TYPES:
        made = operator(weights, weight_type)
        experts["moegraft", weight_type] = made
        assert made.on_cpu.packed is not None
        sizes["moegraft", weight_type] = made.on_cpu.packed.nbytes
    hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    index, routing = next(routings(tokens, 1))
    gradient = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    found: dict[tuple[str, str], torch.Tensor] = {}

    def step(name: tuple[str, str]) -> tuple[float, float]:
        x, share = hidden.clone().requires_grad_(), routing.clone().requires_grad_()
        start = time.perf_counter()
        out = experts[name](x, index, share)
        between = time.perf_counter()
        out.backward(gradient)
        end = time.perf_counter()
        assert x.grad is not None and share.grad is not None
        found[name] = x.grad
        return between - start, end - between

    def measure(name: tuple[str, str]) -> Callable[[], tuple[float, float]]:
        return lambda: step(name)

    taken = alternate({name: measure(name) for name in experts}, rounds)
    rates = {name: [tokens / sum(each) for each in parts] for name, parts in taken.items()}
    base = BASE, "bfloat16"
    for name, parts in taken.items():
        cosine = torch.nn.functional.cosine_similarity(found[name].double().flatten(), found[base].double().flatten(), 0)
        yield {
            "provider": name[0],
            "weights": name[1],
            "tokens": tokens,
            "experts": NUM_EXPERTS,
            "top_k": TOP_K,
            "threads": torch.get_num_threads(),
            "weight_gb": round(sizes[name] / 1e9, 3),
            **percentiles([1e3 * sum(each) for each in parts], "ms", 1),
            "forward_ms": round(1e3 * sorted(each[0] for each in parts)[len(parts) // 2], 1),
            "backward_ms": round(1e3 * sorted(each[1] for each in parts)[len(parts) // 2], 1),
            "tokens_s": round(sorted(rates[name])[len(parts) // 2], 1),
            "ratio": round(median_ratio(rates[name], rates[base]), 3),
            "cosine": round(float(cosine), 6),
        }


@dataclass(slots=True)
class Trained:
    """A provider's model with an adapter, in a process of its own."""

    model: Any
    optimizer: torch.optim.Optimizer
    loaded_bytes: int

    def step(self, tokens: int, number: int) -> float:
        """Return the loss."""
        ids = torch.randint(0, MODEL_VOCABULARY, (tokens // ROW, ROW), generator=torch.Generator().manual_seed(number))
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


@contextmanager
def trained(provider: str, folder: Path) -> Iterator[Trained]:
    from peft import LoraConfig, get_peft_model

    from moegraft.injection.lora import lora_config

    name, _, experts = provider.partition(" ")
    options: dict[str, Any] = {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "task_type": "CAUSAL_LM",
    }
    if experts:
        options["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    torch.manual_seed(7)
    before = rss_anon_bytes()
    if name == "transformers":
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="grouped_mm")
        adapted: Any = get_peft_model(model, LoraConfig(**options))
    else:
        weights = name.removeprefix("moegraft-")
        model = optimize_and_load(folder, "train", vars={"weights": weights}, dtype=torch.bfloat16, progress=False)
        adapted = get_peft_model(model, lora_config(model, **options))
    loaded = rss_anon_bytes() - before
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    adapted.train()
    learned = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    yield Trained(adapted, torch.optim.AdamW(learned, lr=1e-4), loaded)


def timed_step(one: Trained, tokens: int, number: int) -> tuple[float, float]:
    start = time.perf_counter()
    loss = one.step(tokens, number)
    return time.perf_counter() - start, loss


def peak_step(one: Trained, tokens: int) -> tuple[int, int, int]:
    """Return the bytes after loading and at the peak of a step, and the number of parameters that learn."""
    with sampled_peak() as peak:
        one.step(tokens, 0)
    return one.loaded_bytes, peak[0], sum(each.numel() for each in one.model.parameters() if each.requires_grad)


def whole_model(folder: Path, providers: list[str], tokens: int, rounds: int) -> Iterator[dict[str, object]]:
    with ExitStack() as running:
        peers = {name: running.enter_context(PeerProcess(name, trained, name, folder)) for name in providers}
        bases = {name: peer.call(peak_step, tokens) for name, peer in peers.items()}
        batches = {name: iter(range(1, 1 << 30)) for name in peers}  # the same for each provider

        def measure(name: str) -> Callable[[], tuple[float, float]]:
            return lambda: peers[name].call(timed_step, tokens, next(batches[name]))

        taken = alternate({name: measure(name) for name in peers}, rounds)
    rates = {name: [tokens / seconds for seconds, _ in each] for name, each in taken.items()}
    for name, each in taken.items():
        loaded, peak, learned = bases[name]
        yield {
            "provider": name,
            "layers": MODEL_LAYERS,
            "tokens": tokens,
            "threads": torch.get_num_threads(),
            "learned": learned,
            "loaded_gib": round(loaded / GIB, 2),
            "peak_gib": round(peak / GIB, 2),
            **percentiles([seconds for seconds, _ in each], "s", 2),
            "tokens_s": round(sorted(rates[name])[len(each) // 2], 1),
            "base": providers[0],
            "ratio": round(median_ratio(rates[name], rates[providers[0]]), 3),
            "loss": round(each[-1][1], 4),
        }


def main() -> None:
    options = parser(__doc__, tokens=2048, rounds=8)
    options.add_argument("--parts", nargs="+", choices=["layer", "model"], default=["layer"])
    options.add_argument("--providers", nargs="+", default=["transformers", "moegraft-int8"], help="of the part `model`, the base first")
    options.add_argument("--folder", type=Path, help="for the checkpoint of the part `model`, which is kept; by default a temporary one")
    given = options.parse_args()
    if "layer" in given.parts:
        recorder = Recorder("training", write=given.write)
        for row in layer(given.tokens, given.rounds):
            recorder.add(row)
    if "model" in given.parts:
        recorder = Recorder("training_model", ("torch", "transformers", "peft"), replaces=["provider", "tokens", "base"], write=given.write)
        with tempfile.TemporaryDirectory() as temporary:
            folder = given.folder or Path(temporary)
            if not (folder / "config.json").is_file():
                folder.mkdir(exist_ok=True)
                write_checkpoint(folder, config_of("qwen3-30b-a3b", MODEL_LAYERS, vocab_size=MODEL_VOCABULARY))
            for row in whole_model(folder, given.providers, given.tokens, given.rounds):
                recorder.add(row)


if __name__ == "__main__":
    main()
