"""Whole models on a device: that each way to run them answers as stock transformers does, and what the hybrid engine's systems take."""

from __future__ import annotations

import gc
import gzip
import logging
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import hybrid_gpu
import speculative
import torch
from _gpu_systems import system
from gpu_day import MOST_BYTES, ROOT, TRACE, Row, Session, SkippedError
from transformers import AutoModelForCausalLM, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.operators.offload.devices.cuda import why_no_cuda
from moegraft.operators.offload.engine import Engine

DEMO = "demo"  # the bundled model
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe")  # a router, or a form of attention, of its own each
PROMPT, NEW = 12, 24
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative, of logits whose sums have another order
RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{weights: stored, gpu: "{gpu}", cache: {{ratio: {ratio}}}, decode: {decode}}}}}
{more}
"""
DRAFT = "- match: {{kind: model}}\n  replace: {{class: speculative_draft, kwargs: {{{options}}}}}"
DRAFTS: Mapping[str, Mapping[str, object] | None] = {
    "plain": None,
    "1 expert, 3 tokens": {"draft_top_k": 1, "max_draft": 3, "schedule": "fixed"},
    "2 resident experts, 3 tokens": {"draft_top_k": 2, "max_draft": 3, "schedule": "fixed", "experts": "resident"},
    "2 experts, marginal": {"draft_top_k": 2, "max_draft": 5, "schedule": "marginal"},
    "ngram, 3 tokens": {"draft": "ngram", "max_draft": 3, "schedule": "fixed"},
}
SHAPE = "qwen3-30b-a3b"
COMPARED = ("all_cpu", "fixed", "all", "all, captured", "on_demand", "layer_map")
ABLATION = ("scheduling", "scheduling+prefetch", "scheduling+cache", "greedy")  # HybriMoE's Table III, between `fixed` and `all`


def gpu_of(session: Session) -> str:
    """
    Raises:
        SkippedError: there is no GPU.
    """
    if not session.emulated and why_no_cuda() is not None:
        raise SkippedError(str(why_no_cuda()))
    return "emulated" if session.emulated else "cuda:0"


def models(session: Session) -> None:
    for name in (DEMO, *FAMILIES[: 1 if session.emulated else None]):
        session.case(name, partial(same_answers, session, name), limit_s=120)


@contextmanager
def injected(name: str, gpu: str, decode: str = "eager", ratio: float = 0.5, more: str = "") -> Iterator[PreTrainedModel]:
    """The bundled model, or a tiny one of a family with float32 weights, with its experts on both devices."""
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.yaml"
        rules.write_text(RULES.format(gpu=gpu, ratio=ratio, decode=decode, more=more))
        where: dict[str, Any] = {"device_map": gpu} if gpu.startswith("cuda") else {"threads": 1}
        source: Path | PreTrainedModel = demo_path()
        if name != DEMO:
            families, _ = _support()
            source = Path(folder) / "model"
            families.save_checkpoint(_case(name), source)
        model = optimize_and_load(source, rules, progress=False, **where)
        try:
            yield model
        finally:
            model.moegraft.context.close()
            del model
            gc.collect()


def _support() -> tuple[Any, Any]:
    """The tests' tiny models."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    from support import families, family_rows

    return families, family_rows


def _case(name: str) -> Any:
    families, _ = _support()
    return next(case for case in families.served_cases() if case.model_type == name)


def _stock(name: str, gpu: str) -> PreTrainedModel:
    families, _ = _support()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(demo_path()) if name == DEMO else families.build_model(_case(name))
    return model.to(gpu if gpu.startswith("cuda") else "cpu").eval()


def answer(model: PreTrainedModel, ids: torch.Tensor, count: int) -> tuple[list[int], torch.Tensor, float]:
    """`count` greedy tokens, their logits (count, vocabulary) float32, and the milliseconds of one."""
    settings = {
        "min_new_tokens": count,
        "max_new_tokens": count,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    start = time.perf_counter()
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
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


def engines_of(model: PreTrainedModel) -> list[Engine]:
    return list(model.moegraft.context.gpu_engines)


@torch.inference_mode()
def same_answers(session: Session, name: str) -> Iterator[Row]:
    """Stock, layer by layer and captured.

    Raises:
        RuntimeError: logits are off, or no step was captured.
    """
    gpu, count = gpu_of(session), 6 if session.emulated else NEW
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
            yield {
                "mode": decode,
                "token_ms": round(ms, 3),
                "same_tokens": same,
                "of": count,
                "logits_error": error,
                "replayed": replayed,
                "on_cpu": sum(each.on_cpu for each in statistics),
                "used": sum(each.used for each in statistics),
                "recoveries": sum(each.recoveries for each in statistics),
                "sampling_repeats": sampled[0] == sampled[1],
                "notices": sorted(set(messages)),
            }
            if not error <= LIMITS[dtype]:
                wrong.append(f"{decode}: logits are {error:.2%} off")
            if decode == "graph" and not replayed:
                wrong.append(f"no step was captured: {'; '.join(messages) or 'no reason is logged'}")
    if wrong:
        raise RuntimeError(f"{name}: {'; '.join(wrong)}")


def systems(session: Session) -> None:
    """The comparison at one ratio, where a token goes, the comparison at another, the ablation, drafts."""
    sizes: dict[str, Any] = {
        "threads": 0,
        "checkpoint": None,
        "prompt_sets": None,
        "weights": "int4",
        "layers": 2,
        "scale": 1,
        "rounds": 3,
        "new_tokens": 24,
    }
    prompts, ratios, compared, ablation = (32, 512), (0.25, 0.5), COMPARED, ABLATION
    if session.emulated:
        sizes |= {"scale": 16, "rounds": 1, "new_tokens": 3, "threads": 1}
        prompts, ratios, compared, ablation = (4,), (0.25,), ("all_cpu", "all, captured"), ()
    arguments = Namespace(gpu=session.device, **sizes)
    first, *others = ratios
    for name in compared:
        session.case(f"{name}, {first}", partial(one_system, session, name, first, prompts, arguments), limit_s=120)
    session.case("profile", partial(profile, session, first, arguments), limit_s=120)
    for ratio in others:
        for name in compared:
            session.case(f"{name}, {ratio}", partial(one_system, session, name, ratio, prompts, arguments), limit_s=120)
    for name in ablation:
        session.case(f"{name}, {first}", partial(one_system, session, name, first, prompts, arguments), limit_s=120)
    drafts = list(DRAFTS)[2:3] if session.emulated else list(DRAFTS)
    for name in drafts:
        session.case(f"draft: {name}", partial(draft, session, name, 1 if session.emulated else 4), limit_s=120)


def _probe(model: PreTrainedModel) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, 9), generator=torch.Generator().manual_seed(2))
    return model(ids.to(model.device)).logits.float().cpu()


@cache
def _expected(gpu: str, scale: int, layers: int, weights: str, threads: int) -> torch.Tensor:
    """The logits of `all_cpu`, once a process."""
    arguments = Namespace(gpu=gpu, checkpoint=None, scale=scale, layers=layers, weights=weights, threads=threads)
    with system("all_cpu", SHAPE, 0.25, arguments) as model:
        return _probe(model)


@torch.inference_mode()
def one_system(session: Session, name: str, ratio: float, prompts: tuple[int, ...], arguments: Namespace) -> Iterator[Row]:
    """
    Raises:
        RuntimeError: its logits are not those of `all_cpu`.
    """
    arguments.gpu = gpu_of(session)
    expected = _expected(arguments.gpu, arguments.scale, arguments.layers, arguments.weights, arguments.threads)
    start = time.perf_counter()
    with system(name, SHAPE, ratio, arguments) as model, notices() as messages:
        error = float((_probe(model) - expected).norm() / expected.norm())
        about = {"model": f"{SHAPE}, {arguments.layers} layers, 1/{arguments.scale} of the widths", "weights": arguments.weights}
        about |= {"system": name, "cache_ratio": ratio}
        yield {**about, "logits_error": error, "load_s": round(time.perf_counter() - start, 1)}
        for tokens in prompts:
            yield from hybrid_gpu.measure(model, about, Namespace(**{**vars(arguments), "prompts": [tokens]}))
        for engine in engines_of(model):
            yield {**about, **{f"engine: {key}": value for key, value in engine.report().items()}}
        if messages:
            yield {**about, "notices": sorted(set(messages))}
    if not error <= hybrid_gpu.TOLERANCE:
        raise RuntimeError(f"{name}: logits are {error:.1%} off those of all_cpu")


@torch.inference_mode()
def profile(session: Session, ratio: float, arguments: Namespace) -> Iterator[Row]:
    """Ten tokens, layer by layer and captured: what takes the time on either side; the second is kept as a trace."""
    from torch.profiler import ProfilerActivity

    arguments.gpu = gpu_of(session)
    activities = [ProfilerActivity.CPU] if session.emulated else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    for name in ("all, captured",) if session.emulated else ("all", "all, captured"):
        with system(name, SHAPE, ratio, arguments) as model:
            ids = torch.arange(3, 19, device=model.device)[None]
            hybrid_gpu.token_ms(model, ids, 10)
            with torch.profiler.profile(activities=activities) as seen:
                hybrid_gpu.token_ms(model, ids, 10)
        events = seen.key_averages()
        for side, time_us in (("host", "self_cpu_time_total"), ("device", "self_device_time_total")):
            ordered = sorted(events, key=lambda event, time_us=time_us: getattr(event, time_us, 0.0), reverse=True)  # type: ignore[misc]
            for event in ordered[: 8 if session.emulated else 25]:
                us = getattr(event, time_us, 0.0)
                if us:
                    yield {"system": name, "side": side, "name": event.key[:120], "count": event.count, "us_a_token": round(us / 10, 2)}
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "trace.json", Path(folder) / TRACE
        seen.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb") as target:
            shutil.copyfileobj(source, target)
        size = packed.stat().st_size
        if size <= MOST_BYTES:
            shutil.copyfile(packed, session.out / TRACE)
        yield {"trace_bytes": size, "kept": size <= MOST_BYTES}


@torch.inference_mode()
def draft(session: Session, name: str, prompts: int) -> Iterator[Row]:
    """The bundled model with one way to draft: SS-MoE's acceptance and costs, and the rate against that of `plain` in its rows."""
    options = DRAFTS[name]
    more = "" if options is None else DRAFT.format(options=", ".join(f"{key}: {value}" for key, value in options.items()))
    count = 8 if session.emulated else 96
    with injected(DEMO, gpu_of(session), more=more) as model:
        texts = [ids.to(model.device) for ids in speculative.prompts(prompts)]
        speculative.generate(model, texts[0], seed=0, new_tokens=count)
        rates = []
        for number, ids in enumerate(texts):
            start = time.perf_counter()
            speculative.generate(model, ids, seed=number, new_tokens=count)
            rates.append(count / (time.perf_counter() - start))
            yield {"provider": name, "new_tokens": count, "tokens_s": round(rates[-1], 2)}
        operator = speculative.operator_of(model)
        if operator is not None:
            found: Callable[[], Mapping[str, Any]] = operator.statistics
            yield {"provider": name, **{key: value for key, value in found().items() if isinstance(value, (int, float, list, tuple, str))}}
