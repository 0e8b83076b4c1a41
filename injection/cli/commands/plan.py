"""`moegraft plan`: predict the memory and the speed of a model with a rule file; `init`: write one for a machine, or convert one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

from moegraft.injection.cli.commands.doctor import measure_and_save, measure_disk_and_save
from moegraft.injection.cli.options import (
    BUNDLED,
    PROGRAM,
    JsonOption,
    MetaModelOptions,
    ModelOptions,
    OptionsError,
    PlannedModelOptions,
    TargetOptions,
    check_new_file,
    option,
    parse_sizes,
    takes_options,
)
from moegraft.injection.cli.output import (
    FINDINGS,
    Json,
    Terminal,
    columns,
    diagnostic_json,
    open_terminal,
    plural,
    user_errors,
    write_result,
)
from moegraft.injection.rules import Diagnostic, RuleErrors, read_rules
from moegraft.operators.atomic_file import write_file
from moegraft.operators.errors import UnsupportedModelError, human_bytes

if TYPE_CHECKING:
    from moegraft.injection.candidates import Candidate
    from moegraft.injection.estimate.forecast import DividedForecast, Forecast, TargetMachine
    from moegraft.injection.estimate.memory import PlannedModel
    from moegraft.injection.estimate.training import TrainingLoad
    from moegraft.injection.meta_model import MetaModel
    from moegraft.injection.planning import Plan
    from moegraft.injection.rules.ktransformers import Outcome

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
        lines, data = _lines(figures, meta_model), _as_json(figures, meta_model)
    write_result(open_terminal(), lines, data, as_json=json, ok=data["ok"])


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
    lines += _speed_lines(figures)
    lines += [str(notice) for notice in figures.plan.notices]
    if meta_model.unloadable is not None:
        lines.append(f"notice: {meta_model.unloadable}")
    if meta_model.mtp_bytes and not figures.plan.mtp:
        use = meta_model.why_no_mtp or "'draft: mtp' of speculative_draft drafts with them"
        lines.append(f"notice: the checkpoint has MTP layers, which are not loaded ({human_bytes(meta_model.mtp_bytes)} as stored): {use}")
    if not figures.fits:
        lines += [f"it does not fit: {_gap_text(figures)}; changes that would make it fit:"]
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


def _gap_text(figures: Forecast) -> str:
    """Return the memory that is needed and that is free, on each device where the model does not fit."""
    parts = [(figures.memory.needed, figures.available_bytes, "")] if not figures.fits_host else []
    if figures.gpu is not None and not figures.gpu.fits:
        parts.append((figures.gpu.needed, figures.gpu.available, " of the GPU" if figures.gpu.count == 1 else " of each GPU"))
    return ", and ".join(f"{human_bytes(needed)}{where} are needed and {human_bytes(free)} are free" for needed, free, where in parts)


def _speed_lines(figures: Forecast) -> list[str]:
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


def _as_json(figures: Forecast, meta_model: MetaModel) -> Json:
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


STANDARD_OUTPUT = Path("-")
Goal = Literal["decode", "prefill", "quality"]
CONTEXT = 4096


@user_errors(PROGRAM, wrong_rules=FINDINGS)
@takes_options
def init(
    options: MetaModelOptions,
    stated: TargetOptions,
    output: Annotated[Path, option("--output --out -o", "FILE", "The file to write; - is standard output.")] = Path("rules.yaml"),
    from_ktransformers_file: Annotated[
        Path | None, option("--from-ktransformers", "FILE", "Convert this KTransformers rule file; with --model, for that model.")
    ] = None,
    goal: Annotated[
        Goal | None,
        option("--goal", None, "Fast answers (decode, the default), fast prompts (prefill), or the most exact that fits (quality)."),
    ] = None,
    context: Annotated[int | None, option("--context", "N", f"Tokens of a sequence, prompt and answer; default: {CONTEXT}.", min=1)] = None,
    force: Annotated[bool, option("--force", None, "Overwrite an existing file.")] = False,
    json: JsonOption = False,
) -> None:
    """Write a rule file for this machine and this model: the best of all combinations of weight types, by prediction.

    Measures this machine first if it has not been measured (see doctor --measure). With a GPU, of this machine or stated,
    everything but the experts is placed there, and as many experts as fit. With --from-ktransformers nothing is predicted: the
    rules of that file are converted one by one, and those left out are listed. Exit code 0: the file is written; 1: nothing fits,
    or no rule can be converted; 2: a file or the model cannot be read, or the command is wrong.
    """
    if output != STANDARD_OUTPUT:
        check_new_file(output, "--out", force=force)
    terminal = open_terminal()
    if from_ktransformers_file is not None:
        given = {"goal": goal, **asdict(stated), "context": context, "gguf": options.gguf}
        names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
        if names:
            raise OptionsError(f"{', '.join(names)}: --from-ktransformers converts a file and predicts nothing; use moegraft plan for that")
        _convert_and_write(from_ktransformers_file, options, output, terminal, json=json)
    else:
        _predict_and_write(options, goal or "decode", context or CONTEXT, stated, output, terminal, json=json)


def _predict_and_write(
    options: ModelOptions, goal: Goal, context: int, stated: TargetOptions, output: Path, terminal: Terminal, *, json: bool
) -> None:
    from moegraft.injection.candidates import candidates, choose, file_text, packed_folder
    from moegraft.injection.cli.models import open_meta_model, target_machine
    from moegraft.injection.estimate import measure as store
    from moegraft.injection.estimate.memory import Workload
    from moegraft.operators.registry import load_registry

    target_machine(None, stated)  # reports errors of the options before a measurement, which takes a minute
    meta_model = open_meta_model(options)
    target = target_machine(store.load() or measure_and_save(terminal), stated)
    load = Workload(context, 1, min(512, context))
    tried = candidates(meta_model, load, target, load_registry())
    chosen = choose(tried, goal)
    if chosen is None:  # host memory does not suffice: experts may stay in files
        if target.measured is not None and target.measured.disk is None:
            target = replace(target, measured=measure_disk_and_save(target.measured, packed_folder(), terminal))
        tried += candidates(meta_model, load, target, load_registry(), in_files=True)
        chosen = choose(tried, goal)
    text = file_text(chosen, tried, meta_model, _about(options, context, meta_model, target), goal) if chosen else None
    if text is not None and output != STANDARD_OUTPUT:
        write_file(output, text)
    lines, notices = _chosen_lines(chosen, tried, output, text), []
    if chosen is not None and output != STANDARD_OUTPUT:
        commands = ("moegraft explain", "moegraft verify --rules", "local_chat --rules")
        notices = [f"next: {', '.join(f'{command} {quote(str(output))}{options.naming}' for command in commands)}"]
    data = _candidates_json(chosen, tried, meta_model, output, text)
    write_result(terminal, lines, data, as_json=json, ok=chosen is not None, notices=notices)


def _about(options: ModelOptions, context: int, meta_model: MetaModel, target: TargetMachine) -> list[str]:
    from moegraft.operators.machine import probe_machine

    gpu = target.gpu
    name = f"{options.model or BUNDLED}{f' with the weights of {Path(options.gguf).name}' if options.gguf else ''}"
    lines = [
        f"Written by 'moegraft init' for {name} ({meta_model.model_class}), context {context:,} tokens,",
        f"on a machine with {probe_machine().cores} cores and {human_bytes(target.available_bytes)} of memory to plan for",
    ]
    if gpu is None:
        return [*lines[:-1], f"{lines[-1]}, without a GPU."]
    each = f"{gpu.count} GPUs of {human_bytes(gpu.available_bytes)}, each" if gpu.count > 1 else "a GPU of"
    size = "" if gpu.count > 1 else f" {human_bytes(gpu.available_bytes)},"
    return [*lines[:-1], f"{lines[-1]}, and {each}{size}", f"planned as {gpu.rates.describe()}."]


def _chosen_lines(chosen: Candidate | None, tried: list[Candidate], output: Path, text: str | None) -> list[str]:
    from moegraft.injection.candidates import packed_folder

    if chosen is None or text is None:
        least = min(tried, key=lambda candidate: candidate.forecast.memory.needed).forecast
        gap, changes = _gap_text(least), "; ".join(least.would_fit)
        return [f"nothing fits: for the smallest of {len(tried)} candidates, {gap}; changes that would make it fit: {changes}"]
    if output == STANDARD_OUTPUT:
        return [text.removesuffix("\n")]
    choice, memory, gpu = chosen.choice, chosen.forecast.memory, chosen.forecast.gpu
    linears = f", linear layers as {choice.linears}" if choice.linears else ""
    needed = f"needs {memory.needed / (1 << 30):.2f} GiB"
    if choice.in_files:
        needed += f", {memory.frames / (1 << 30):.2f} of them for experts, which stay in files in {packed_folder()}"
    if gpu is not None:
        needed += (
            f" and {gpu.needed / (1 << 30):.2f} GiB of the GPU, where {gpu.experts_with_slot:,} of {gpu.experts:,} experts have a slot"
        )
    return [f"{output}: experts as {choice.experts}{linears}; {needed}", *_speed_lines(chosen.forecast)]


def _candidates_json(chosen: Candidate | None, tried: list[Candidate], meta_model: MetaModel, output: Path, text: str | None) -> Json:
    return {
        "ok": chosen is not None,
        "output": str(output) if text is not None else None,
        "rules": text,
        "chosen": tried.index(chosen) if chosen is not None else None,
        "candidates": [
            {
                "experts": candidate.choice.experts,
                "linears": candidate.choice.linears,
                "gpu": candidate.choice.gpu,
                "in_files": candidate.choice.in_files,
                **_as_json(candidate.forecast, meta_model),
            }
            for candidate in tried
        ],
    }


def _convert_and_write(source: Path, options: ModelOptions, output: Path, terminal: Terminal, *, json: bool) -> None:
    """Convert a KTransformers rule file, write the result if at least one rule is converted, and report the rules that are left out.

    Raises:
        RuleErrors: `source` cannot be read, or is no rule file of KTransformers.
        CheckpointError, UnsupportedModelError: there is no such model, or it cannot be built.
        typer.Exit: with 1, if nothing is written.
    """
    from moegraft.injection.cli.models import open_meta_model
    from moegraft.injection.rules.ktransformers import Paths, convert, diagnostics, file_text, read_their_rules
    from moegraft.operators.structure import kinds

    rules = read_their_rules(source)
    meta_model = open_meta_model(options) if options.model is not None else None
    paths = Paths.typical()
    if meta_model is not None:
        by_path = {path: kinds(path, module, meta_model.skeleton) for path, module in meta_model.skeleton.named_modules()}
        experts, linears = (tuple(path for path, of in by_path.items() if kind in of) for kind in ("experts", "linear"))
        paths = Paths(experts, linears)
    outcomes = convert(rules, paths)
    text = file_text(outcomes, source, f"{options.model} ({meta_model.model_class})" if meta_model is not None else None)
    mapped = sum(outcome.operator not in (None, "default") for outcome in outcomes)
    checked = _check(text, meta_model) if mapped else ()
    findings = (*diagnostics(outcomes), *checked)
    ok = mapped > 0 and not any(finding.severity == "error" for finding in checked)
    if ok and output != STANDARD_OUTPUT:
        write_file(output, text)
    for finding in () if json else findings:
        terminal.notice(str(finding))
    naming = options.naming or " --model M"
    following = f"next: moegraft check {quote(str(output))}{naming}, moegraft explain {quote(str(output))}{naming}"
    notices = [following] if ok and output != STANDARD_OUTPUT else []
    lines, data = _converted_lines(outcomes, ok, output, text), _converted_as_json(outcomes, findings, ok, output, text)
    write_result(terminal, lines, data, as_json=json, ok=ok, notices=notices)


def _check(text: str, meta_model: MetaModel | None) -> tuple[Diagnostic, ...]:
    """Return what `moegraft check` would report on the file."""
    from moegraft.injection.planning import plan
    from moegraft.operators.registry import load_registry

    registry = load_registry()
    try:
        rules = read_rules("rules.yaml", registry=registry, text=text)
        return plan(meta_model, rules, registry=registry).notices if meta_model is not None else rules.notices
    except RuleErrors as error:
        return error.diagnostics


def _converted_lines(outcomes: Sequence[Outcome], ok: bool, output: Path, text: str) -> list[str]:
    if not ok:
        return [f"nothing is written{'' if any(outcome.operator for outcome in outcomes) else ': no rule could be converted'}"]
    if output == STANDARD_OUTPUT:
        return [text.removesuffix("\n")]
    mapped = sum(outcome.operator is not None for outcome in outcomes)
    doubtful = sum(outcome.doubtful for outcome in outcomes)
    return [
        f"{output}: {plural(mapped, 'rule')} of {len(outcomes)}; {len(outcomes) - mapped} left out, "
        f"{doubtful} of them because no equivalent is known"
    ]


def _converted_as_json(outcomes: Sequence[Outcome], findings: Sequence[Diagnostic], ok: bool, output: Path, text: str) -> Json:
    return {
        "ok": ok,
        "output": str(output) if ok else None,
        "rules": text if ok else None,
        "source": [
            {
                "line": outcome.rule.position.line,
                "class": outcome.rule.operator,
                "operator": outcome.operator,
                "mapped": outcome.operator is not None,
                "doubtful": outcome.doubtful,
                "notes": outcome.notes,
            }
            for outcome in outcomes
        ],
        "diagnostics": [diagnostic_json(finding) for finding in findings],
    }
