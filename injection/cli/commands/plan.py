"""`moegraft plan`: predict the memory and the speed of a model with a rule file."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from moegraft.injection.cli.options import (
    PROGRAM,
    JsonOption,
    OptionsError,
    PlannedModelOptions,
    TargetOptions,
    option,
    parse_sizes,
    takes_options,
)
from moegraft.injection.cli.output import FINDINGS, Json, columns, open_terminal, user_errors, write_result
from moegraft.operators.errors import UnsupportedModelError, human_bytes

if TYPE_CHECKING:
    from moegraft.injection.estimate.forecast import DividedForecast, Forecast, TargetMachine
    from moegraft.injection.estimate.memory import PlannedModel
    from moegraft.injection.estimate.training import TrainingLoad
    from moegraft.injection.meta_model import MetaModel
    from moegraft.injection.planning import Plan

GPU_FIGURES = ("count", "weights", "kv_cache", "reserve", "slots", "needed", "available", "experts_with_slot", "experts")


@user_errors(PROGRAM, wrong_rules=FINDINGS)
@takes_options
def plan(
    options: PlannedModelOptions,
    stated: TargetOptions,
    context: Annotated[int, option("--context", "N", "Tokens a sequence holds, prompt and answer.", min=1)] = 4096,
    prompt: Annotated[int, option("--prompt", "N", "Tokens of a prompt, computed at once.", min=1)] = 512,
    batch: Annotated[int, option("--batch", "N", "Sequences at once.", min=1)] = 1,
    nodes: Annotated[
        str | None, option("--nodes", "N|SIZES", "Machines that share the experts: their number, or each one's memory.")
    ] = None,
    network: Annotated[
        float | None, option("--network", "GBIT/S", "Bandwidth between these machines; by default as measured, or 10.", min=0.01)
    ] = None,
    train: Annotated[
        bool, option("--train", None, "Plan to train LoRA adapters instead, in steps of --batch rows of --prompt tokens.")
    ] = False,
    rank: Annotated[int, option("--rank", "R", "Of these adapters, on all linear layers but the head.", min=1)] = 16,
    json: JsonOption = False,
) -> None:
    """Show the memory that a model needs with these rules, at rest, while loading and running, and its predicted speed.

    No weights are read. The speed is predicted from the rates of `moegraft doctor --measure`. Rules that ask for a GPU are planned
    for the GPUs of this machine, or those that --gpu-memory states. Exit code 0: the model fits; 1: it does not fit, or the rules
    are wrong; 2: a file or the model cannot be read, or the command is wrong.
    """
    from moegraft.injection.cli.models import model_and_rules, target_machine
    from moegraft.injection.estimate import measure as store
    from moegraft.injection.estimate.forecast import divided_forecast, forecast
    from moegraft.injection.estimate.memory import PlannedModel, Workload
    from moegraft.injection.estimate.training import TrainingLoad
    from moegraft.injection.planning import plan as make_plan

    target = target_machine(store.load(), stated)
    meta_model, rule_file, registry = model_and_rules(options)
    planned = make_plan(meta_model, rule_file, registry=registry)
    workload = Workload(context, batch, min(prompt, context))
    if train:
        if nodes is not None:
            raise OptionsError("--train plans for one machine: experts in several processes have no gradients; remove --nodes")
        lines, data = _training(TrainingLoad(batch, prompt, rank), PlannedModel(meta_model, planned, registry), target)
    elif nodes is not None:
        counted = nodes.strip().isdigit() and int(nodes) >= 1  # machines that are only counted have this one's memory
        memory = (target.available_bytes,) * int(nodes) if counted else parse_sizes(nodes, "--nodes") or ()
        divided = divided_forecast(meta_model, rule_file, planned, workload, memory, target, registry, network, store.load_network())
        lines, data = _divided(divided, meta_model, planned)
    else:
        figures = forecast(meta_model, planned, workload, target, registry)
        lines, data = _lines(figures, meta_model), as_json(figures, meta_model)
    write_result(open_terminal(), lines, data, as_json=json)
    if not data["ok"]:
        raise typer.Exit(FINDINGS)


def _lines(figures: Forecast, meta_model: MetaModel) -> list[str]:
    from moegraft.operators.cpu import kernel_in_use

    memory, load, kernel = figures.memory, figures.load, kernel_in_use()
    divided = kernel.memory_nodes > 1
    exact = "" if figures.cache.exact else ", from the config's numbers of heads"
    rows = [
        ("weights", human_bytes(memory.weights), ""),
        ("at rest", human_bytes(memory.at_rest), f"with {human_bytes(memory.program)} of Python and its libraries"),
        ("peak of loading", human_bytes(memory.peak_loading), ""),
        ("KV cache", human_bytes(memory.kv_cache), "on the GPU" if figures.gpu else f"{load.batch} x {load.context:,} tokens{exact}"),
        *([("experts", human_bytes(memory.frames), f"of {human_bytes(figures.framed_bytes)} in files")] if figures.framed_bytes else []),
        ("running", human_bytes(memory.running), f"with about {human_bytes(memory.activations)} for a prompt of {load.prompt:,} tokens"),
        ("free", human_bytes(figures.available_bytes), ""),
        ("threads", f"{kernel.threads}", f"on {kernel.memory_nodes} memory nodes, with a part of each matrix in memory" if divided else ""),
    ]
    lines = [f"{meta_model.model_class} by {figures.plan.files[0]}", *columns(rows, right=(1,)), *_gpu_lines(figures, exact)]
    lines += speed_lines(figures)
    lines += [str(notice) for notice in figures.plan.notices]
    if meta_model.unloadable is not None:
        lines.append(f"notice: {meta_model.unloadable}")
    if meta_model.mtp_bytes and not figures.plan.mtp:
        use = meta_model.why_no_mtp or "'draft: mtp' of speculative_draft drafts with them"
        lines.append(f"notice: the checkpoint has MTP layers, which are not loaded ({human_bytes(meta_model.mtp_bytes)} as stored): {use}")
    if not figures.fits:
        lines += [f"it does not fit: {gap_text(figures)}; changes that would make it fit:"]
        lines += [f"  - {sentence}" for sentence in figures.would_fit]
    return lines


def _training(load: TrainingLoad, planned: PlannedModel, target: TargetMachine) -> tuple[list[str], Json]:
    """Return the figures of training as text and as JSON."""
    from moegraft.injection.estimate.forecast import tokens_text
    from moegraft.injection.estimate.training import training_forecast

    untrained = planned.plan.untrained
    if untrained is not None:
        raise UnsupportedModelError(f"this model cannot be trained with these rules: {untrained}")
    figures = training_forecast(planned, load, target.measured)
    fits = figures.peak <= target.available_bytes
    sums = {"step": figures.step, "peak": figures.peak, "available": target.available_bytes}
    rows = [
        ("weights", human_bytes(figures.weights), f"frozen; with {human_bytes(figures.program)} of Python and its libraries"),
        ("adapters", human_bytes(figures.adapters), f"{figures.parameters:,} parameters of rank {load.rank}, gradients and AdamW"),
        ("checkpoints", human_bytes(figures.checkpoints), f"of activations, {load.batch} x {load.length:,} tokens"),
        ("backward pass", human_bytes(max(figures.layer, figures.head)), "of one layer" if figures.layer > figures.head else "of the head"),
        ("peak", human_bytes(figures.peak), ""),
        ("free", human_bytes(target.available_bytes), ""),
    ]
    speed = "speed: not predicted: this machine's rates are not measured; run: moegraft doctor --measure"
    if figures.missing:
        speed = f"speed: not predicted: no rate is measured for {', '.join(figures.missing)}"
    elif figures.tokens_s is not None and figures.left_out:
        speed = f"at most {tokens_text(figures.tokens_s)}, without {figures.left_out}"
    elif figures.tokens_s is not None:
        speed = f"about {tokens_text(figures.tokens_s)}"
    lines = [f"{planned.meta_model.model_class} by {planned.plan.files[0]}, training", *columns(rows, right=(1,)), speed]
    if not fits:
        needed, free = human_bytes(figures.peak), human_bytes(target.available_bytes)
        lines.append(f"it does not fit: {needed} are needed and {free} are free; give fewer tokens in a step, or a smaller weight type")
    return lines, {"ok": fits, **asdict(figures), **sums}


def _divided(divided: DividedForecast, meta_model: MetaModel, planned: Plan) -> tuple[list[str], Json]:
    """Return the figures of several machines as text and as JSON."""
    from moegraft.injection.estimate.forecast import tokens_text

    table = [("rank", "experts", "needed", "free", "")]
    for node in divided.nodes:
        gap = "" if node.fits else "does not fit"
        table.append((str(node.rank), f"{node.share:.0%}", human_bytes(node.needed_bytes), human_bytes(node.available_bytes), gap))
    lines = [f"{meta_model.model_class} by {planned.files[0]} on {len(divided.nodes)} machines", *columns(table, right=(0, 1, 2, 3))]
    speed = divided.speed
    if speed is None or speed.decode_tokens_s is None or speed.prefill_tokens_s is None:
        lines.append("speed: not predicted: this machine's rates are not measured; run: moegraft doctor --measure")
    else:
        decode, prefill = tokens_text(speed.decode_tokens_s), tokens_text(speed.prefill_tokens_s)
        lines.append(
            f"predicted: decode {decode}, prefill {prefill}, if all are as fast as this machine, with {divided.network_gbit:g} Gbit/s"
        )
    nodes = [asdict(node) for node in divided.nodes]
    return lines, {"ok": divided.fits, "nodes": nodes, "speed": asdict(divided.speed) if divided.speed else None}


def _gpu_lines(figures: Forecast, exact: str) -> list[str]:
    """Return the memory on each GPU."""
    gpu, load = figures.gpu, figures.load
    if gpu is None:
        none = "the rules ask for a GPU, and this machine has none: everything is planned for the CPU (--gpu-memory 24GiB plans for a GPU)"
        return [none] if figures.without_gpu else []
    share = f" ({gpu.experts_with_slot / gpu.experts:.0%})" if gpu.experts else ""
    rows = [
        ("weights", human_bytes(gpu.weights), "all but the experts in host memory"),
        ("KV cache", human_bytes(gpu.kv_cache), f"{load.batch} x {load.context:,} tokens{exact}"),
        ("reserve", human_bytes(gpu.reserve), "for activations, PyTorch and the display"),
        ("expert slots", human_bytes(gpu.slots), f"{gpu.experts_with_slot:,} of {gpu.experts:,} experts{share}"),
        ("total", human_bytes(gpu.needed), ""),
        ("free", human_bytes(gpu.available), ""),
    ]
    return ["on the GPU:" if gpu.count == 1 else f"on each of {gpu.count} GPUs:", *columns(rows, right=(1,))]


def gap_text(figures: Forecast) -> str:
    """Return the memory that is needed and that is free, on each device where the model does not fit."""
    parts = [(figures.memory.needed, figures.available_bytes, "")] if not figures.fits_host else []
    if figures.gpu is not None and not figures.gpu.fits:
        parts.append((figures.gpu.needed, figures.gpu.available, " of the GPU" if figures.gpu.count == 1 else " of each GPU"))
    return ", and ".join(f"{human_bytes(needed)}{where} are needed and {human_bytes(free)} are free" for needed, free, where in parts)


def speed_lines(figures: Forecast) -> list[str]:
    """Return the predicted speed as text."""
    from moegraft.injection.estimate.forecast import tokens_text

    speed = figures.speed
    if speed is None or speed.decode_tokens_s is None or speed.prefill_tokens_s is None:
        return [f"speed: {figures.no_speed}"]
    each = f" over {figures.load.batch} sequences" if figures.load.batch > 1 else ""
    rough = "; rough: other programs ran while the rates were measured" if figures.rough else ""
    decode, prefill = tokens_text(speed.decode_tokens_s), tokens_text(speed.prefill_tokens_s)
    lines = [f"predicted: decode {decode}{each}, prefill {prefill}{rough}"]
    if figures.framed_bytes:
        lines.append("  with experts read from the disk as with random routing; real texts repeat more of them")
    if figures.gpu_rates is not None:
        lines.append(f"  from {figures.gpu_rates.describe()}, and cache hits as with random routing")
    return lines


def as_json(figures: Forecast, meta_model: MetaModel) -> Json:
    """Return all figures, in bytes and tokens per second."""
    from moegraft.operators.cpu import kernel_in_use

    memory, kernel = figures.memory, kernel_in_use()
    sums = {"at_rest": memory.at_rest, "peak_loading": memory.peak_loading, "running": memory.running, "needed": memory.needed}
    return {
        "ok": figures.fits,
        "model_class": meta_model.model_class,
        "load": asdict(figures.load),
        "memory_bytes": {**asdict(memory), **sums, "available": figures.available_bytes},
        "bytes_by_device": figures.bytes_by_device,
        "gpu_bytes": {name: getattr(figures.gpu, name) for name in GPU_FIGURES} if figures.gpu else None,
        "gpu_rates": asdict(figures.gpu_rates) if figures.gpu_rates else None,
        "threads": kernel.threads,
        "memory_nodes": kernel.memory_nodes,
        "speed": asdict(figures.speed) if figures.speed else None,
        "no_speed": figures.no_speed,
        "rough": figures.rough,
        "would_fit": figures.would_fit,
        "unloadable": meta_model.unloadable,
        "mtp_layers": {"stored_bytes": meta_model.mtp_bytes, "loaded": figures.plan.mtp},
    }
