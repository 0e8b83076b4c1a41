"""Whole models on a device: that each way to run them answers as stock transformers does, and what the hybrid engine's systems take.

Each system is a rule file over the same weights. Experts of models with random weights are made in the packed form, so that a model of 30
billion parameters is ready in seconds.
"""

from __future__ import annotations

import gc
import gzip
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_day import MOST_BYTES, TRACE, Case, Row, Session, SkippedError
from harness.models import VOCABULARY, RandomExperts, config_of, injected, move_all_but_experts, random_model, rule_file
from harness.rounds import alternate, percentiles
from harness.texts import held_out, pieces
from harness.work_floor import SHAPES as WORK_SHAPES
from speculative import SPEED_PROVIDERS, draft_rule
from support.engine_rig import busy_ms
from torch.profiler import ProfilerActivity, schedule
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2MoeConfig, StoppingCriteria

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.injection import graft, load, plan
from moegraft.injection.calibration import collect, quantiles
from moegraft.injection.demo import demo_path
from moegraft.injection.injected import sparse_layers
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.kernels.launch import interpreted, why_unavailable
from moegraft.operators.offload.engine import Engine
from moegraft.operators.sparsity import SparsityOptions, achieved, experts_layer, total_counts
from moegraft.operators.timeline import Timeline
from moegraft.operators.weights import WeightSource

NO_PREFETCH = "prefetch: {{policy: none, promote: false}}"
LRU, MRS = "cache: {{policy: lru, ratio: {ratio}}}", "cache: {{policy: mrs, ratio: {ratio}}}"
PLAIN = "cache: {{ratio: {ratio}}}"
# From `fixed`, KTransformers' map, to `greedy`, all of HybriMoE: the ablation of its Table III. A fixed map brings no experts, so that
# prefetching and the cache are tried on top of scheduling, not without it.
SYSTEMS = {
    "all_cpu": f"schedule: all_cpu, decode: eager, {PLAIN}",
    "fixed": f"schedule: fixed, decode: eager, {PLAIN}",
    "layer_map": f"schedule: layer_map, decode: eager, {PLAIN}",
    "on_demand": f"schedule: on_demand, decode: eager, {LRU}, prefetch: {{{{policy: next_layer}}}}",
    "scheduling": f"schedule: greedy, decode: eager, {LRU}, {NO_PREFETCH}",
    "scheduling+prefetch": f"schedule: greedy, decode: eager, {LRU}",
    "scheduling+cache": f"schedule: greedy, decode: eager, {MRS}, {NO_PREFETCH}",
    "greedy": f"schedule: greedy, decode: eager, {MRS}",
    "all": f"schedule: two_threshold, decode: eager, {PLAIN}",
    "fixed, captured": f"schedule: fixed, decode: graph, {PLAIN}",
    "all, captured": f"schedule: two_threshold, decode: graph, {PLAIN}",
    "stock attention, captured": f"schedule: two_threshold, decode: graph, {PLAIN}",
}
RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{weights: {weights}, gpu: "{gpu}", {options}}}}}
{more}
"""
# As in the shipped rules; where the device is emulated, the rest of the model runs on the CPU, and a capture would not see them.
ON_GPU = "".join(
    f"- match: {{kind: {kind}}}\n  replace: {{class: {name}}}\n  expect: any\n"
    for kind, name in (("attention", "fused_attention"), ("norm", "fused_norm"), ("router", "fused_router"))
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model of random weights; `scale` divides its widths. `gpu` is the device as rule files name it."""

    shape: str
    layers: int
    gpu: str
    weights: str = "int4"
    scale: int = 1

    @property
    def device(self) -> str:
        return self.gpu if self.gpu.startswith("cuda") else "cpu"

    @property
    def about(self) -> str:
        return f"{self.shape}, {self.layers} layers, 1/{self.scale} of the widths"

    def make(self, *, experts: bool = False) -> PreTrainedModel:
        """Return the bfloat16 model; `experts` gives it experts of its own."""
        dense = {"first_k_dense_replace": 0} if self.shape == "deepseek-v2-lite" else {}  # every layer has experts
        return random_model(config_of(self.shape, self.layers, self.scale, **dense), self.device, experts=experts)


@lru_cache(maxsize=48)  # layers of the deepest model
def _layer(number: int, shape: ExpertsShape, gate: GateSpec, weights: str) -> RandomExperts:
    """The experts of a layer, which models that are measured one after another share."""
    return RandomExperts(shape, gate, weights)


def _take_random(operator: HybridExperts, layer: int, source: WeightSource, advance: Callable[[int], None]) -> None:
    operator.on_cpu.packed = _layer(layer, operator.layout.shape, operator.layout.gate, str(operator.options.weights))


@contextmanager
def system(name: str, model: Model, ratio: float, more: str = "") -> Iterator[PreTrainedModel]:
    """Return a model under one system; `stock` as it is, with bfloat16 experts on the device.

    Args:
        ratio: share of the experts that have a slot on the GPU.
        more: further rules.
    """
    if name == "stock":
        yield model.make(experts=True)
        return
    more = (ON_GPU if model.gpu.startswith("cuda") else "") + more
    if name.startswith("stock attention"):  # the first rule that matches counts
        more = "- match: {kind: attention}\n  replace: {class: default}\n" + more
    with rule_file(RULES.format(weights=model.weights, gpu=model.gpu, options=SYSTEMS[name].format(ratio=ratio), more=more)) as rules:
        empty, threads = model.make(), 0 if model.gpu.startswith("cuda") else 1  # 0: one for each core
        grafted = graft(empty, plan(empty, rules), threads=threads)
        experts = [operator for operator in grafted.injection.operators.values() if isinstance(operator, HybridExperts)]
        for layer, operator in enumerate(experts):
            operator.load = partial(_take_random, operator, layer)  # type: ignore[method-assign]
        loaded = load(grafted, progress=False)
    try:
        yield loaded
    finally:
        loaded.moegraft.close()
        del loaded
        gc.collect()


def engines_of(model: PreTrainedModel) -> list[Engine]:
    """None in a stock model."""
    return list(model.moegraft.context.gpu_engines) if hasattr(model, "moegraft") else []


def costs_of(engine: Engine) -> dict[str, object]:
    """What the scheduler plans with by now, in ms: an expert by its tokens on either device, its transfer, and what comes once a layer."""
    loads, costs = np.array([1, 2, 8, 32, 128]), engine.costs
    by_tokens = {"cpu": costs.cpu_ms(loads), "gpu": costs.gpu_ms(loads)}
    rows = {f"{name}_ms": dict(zip(loads.tolist(), times.round(4).tolist(), strict=True)) for name, times in by_tokens.items()}
    once = {
        "transfer": costs.transfer_ms(engine.cache.queue.store.expert_bytes),
        "first_cpu": costs.first_cpu_ms,
        "first_gpu": costs.first_gpu_ms,
    }
    return {**rows, **{f"{name}_ms": round(ms, 4) for name, ms in once.items()}, "slots": engine.cache.slots.plan.slots}


class Stamps(StoppingCriteria):
    """A streamer that records the time of each token."""

    def __init__(self) -> None:
        self.at_s = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.at_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def token_ms(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, stamps: Stamps | None = None) -> list[float]:
    """Return the ms of each token; the first includes the prompt."""
    stamps = stamps or Stamps()
    settings = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=[stamps], **settings)
    return [1e3 * (after - before) for before, after in pairwise(stamps.at_s)]


def busy(model: PreTrainedModel, run: Callable[[], object]) -> dict[str, float]:
    """Return the share of the time that each device was busy, measured in a run of its own; captured steps report only the link."""
    engine = next(iter(engines_of(model)), None)
    if engine is None:
        return {}
    engine.timings.timeline = timeline = Timeline(engine.device.name)
    start_ms = engine.device.now_ms()
    run()
    engine.device.synchronize()
    engine.timings.collect()
    took_ms = engine.device.now_ms() - start_ms
    engine.timings.timeline = None
    return {f"{lane.lower()}_busy": round(busy_ms(timeline, lane) / took_ms, 3) if took_ms else 0.0 for lane in ("CPU", "GPU", "link")}


def measure(model: PreTrainedModel, tokens: int, new_tokens: int, rounds: int) -> list[dict[str, object]]:
    """Return the times to the first token of a prompt of random tokens and, of more than one new token, between tokens."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens)).to(model.device)
    token_ms(model, ids, new_tokens)  # warms up
    replayed = sum(engine.statistics.replayed for engine in engines_of(model))
    runs = [token_ms(model, ids, new_tokens) for _ in range(rounds)]
    replayed = sum(engine.statistics.replayed for engine in engines_of(model)) - replayed
    shares = {"prompt_tokens": tokens, **busy(model, partial(token_ms, model, ids, new_tokens))}
    rows: list[dict[str, object]] = [
        {"measured": "first token", **shares, **percentiles([run[0] for run in runs], "ms", 3), "steps_replayed": 0}
    ]
    if new_tokens > 1:
        each = percentiles([ms for run in runs for ms in run[1:]], "ms", 3)
        rows.append({"measured": "next token", **shares, **each, "steps_replayed": replayed})
    return rows


def compared_logits(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Return the relative error of logits, the share of tokens with the same best one, and the mean KL divergence in nats."""
    right, given = expected.log_softmax(-1), found.log_softmax(-1)
    return {
        "logits_error": round(float((found - expected).norm() / expected.norm()), 5),
        "same_top_1": round(float((found.argmax(-1) == expected.argmax(-1)).float().mean()), 4),
        "kl": round(float((right.exp() * (right - given)).sum(-1).mean()), 6),
    }


DEMO = "demo"  # the bundled model
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe")  # a router, or a form of attention, of its own each
PROMPT, NEW = 12, 24
TOLERANCE = 0.1  # of the median token of a deep model: where two experts' scores nearly tie, a token may take the other
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative, of logits whose sums have another order
DRAFTS = ("1 expert, 3 tokens", "plain", "2 experts, marginal", "ngram, 3 tokens")  # in this order, which time may cut short


@dataclass(frozen=True, slots=True)
class Comparison:
    """Systems on one model of random weights.

    Attributes:
        prompts: tokens; a text is decoded after the first.
        runs: a system, and the share of the experts that have a slot on the GPU; the most important ones first.
        profiled: those of which a step is profiled; the last one's trace is kept.
        rounds: of the shorter prompts; of those above 512 tokens there is one.
        least_s: with less time a run is left; about what it takes.
    """

    shape: str
    layers: int
    prompts: tuple[int, ...]
    runs: tuple[tuple[str, float], ...]
    profiled: tuple[tuple[str, float], ...] = ()
    weights: str = "int4"
    rounds: int = 3
    new_tokens: int = 32
    scale: int = 1
    least_s: float = 25.0

    def small(self) -> Comparison:
        """The same for an emulated device."""
        sizes: dict[str, Any] = {"layers": 2, "scale": 16, "prompts": (4,), "rounds": 1, "new_tokens": 3, "least_s": 1.0}
        return replace(self, **sizes)

    def model(self, gpu: str) -> Model:
        return Model(self.shape, self.layers, gpu, self.weights, self.scale)


FIRST = ("all, captured", "fixed, captured", "all", "fixed")
LENGTHS = (32, 128, 512, 1024, 2048)
# HybriMoE's systems; its Table III, between `fixed` and `all`.
PAPER = tuple(product(("all, captured", "all", "fixed", "all_cpu", "on_demand", "layer_map"), (0.25,)))
ABLATION = tuple(product(("scheduling", "scheduling+prefetch", "scheduling+cache", "greedy"), (0.25,)))
QWEN3 = partial(Comparison, "qwen3-30b-a3b", 48)
DEEPSEEK, MIXTRAL = partial(Comparison, "deepseek-v2-lite", 16), partial(Comparison, "mixtral-8x7b", 8)
COMPARISONS: Mapping[str, tuple[Comparison, ...]] = {
    "models": (QWEN3((32,), (("all, captured", 0.25),)),),
    "qwen3": (
        QWEN3((32, 512), tuple((name, 0.25) for name in FIRST), profiled=(("all", 0.25), ("all, captured", 0.25))),
        QWEN3((32, 512), (("stock", 1.0),)),
        QWEN3((32, 512), (("stock attention, captured", 1.0), *((name, ratio) for ratio, name in product((1.0, 0.5), FIRST)))),
        QWEN3((32, 512), (("all, captured", 1.0),), weights="bfloat16", least_s=90.0),  # the weights that stock has
    ),
    "shapes": (
        DEEPSEEK(LENGTHS, PAPER, rounds=2),
        MIXTRAL(LENGTHS, PAPER, rounds=2),
        DEEPSEEK(LENGTHS, (*ABLATION, *product(("all", "fixed"), (0.5, 0.75))), rounds=2),
        MIXTRAL(LENGTHS, (*ABLATION, *product(("all", "fixed"), (0.5, 0.75))), rounds=2),
    ),
}


@contextmanager
def on_both(name: str, gpu: str, decode: str = "eager", more: str = "") -> Iterator[PreTrainedModel]:
    """The bundled model, or a tiny one of a family with float32 weights, with its experts on both devices, half of them in slots."""
    with tempfile.TemporaryDirectory() as folder:
        rules = RULES.format(weights="stored", gpu=gpu, options=f"cache: {{ratio: 0.5}}, decode: {decode}", more=more)
        where: dict[str, Any] = {"device_map": gpu} if gpu.startswith("cuda") else {"threads": 1}
        source = demo_path()
        if name != DEMO:
            source, (families, case) = Path(folder), _tiny(name)
            families.save_checkpoint(case, source)
        model = injected(source, rules, **where)
        try:
            yield model
        finally:
            model.moegraft.close()
            del model
            gc.collect()


def _tiny(name: str) -> tuple[Any, Any]:
    """The tests' tiny models, and a family's."""
    from support import families

    return families, next(case for case in families.served_cases() if case.model_type == name)


def _stock(name: str, gpu: str) -> PreTrainedModel:
    if name == DEMO:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(demo_path())
    else:
        families, case = _tiny(name)
        model = families.build_model(case)
    return model.to(gpu if gpu.startswith("cuda") else "cpu").eval()


def answer(model: PreTrainedModel, ids: torch.Tensor, count: int) -> tuple[list[int], torch.Tensor, float]:
    """`count` greedy tokens, their logits (count, vocabulary) float32, and the milliseconds of one."""
    lengths, outputs = {"min_new_tokens": count, "max_new_tokens": count}, {"output_logits": True, "return_dict_in_generate": True}
    start = time.perf_counter()
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths, **outputs)
    tokens = made.sequences[0, ids.shape[1] :].tolist()
    return tokens, torch.cat(made.logits).float().cpu(), 1e3 * (time.perf_counter() - start) / count


@contextmanager
def notices() -> Iterator[list[str]]:
    """Collect what moegraft logs, such as why steps are not captured."""
    found: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("moegraft")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@torch.inference_mode()
def same_answers(session: Session, name: str) -> Iterator[Row]:
    """Stock, layer by layer and captured.

    Raises:
        RuntimeError: logits are off, or no step was captured.
    """
    gpu, count = session.gpu, 6 if session.emulated else NEW
    stock = _stock(name, gpu)
    vocabulary, dtype = stock.config.get_text_config().vocab_size, stock.dtype
    ids = torch.randint(3, vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(0)).to(stock.device)
    answer(stock, ids, 2)
    tokens, logits, ms = answer(stock, ids, count)
    yield {"mode": "stock", "dtype": str(dtype), "token_ms": round(ms, 3), "text": tokens}
    del stock
    wrong: list[str] = []
    for decode in ("eager", "graph"):
        with on_both(name, gpu, decode) as model, notices() as messages:
            answer(model, ids, 4)
            found, found_logits, ms = answer(model, ids, count)
            same = next((at for at, (one, other) in enumerate(zip(found, tokens, strict=True)) if one != other), count)
            compared = slice(0, min(same + 1, count))  # afterwards the texts differ
            error = float((found_logits[compared] - logits[compared]).norm() / logits[compared].norm())
            replayed = sum(engine.statistics.replayed for engine in engines_of(model))
            sampled = [
                model.generate(ids, do_sample=True, max_new_tokens=8, min_new_tokens=8)[0].tolist() for _ in map(torch.manual_seed, (1, 1))
            ]
            statistics = [engine.statistics for engine in engines_of(model)]
            counts = {name: sum(getattr(each, name) for each in statistics) for name in ("on_cpu", "used", "recoveries")}
            about = {"mode": decode, "token_ms": round(ms, 3), "same_tokens": same, "of": count, "logits_error": error}
            repeats = {"replayed": replayed, "sampling_repeats": sampled[0] == sampled[1]}
            yield {**about, **counts, **repeats, "notices": sorted(set(messages))}
            if not error <= LIMITS[dtype]:
                wrong.append(f"{decode}: logits are {error:.2%} off")
            if decode == "graph" and not replayed:
                wrong.append(f"no step was captured: {'; '.join(messages) or 'no reason is logged'}")
    if wrong:
        raise RuntimeError(f"{name}: {'; '.join(wrong)}")


def models(session: Session) -> list[Case]:
    """Answers of whole models, then a first look at a large one."""
    names = (DEMO, *FAMILIES[: 1 if session.emulated else None])
    return [*(Case(name, partial(same_answers, session, name), 120) for name in names), *compared(session)]


def compared(session: Session) -> list[Case]:
    """The comparisons of the session's phase."""
    found = [each.small() if session.emulated else each for each in COMPARISONS[session.phase]]
    runs = [(each, *run, max(150.0, 2 * each.least_s)) for each in found for run in each.runs]
    return [
        Case(f"{each.shape}, {each.weights}: {name}, {ratio}", partial(one_system, session, each, name, ratio), limit_s, each.least_s)
        for each, name, ratio, limit_s in runs
    ]


def _probe(model: PreTrainedModel) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, 9), generator=torch.Generator().manual_seed(2))
    return model(ids.to(model.device)).logits.float().cpu()


@cache
def _expected(model: Model) -> torch.Tensor:
    """The logits of `all_cpu`, once a process."""
    with system("all_cpu", model, 0.25) as loaded:
        return _probe(loaded)


@torch.inference_mode()
def one_system(session: Session, comparison: Comparison, name: str, ratio: float) -> Iterator[Row]:
    """
    Raises:
        RuntimeError: its logits are not those of `all_cpu`.
    """
    wanted = comparison.model(session.gpu)
    about = {"model": wanted.about, "system": name, "cache_ratio": ratio, "weights": "bfloat16" if name == "stock" else wanted.weights}
    expected = None if name == "stock" else _expected(wanted)
    start = time.perf_counter()
    with system(name, wanted, ratio) as model, notices() as messages:
        found = _probe(model)
        answer = {} if expected is None else compared_logits(found, expected)
        error = 0.0 if expected is None else float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
        yield {**about, **answer, "median_error": round(error, 5), "load_s": round(time.perf_counter() - start, 1)}
        for number, tokens in enumerate(comparison.prompts):
            rounds, new_tokens = comparison.rounds if tokens <= 512 else 1, comparison.new_tokens if number == 0 else 1
            yield from ({**about, **row} for row in measure(model, tokens, new_tokens, rounds))
        for engine in engines_of(model):
            yield {**about, **{f"engine: {key}": value for key, value in engine.report().items()}}
            yield {**about, **costs_of(engine)}
        if messages:
            yield {**about, "notices": sorted(set(messages))}
        if (name, ratio) in comparison.profiled:
            yield from profile(session, model, about)
    if not error <= TOLERANCE:
        raise RuntimeError(f"{name}: the median token's logits are {error:.1%} off those of all_cpu")


def profile(session: Session, model: PreTrainedModel, about: Row) -> Iterator[Row]:
    """One decoded token: what takes the time on either side; its trace is kept."""
    activities = [ProfilerActivity.CPU] if session.emulated else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    ids = torch.arange(3, 19, device=model.device)[None]
    waited = 6  # the prompt, and tokens until steps are captured

    class Steps(Stamps):
        def __call__(self, *arguments: Any, **kwargs: Any) -> torch.Tensor:
            done = super().__call__(*arguments, **kwargs)
            seen.step()
            return done

    with torch.profiler.profile(activities=activities, schedule=schedule(wait=waited, warmup=1, active=1)) as seen:
        token_ms(model, ids, waited + 3, Steps())
    events = seen.key_averages()
    for side, time_us in (("host", "self_cpu_time_total"), ("device", "self_device_time_total")):
        ordered = sorted(events, key=lambda event, time_us=time_us: getattr(event, time_us, 0.0), reverse=True)  # type: ignore[misc]
        for event in ordered[: 8 if session.emulated else 25]:
            us = getattr(event, time_us, 0.0)
            if us:
                yield {**about, "side": side, "name": event.key[:120], "count": event.count, "us_a_token": round(us, 2)}
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "trace.json", Path(folder) / TRACE
        seen.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb") as target:
            shutil.copyfileobj(source, target)
        size = packed.stat().st_size
        if size <= MOST_BYTES:
            shutil.copyfile(packed, session.out / TRACE)
        yield {**about, "trace_bytes": size, "kept": size <= MOST_BYTES}


def whole(session: Session) -> list[Case]:
    """Drafts of a large model with random weights, and of the bundled one, whose drafts are accepted as often as a real one's; sparsity."""
    few, names = session.emulated, DRAFTS[: 1 if session.emulated else None]
    large = [Case(f"48 layers, {name}", partial(draft, session, name, large=True), 90, 1 if few else 20) for name in names]
    demo = [Case(f"{DEMO}, {name}", partial(draft, session, name, large=False)) for name in names]
    return [*large, Case("sparsity", partial(sparse, session), 90, 1 if few else 30), *demo]


@torch.inference_mode()
def draft(session: Session, name: str, *, large: bool) -> Iterator[Row]:
    """One way to draft: SS-MoE's acceptance and costs, and the rate against that of `plain` in its rows."""
    options, gpu = SPEED_PROVIDERS[name], session.gpu
    more = "" if options is None else draft_rule(options)
    count, number = (8, 1) if session.emulated else (48, 2) if large else (96, 4)
    comparison = QWEN3((), ()).small() if session.emulated else QWEN3((), ())
    with system("all", comparison.model(gpu), 0.5, more) if large else on_both(DEMO, gpu, more=more) as model:
        generator = torch.Generator().manual_seed(5)
        random = [torch.randint(0, 4096, (1, 32), generator=generator) for _ in range(number)]
        texts = [ids.to(model.device) for ids in (random if large else pieces(held_out(), number, 48))]

        def generate(seed: int, ids: torch.Tensor) -> float:
            torch.manual_seed(seed)
            start = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, min_new_tokens=count, max_new_tokens=count)
            return time.perf_counter() - start

        generate(0, texts[0])
        for seed, ids in enumerate(texts):
            yield {"provider": name, "new_tokens": count, "tokens_s": round(count / generate(seed, ids), 2)}
        operator = model.moegraft.model_operator
        if operator is not None:
            found: Callable[[], Mapping[str, Any]] = operator.statistics
            yield {"provider": name, **{key: value for key, value in found().items() if isinstance(value, (int, float, list, tuple, str))}}


SPARSE_RULES = "rules:\n- match: {kind: experts}\n  replace: {class: sparse_experts, kwargs: {sparsity: {target: 0, scope: total}}}\n"
SHARES = (0.0, 0.7, 0.8, 0.85)  # of all neurons, the shared expert's included; 0: every neuron, by the fastest dense path


@torch.inference_mode()
def sparse(session: Session) -> Iterator[Row]:
    """A whole model in slots without the neurons that a token does not need (the published study's Table 3), by requests and lengths.

    Sizes are those of Qwen3.5-35B-A3B's experts; attention is plain and weights are random, so only speed is measured. One model serves
    all rows; thresholds come from a calibration on random tokens.
    """
    gpu, reason = session.gpu, None if interpreted() else why_unavailable()
    if reason is not None:
        raise SkippedError(reason)
    few = session.emulated
    shape, layers, rounds = WORK_SHAPES["tiny" if few else "qwen3.5-35b-a3b"], 1 if few else 16, 1 if few else 2
    sizes: dict[str, Any] = {"hidden_size": shape.hidden, "num_attention_heads": max(1, shape.hidden // 128), "num_key_value_heads": 1}
    sizes |= {"moe_intermediate_size": shape.intermediate, "shared_expert_intermediate_size": shape.shared_intermediate}
    sizes |= {"num_experts": shape.num_experts, "num_experts_per_tok": shape.top_k, "num_hidden_layers": layers}
    dtype = torch.float32 if few else torch.bfloat16  # which Triton's interpreter lacks
    model = random_model(Qwen2MoeConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=4096, dtype=dtype))
    move_all_but_experts(model, "cpu" if few else gpu)
    found = [experts_layer(f"model.layers.{layer}.mlp.experts", model) for layer in range(layers)]
    model = injected(model, SPARSE_RULES)
    states = sparse_layers(model)
    tokens = torch.randint(0, VOCABULARY, (64 if few else 512,), generator=torch.Generator().manual_seed(3))
    bins = {path: layer.bins for path, layer in collect(model, found, [tokens]).items()}

    def seconds(share: float, requests: int, given: int, made: int) -> tuple[float, float]:
        """Return the seconds of generating, and the share of routed neurons that was left out."""
        for layer in found:
            routed = layer.routed_target(SparsityOptions(share, "total"))
            states[layer.path].set_threshold(quantiles(bins[layer.path], [routed])[0] if routed else 0.0, routed)
        ids = torch.randint(0, VOCABULARY, (requests, given), generator=torch.Generator().manual_seed(1)).to(model.device)
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=made, max_new_tokens=made)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, achieved(total_counts(states.values())) or 0.0

    for requests, given, made in [(2, 2, 2)] if few else [(requests, given, 128) for given in (128, 1024) for requests in (1, 16)]:
        # The first round compiles, and times the paths.
        calls = {share: partial(seconds, share, requests, given, made) for share in SHARES}
        medians: dict[float, float] = {}
        for share, runs in alternate(calls, rounds).items():
            medians[share] = statistics.median(taken for taken, _ in runs)
            about = {"layers": layers, "requests": requests, "input": given, "output": made, "total_sparsity": share}
            speed = {"p50_s": round(medians[share], 4), "output_tokens_per_s": round(requests * made / medians[share], 1)}
            yield {**about, "routed_left_out": round(runs[-1][1], 4), **speed, "speedup": round(medians[0.0] / medians[share], 3)}
