"""Whole models on a device: that each way to run them answers as stock transformers does, and what the hybrid engine's systems take."""

from __future__ import annotations

import gc
import gzip
import logging
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import hybrid_gpu
import sparse_model
import speculative
import torch
from _gpu_systems import RULES, system
from gpu_day import MOST_BYTES, TRACE, Case, Row, Session, SkippedError
from hybrid_gpu import engines_of
from torch.profiler import ProfilerActivity, schedule
from transformers import AutoModelForCausalLM, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.operators.kernels.launch import interpreted, why_unavailable

DEMO = "demo"  # the bundled model
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe")  # a router, or a form of attention, of its own each
PROMPT, NEW = 12, 24
TOLERANCE = 0.1  # of the median token of a deep model: where two experts' scores nearly tie, a token may take the other
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative, of logits whose sums have another order
DRAFT = "- match: {{kind: model}}\n  replace: {{class: speculative_draft, kwargs: {{{options}}}}}"
DRAFTS: Mapping[str, Mapping[str, object] | None] = {
    "2 resident experts, 3 tokens": {"draft_top_k": 2, "max_draft": 3, "schedule": "fixed", "experts": "resident"},
    "plain": None,
    "1 expert, 3 tokens": {"draft_top_k": 1, "max_draft": 3, "schedule": "fixed"},
    "2 experts, marginal": {"draft_top_k": 2, "max_draft": 5, "schedule": "marginal"},
    "ngram, 3 tokens": {"draft": "ngram", "max_draft": 3, "schedule": "fixed"},
}


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


SYSTEMS = ("all, captured", "fixed, captured", "all", "fixed")
LENGTHS = (32, 128, 512, 1024, 2048)
# HybriMoE's systems; its Table III, between `fixed` and `all`.
PAPER = tuple(product(("all, captured", "all", "fixed", "all_cpu", "on_demand", "layer_map"), (0.25,)))
ABLATION = tuple(product(("scheduling", "scheduling+prefetch", "scheduling+cache", "greedy"), (0.25,)))
QWEN3 = partial(Comparison, "qwen3-30b-a3b", 48)
DEEPSEEK, MIXTRAL = partial(Comparison, "deepseek-v2-lite", 16), partial(Comparison, "mixtral-8x7b", 8)
COMPARISONS: Mapping[str, tuple[Comparison, ...]] = {
    "models": (QWEN3((32,), (("all, captured", 0.25),)),),
    "qwen3": (
        QWEN3((32, 512), tuple((name, 0.25) for name in SYSTEMS), profiled=(("all", 0.25), ("all, captured", 0.25))),
        QWEN3((32, 512), (("stock", 1.0),)),
        QWEN3((32, 512), tuple((name, ratio) for ratio, name in product((0.5, 1.0), SYSTEMS))),
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
def injected(name: str, gpu: str, decode: str = "eager", more: str = "") -> Iterator[PreTrainedModel]:
    """The bundled model, or a tiny one of a family with float32 weights, with its experts on both devices, half of them in slots."""
    with tempfile.TemporaryDirectory() as folder:
        rules, options = Path(folder) / "rules.yaml", f"cache: {{ratio: 0.5}}, decode: {decode}"
        rules.write_text(RULES.format(weights="stored", gpu=gpu, options=options, more=more))
        where: dict[str, Any] = {"device_map": gpu} if gpu.startswith("cuda") else {"threads": 1}
        source = demo_path()
        if name != DEMO:
            source, (families, case) = Path(folder) / "model", _tiny(name)
            families.save_checkpoint(case, source)
        model = optimize_and_load(source, rules, progress=False, **where)
        try:
            yield model
        finally:
            model.moegraft.context.close()
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
        with injected(name, gpu, decode) as model, notices() as messages:
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


def _arguments(session: Session, comparison: Comparison) -> Namespace:
    """What `_gpu_systems` and `hybrid_gpu` take."""
    names = ("layers", "scale", "weights", "new_tokens", "rounds")
    sizes = {name: getattr(comparison, name) for name in names} | {"threads": 1 if session.emulated else 0}
    return Namespace(**sizes, gpu=session.gpu, checkpoint=None, prompt_sets=None)


def _probe(model: PreTrainedModel) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, 9), generator=torch.Generator().manual_seed(2))
    return model(ids.to(model.device)).logits.float().cpu()


@cache
def _expected(session: Session, shape: str, layers: int, scale: int, weights: str) -> torch.Tensor:
    """The logits of `all_cpu`, once a process."""
    comparison = Comparison(shape, layers, (), (), scale=scale, weights=weights)
    with system("all_cpu", shape, 0.25, _arguments(session, comparison)) as model:
        return _probe(model)


@torch.inference_mode()
def one_system(session: Session, comparison: Comparison, name: str, ratio: float) -> Iterator[Row]:
    """
    Raises:
        RuntimeError: its logits are not those of `all_cpu`.
    """
    shape, layers, scale, weights = comparison.shape, comparison.layers, comparison.scale, comparison.weights
    arguments = _arguments(session, comparison)
    about = {"model": f"{shape}, {layers} layers, 1/{scale} of the widths", "system": name, "cache_ratio": ratio}
    about |= {"weights": "bfloat16" if name == "stock" else weights}
    expected = None if name == "stock" else _expected(session, shape, layers, scale, weights)
    start = time.perf_counter()
    with system(name, shape, ratio, arguments) as model, notices() as messages:
        found = _probe(model)
        answer = {} if expected is None else hybrid_gpu.compared_logits(found, expected)
        error = 0.0 if expected is None else float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
        yield {**about, **answer, "median_error": round(error, 5), "load_s": round(time.perf_counter() - start, 1)}
        for number, tokens in enumerate(comparison.prompts):
            rounds, new_tokens = comparison.rounds if tokens <= 512 else 1, comparison.new_tokens if number == 0 else 1
            sizes = {"prompts": [tokens], "rounds": rounds, "new_tokens": new_tokens}
            yield from hybrid_gpu.measure(model, about, Namespace(**{**vars(arguments), **sizes}))
        for engine in engines_of(model):
            yield {**about, **{f"engine: {key}": value for key, value in engine.report().items()}}
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

    class Steps(hybrid_gpu.Stamps):
        def __call__(self, *arguments: Any, **kwargs: Any) -> torch.Tensor:
            done = super().__call__(*arguments, **kwargs)
            seen.step()
            return done

    with torch.profiler.profile(activities=activities, schedule=schedule(wait=waited, warmup=1, active=1)) as seen:
        hybrid_gpu.token_ms(model, ids, waited + 3, Steps())
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
    few, names = session.emulated, list(DRAFTS)[: 1 if session.emulated else None]
    large = [Case(f"48 layers, {name}", partial(draft, session, name, large=True), 90, 1 if few else 20) for name in names[:4]]
    demo = [Case(f"{DEMO}, {name}", partial(draft, session, name, large=False)) for name in names]
    return [*large, Case("sparsity", partial(sparse, session), 90, 1 if few else 30), *demo]


@torch.inference_mode()
def draft(session: Session, name: str, *, large: bool) -> Iterator[Row]:
    """One way to draft: SS-MoE's acceptance and costs, and the rate against that of `plain` in its rows."""
    options, gpu = DRAFTS[name], session.gpu
    more = "" if options is None else DRAFT.format(options=", ".join(f"{key}: {value}" for key, value in options.items()))
    count, number = (8, 1) if session.emulated else (48, 2) if large else (96, 4)
    comparison = QWEN3((), ()).small() if session.emulated else QWEN3((), ())
    opened = system("all", comparison.shape, 0.5, _arguments(session, comparison), more) if large else injected(DEMO, gpu, more=more)
    with opened as model:
        generator = torch.Generator().manual_seed(5)
        random = [torch.randint(0, 4096, (1, 32), generator=generator) for _ in range(number)]
        texts = [ids.to(model.device) for ids in (random if large else speculative.prompts(number))]
        speculative.generate(model, texts[0], seed=0, new_tokens=count)
        for seed, ids in enumerate(texts):
            start = time.perf_counter()
            speculative.generate(model, ids, seed=seed, new_tokens=count)
            yield {"provider": name, "new_tokens": count, "tokens_s": round(count / (time.perf_counter() - start), 2)}
        operator = speculative.operator_of(model)
        if operator is not None:
            found: Callable[[], Mapping[str, Any]] = operator.statistics
            yield {"provider": name, **{key: value for key, value in found().items() if isinstance(value, (int, float, list, tuple, str))}}


@torch.inference_mode()
def sparse(session: Session) -> Iterator[Row]:
    """Whole models in slots without the neurons that a token does not need: the rows of `sparse_model.py`."""
    gpu, reason = session.gpu, None if interpreted() else why_unavailable()
    if reason is not None:
        raise SkippedError(reason)
    cases = [(requests, length) for length in ((128, 128), (1024, 128)) for requests in (1, 16)]
    small = "tiny", 1, [(2, (2, 2))], 1, torch.device("cpu")
    yield from sparse_model.measured(*(small if session.emulated else ("qwen3.5-35b-a3b", 16, cases, 2, torch.device(gpu))))
