"""`moegraft quantize`: write a model to a GGUF file, its matrices in types of a few bits, which this program and llama.cpp load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, TypeAlias

from moegraft.injection.cli.options import (
    PROGRAM,
    Fields,
    JsonOption,
    ModelOptions,
    OptionsError,
    check_new_file,
    option,
    takes_options,
    talks_to_user,
)
from moegraft.injection.cli.output import Json, Terminal, columns, open_terminal, plural, user_errors, write_result
from moegraft.injection.texts import text_content

if TYPE_CHECKING:
    import torch

    from moegraft.injection.checkpoint.gguf.export import ExportPlan
    from moegraft.injection.meta_model import MetaModel

NO_IMATRIX = "none"
DEFAULT_TYPE = "Q4_K"
DEFAULT_TOKENS = 16384
FEW_TOKENS = 512  # llama.cpp refuses less than a context of as many
_RulesOption: TypeAlias = Annotated[
    str | None, option("--rules", "FILE", "Rules that the model is run with over that text, where memory is short; default: cpu.")
]


@user_errors(PROGRAM)
@takes_options
def quantize(
    options: Annotated[ModelOptions, Fields("model", "rules", "gguf", "threads", "trust_remote_code", rules=_RulesOption)],
    out: Annotated[Path, option("--out -o", "FILE.gguf", "The file to write.")],
    weights: Annotated[
        str,
        option(
            "--weights",
            "TYPES",
            "Types: Q4_K for all matrices, some by role and layers, as in Q4_K,down=Q6_K,down@0-3=Q8_0, or a YAML file with "
            "such a mapping.",
        ),
    ] = DEFAULT_TYPE,
    imatrix: Annotated[
        str | None,
        option(
            "--imatrix",
            "TEXT",
            "A text file like the model's later use: errors are weighted by what its tokens feed into each weight; "
            "none: all count equally; default: a short bundled text.",
        ),
    ] = None,
    tokens: Annotated[int, option("--tokens", "N", "Tokens of the text to use.", min=1)] = DEFAULT_TOKENS,
    window: Annotated[int, option("--window", "N", "Tokens of one forward pass.", min=2)] = 512,
    force: Annotated[bool, option("--force", None, "Overwrite an existing file.")] = False,
    json: JsonOption = False,
) -> None:
    """Quantise a model's weights, and write them to a GGUF file.

    The file loads here, as --model FILE, and in llama.cpp. Roles are gate, up and down of experts, attention, dense
    (other layers between, shared experts too), embedding and output; of the types for a matrix the last counts, and roles without one
    get Q8_0. Norms, biases and routers stay float32. Where rows are no whole number of a type's blocks, the same type as in llama.cpp
    takes its place, which is reported. Weights are read one matrix at a time; memory is needed to run the model over the text of
    --imatrix. Exit code 0: the file is written; 2: a file or the model cannot be read or written, or the command is wrong.
    """
    check_new_file(out, "--out", force=force)
    if out.suffix != ".gguf":
        raise OptionsError(f"--out {out}: the name of a GGUF file ends with .gguf")
    from moegraft.injection.checkpoint.gguf.export import plan_export, read_types, with_written_mtp, write_export
    from moegraft.injection.cli.models import open_meta_model, short_name
    from moegraft.operators.atomic_file import NotNeededError, new_file
    from moegraft.operators.errors import human_bytes
    from moegraft.operators.weight_formats import GGUF_TYPES

    try:
        choices = read_types(weights)
    except ValueError as error:
        raise OptionsError(f"--weights: {error}") from error
    text = text_content(None if imatrix in (None, NO_IMATRIX) else Path(imatrix), "calibration")
    terminal = open_terminal()
    meta = open_meta_model(options, weights=True)
    written = with_written_mtp(meta)
    assert written.weights is not None, "a model that is built with its weights has them"
    plan = plan_export(written.weights, written.skeleton, choices)
    rounded = _rounded(meta)
    importance: Mapping[str, torch.Tensor] = {}
    if imatrix != NO_IMATRIX and any(GGUF_TYPES[name].scaled for name in plan.by_type()):
        # A folder that cannot be written and a full disk show before the text is run.
        with new_file(out, replace=force) as file:
            os.posix_fallocate(file.fileno(), 0, plan.nbytes)
            raise NotNeededError
        importance = _importance(options, meta, text, imatrix or "the bundled text", tokens, window, terminal)
    if not talks_to_user():
        return  # rank 0 writes the file
    name = short_name(options.model)
    with terminal.stage("quantising", plan.nbytes, "B") as advance:
        notices = write_export(plan, out, meta.source.folder, name, importance, advance, replace=force)
    if meta.mtp_bytes and not plan.further:
        notices.append(
            f"MTP layers are left out ({human_bytes(meta.mtp_bytes)} as stored): GGUF files of this family have none, or none are computed"
        )
    for notice in (*rounded, *_fallbacks(plan), *notices):
        terminal.notice(notice)
    write_result(terminal, _lines(plan, out, options), _as_json(plan, out, importance), as_json=json)


def _importance(
    options: ModelOptions, meta: MetaModel, text: bytes, name: str, tokens: int, window: int, terminal: Terminal
) -> Mapping[str, torch.Tensor]:
    from moegraft.injection.cli.models import load_model, text_ids
    from moegraft.injection.importance import measure_importance

    loaded = load_model(options, terminal)
    ids = text_ids(loaded, text, name, tokens)
    assert meta.weights is not None, "a model that is built with its weights has them"
    if len(ids) < FEW_TOKENS:
        terminal.notice(
            f"--imatrix: {name} has {plural(len(ids), 'token')}, which say little about a model's weights: give a text of at least "
            f"{FEW_TOKENS} tokens, better {DEFAULT_TOKENS}"
        )
    with terminal.stage("measuring importance", len(ids)) as advance:
        return measure_importance(loaded.model, meta.weights, meta.skeleton, ids, window, advance)


def _rounded(meta: MetaModel) -> list[str]:
    """Return a notice if the file or checkpoint has its weights in few bits already."""
    from torch import nn

    from moegraft.operators.structure import is_experts

    assert meta.weights is not None, "a model that is built with its weights has them"
    paths = [path for path, module in meta.skeleton.named_modules() if isinstance(module, nn.Linear) or is_experts(path, module)]
    stored = [types for path in paths if (types := meta.weights.stored_types(path)) is not None]
    names = sorted({name for types in stored for name in (types.gate_up, types.down)} - {"float32", "float16", "bfloat16"})
    if not names:
        return []
    return [
        f"the model's weights are rounded already ({', '.join(names)}), and this file rounds them once more: one that is made from the "
        "checkpoint in floating point is closer to the model"
    ]


def _fallbacks(plan: ExportPlan) -> list[str]:
    """Return one notice for each pair of types."""
    by_types: dict[tuple[str, str], list[str]] = {}
    for tensor in plan.fallbacks():
        by_types.setdefault((tensor.wanted, tensor.type), []).append(f"{tensor.name} (rows of {tensor.shape[-1]})")
    return [
        f"{plural(len(names), 'tensor')} in {used} instead of {wanted}, whose blocks do not divide their rows: {names[0]}"
        + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for (wanted, used), names in by_types.items()
    ]


def _lines(plan: ExportPlan, out: Path, options: ModelOptions) -> list[str]:
    rows = [("type", "bytes")] + [(kind, f"{size:,}") for kind, size in plan.by_type().items()]
    model = "" if options.model is None else f"--model {quote(options.model)} "
    return [
        *columns(rows, right=(1,)),
        f"{out}: written, {plan.nbytes / plan.weights * 8:.2f} bits per weight; to chat: local_chat {model}--gguf {quote(str(out))}",
    ]


def _as_json(plan: ExportPlan, out: Path, importance: Mapping[str, object]) -> Json:
    return {
        "file": out,
        "bytes": plan.nbytes,
        "weights": plan.weights,
        "bytes_by_type": plan.by_type(),
        "importance": bool(importance),
        "fallbacks": [{"tensor": tensor.name, "wanted": tensor.wanted, "type": tensor.type} for tensor in plan.fallbacks()],
    }
