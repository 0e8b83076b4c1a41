"""Every damaged file loads or ends in one typed error that names it, soon and in little memory, and nothing else is read or changed.

    pytest tests/test_fuzz.py                 # a few hundred cases
    pytest --long -n 2 tests/test_fuzz.py     # 100,000 cases

A case is an undamaged file after one to three edits that its kind and number determine. `ONCE` has what once did something else.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import signal
import struct
import sys
import sysconfig
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT
from support.gguf_files import BlockType, write_gguf
from transformers import AutoModelForCausalLM, DynamicCache, MixtralConfig, OlmoeConfig, PreTrainedModel, Qwen3MoeConfig

from moegraft.injection import build_meta_model, optimize_and_load, plan, read_rules
from moegraft.injection.cli.chat.conversation import Message, SavedChat, read_chat, write_chat
from moegraft.injection.demo import demo_path
from moegraft.injection.rules import RuleErrors
from moegraft.injection.rules.ktransformers import Paths, convert, read_their_rules
from moegraft.operators.errors import MoegraftError
from moegraft.operators.experts.packed_cache import PackedCache, key_for
from moegraft.operators.layout import read_layout
from moegraft.operators.registry import load_registry
from moegraft.operators.sparsity import read_thresholds

SECONDS = 2.0  # of the CPU
FILE_COPIES, OTHER_BYTES = 4, 64 << 20  # memory: four times the file, and a constant for what does not depend on it
CHUNK = 500


# Edits. Each takes a file and returns another.

Edit = Callable[[bytes, random.Random], bytes]
INTEGERS = (0, 1, 2, 3, 7, 32, 127, 255, 256, 65536, *(2**bits + near for bits in (31, 32, 53, 63, 64) for near in (-1, 0, 1)), 10**30)
TEXTS = (
    *("", "a", "\0", "\ud800", "é", "\U0001f600", "\u202e", "../outside", "/", ".", "nan", "-1", "1e400", "bfloat16", "int8", "F8_E4M3"),
    *("a" * 5000, "${x}", "%s%n", "{}", "[" * 50, "\\N{BULLET}", "\\x", "model", "silu"),
)
VALUES: tuple[object, ...] = (
    *(None, True, False, *INTEGERS, *(-number for number in INTEGERS), 0.5, -0.5, 1e308, float("nan"), float("inf")),
    *(*TEXTS, [], {}, [[]], [0], [1, 2], [-1, -1], ["a"], {"a": 1}, [None], [[1, 2], [3]]),
)


def _bytes_edited(data: bytes, chance: random.Random) -> bytes:
    """Edit bytes; the beginning, where headers are, is as likely as all that follows."""
    if not data:
        return chance.randbytes(chance.randint(1, 20))
    end = min(len(data), 1 << chance.randint(3, 20))
    at = chance.randrange(end)
    match chance.randrange(9):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at] + chance.randbytes(1) + data[at + 1 :]
        case 2 | 3:
            form, size = chance.choice([("<Q", 8), ("<I", 4), (">I", 4), ("<H", 2)])
            number = chance.choice(INTEGERS) * chance.choice((1, 1, -1)) % (1 << 8 * size)
            return data[:at] + struct.pack(form, number) + data[at + size :]
        case 4:
            return data[:at]
        case 5:
            return data[:at] + data[at + chance.randint(1, 64) :]
        case 6:
            return data[:at] + chance.randbytes(chance.randint(1, 16)) + data[at:]
        case 7:
            length = chance.randint(1, 256)
            return data[: at + length] + data[at:]
        case _:
            other = chance.randrange(end)
            length = chance.randint(1, 64)
            return data[:at] + data[other : other + length] + data[at + length :]


def _places(value: Any, places: list[tuple[Any, Any]]) -> None:
    """Collect (container, key) of every value within `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        places.append((value, key))
        _places(inner, places)


def _json_edited(value: Any, chance: random.Random) -> Any:
    """Edit one place of JSON data, in place."""
    places: list[tuple[Any, Any]] = []
    _places(value, places)
    if not places or chance.random() < 0.01:
        return copy.deepcopy(chance.choice(VALUES))
    container, key = chance.choice(places)
    found = container[key]
    match chance.randrange(8):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[chance.choice([*TEXTS, *container])] = container.pop(key)
        case 1 | 2 if isinstance(container, list):
            container.insert(key, copy.deepcopy(found))
        case 3 if isinstance(found, int | float) and not isinstance(found, bool):
            container[key] = chance.choice([found + 1, found - 1, -found, found * 1000, found / 3, float(found), str(found), [found]])
        case 3 if isinstance(found, str):
            at = chance.randrange(len(found) + 1)
            container[key] = found[:at] + chance.choice(TEXTS) + found[at + chance.randint(0, 3) :]
        case 4:
            other, other_key = chance.choice(places)
            container[key] = copy.deepcopy(other[other_key])
        case 5 if isinstance(container, dict):
            container[chance.choice(TEXTS)] = copy.deepcopy(chance.choice(VALUES))
        case 6:
            for _ in range(chance.choice((1, 3, 300))):
                found = chance.choice(([found], {"a": found})) if chance.random() < 0.5 else [found]
            container[key] = found
        case _:
            container[key] = copy.deepcopy(chance.choice(VALUES))
    return value


def _as_json(value: object, chance: random.Random) -> bytes:
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5, indent=chance.choice((None, None, 1)))
    if chance.random() < 0.02:
        text = text.replace('"', "'", 1) if chance.random() < 0.5 else "[" * 100_000 + text
    return text.encode("utf-8", "surrogatepass")


def json_file(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.15:
        return _bytes_edited(data, chance)
    try:
        return _as_json(_json_edited(json.loads(data), chance), chance)
    except (ValueError, RecursionError, KeyError, AttributeError):  # an earlier edit left no JSON
        return _bytes_edited(data, chance)


def safetensors_file(data: bytes, chance: random.Random) -> bytes:
    """Edit the JSON of the header, with its length right, or bytes."""
    size = int.from_bytes(data[:8], "little")
    if chance.random() < 0.2 or size > len(data):
        return _bytes_edited(data, chance)
    try:
        header = json.loads(data[8 : 8 + size])
        about = header.get("__metadata__", {})
        inner = [name for name, value in about.items() if chance.random() < 0.5 and value[:1] in "[{"]
        if inner:  # JSON as text within JSON
            about[inner[0]] = _as_json(_json_edited(json.loads(about[inner[0]]), chance), chance).decode("utf-8", "replace")
        else:
            header = _json_edited(header, chance)
        text = _as_json(header, chance)
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
        return _bytes_edited(data, chance)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


WORDS = (
    *("0", "-1", "1.5", "true", "no", "null", "~", "'0'", "hybrid_expert", "layers.1.", "(", "(a+)+$", "KExpertsCPU", "0-99", "9-1"),
    *("router", "experts", "linear", "int4", "auto", "cuda:1", "default", "${x}", "${weights}", "[a, b]", "{a: 1}", "extends", "cpu"),
    *("expect", "any", "recursive", "generate_device", "kwargs", "class", "match", "torch.nn.Linear", "999999999999999999999", "1e400"),
)
PIECES = (
    *"\"'{}[]:,#&*!|>%@`-?~\n\t \\\0.$(+",
    *(
        "${",
        "${x}",
        "\r",
        "\ufeff",
        "é",
        "\U0001f600",
        "\u202e",
        "\x85",
        "\u2028",
        "<<: *a",
        "&a ",
        "!!python/name:os.system ",
        "---\n",
        "...\n",
    ),
    *("? ", "- ", "  ", '"\\x', '"\\u12', '"\\UFFFFFFFF"', '"\\N"', "[" * 40, "{a: " * 40, "(" * 200, "a" * 5000, "9" * 400, "(?P<a>"),
    *("[[a-", "{9999999}", "(?i:", r"\N{BULLET}", "(?<=a*)", "# ", "\n- ", "\n  "),
)


def text_file(data: bytes, chance: random.Random) -> bytes:
    """Edit words, lines and characters of a rule file, most of which leaves it YAML."""
    if chance.random() < 0.1:
        return _bytes_edited(data, chance)
    text = data.decode("utf-8", "replace") or "x"
    lines = text.splitlines(keepends=True)
    at = chance.randrange(len(text))
    match chance.randrange(8):
        case 0 | 1 | 2:
            begin = max(text.rfind(mark, 0, at) for mark in " :,{}[]\n'\"") + 1
            end = min((found for mark in " :,{}[]\n'\"" if (found := text.find(mark, begin)) >= 0), default=len(text))
            return (text[:begin] + chance.choice([*WORDS, *text.split()]) + text[end:]).encode()
        case 3:
            return (text[:at] + chance.choice(PIECES) + text[at:]).encode()
        case 4:
            return (text[:at] + text[at + chance.randint(1, 30) :]).encode()
        case 5:
            line = chance.randrange(len(lines))
            return "".join([*lines[:line], *lines[line : line + chance.randint(1, 4)] * 2, *lines[line:]]).encode()
        case 6:
            line = chance.randrange(len(lines))
            indented = " " * chance.randint(0, 8) + lines[line].lstrip(" ")
            return "".join([*lines[:line], indented, *lines[line + 1 :]]).encode()
        case _:
            chance.shuffle(lines)
            return "".join(lines).encode()


# Kinds of files.


@dataclass(frozen=True, slots=True)
class Target:
    """A file of one kind in a folder of its own, where all its neighbours are right.

    Attributes:
        originals: undamaged contents.
        read: reads the file as a user's command does.
    """

    file: Path
    originals: Mapping[str, bytes]
    edit: Edit
    read: Callable[[], object]


SIZES = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}


def tiny_qwen() -> PreTrainedModel:
    torch.manual_seed(0)
    own = {"moe_intermediate_size": 24, "num_experts": 3, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**SIZES, **own, hidden_size=32, head_dim=16, intermediate_size=32, num_hidden_layers=1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def shipped_rules() -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((ROOT / "rules").glob("*.yaml"))}


EVERY_KEY = rb"""version: 1
extends: cpu-exact
vars: {cache: 0.5, weights: int8}
requires: {model_type: qwen3_moe}
rules:
- id: experts
  match: {name: '\.mlp\.experts$', class: transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts, kind: experts, layers: "0-3"}
  replace:
    class: hybrid_experts
    kwargs: {weights: "${weights}", cache_dir: "~/x", cache: {policy: lru, ratio: "${cache}"}, prefetch: {lookahead: 2}}
  expect: 1
- match:
    class: torch.nn.Linear
  replace: {class: default}
  recursive: false
  expect: any
"""
# The constructs of KTransformers' own files: anchored names and lookaheads, devices by phase, backends, `default` with a device.
THEIRS = {
    "experts": rb"""- match:
    name: "^model\\.layers\\.(0|[1-9]|[345][0-9])\\.mlp\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts     # custom MoE Kernel with expert paralleism
    kwargs:
      prefill_device: "cuda:0"
      prefill_op: "KExpertsTorch"
      generate_device: "cpu"
      generate_op: "KExpertsCPU"
      backend: AMXInt4
      out_device: "cuda:0"
  recursive: False # don't recursively inject submodules of this module
""",
    "linear": rb"""- match:
    name: "^model\\.layers\\.(?!.*self_attn\\.kv_b_proj).*$"  # regular expression
    class: torch.nn.Linear  # only match modules matching name and class simultaneously
  replace:
    class: ktransformers.operators.linear.KTransformersLinear  # optimized Kernel on quantized data types
    kwargs:
      generate_device: "cuda"
      prefill_device: "cuda"
      generate_op: "KLinearMarlin"
      prefill_op: "KLinearTorch"
""",
    "all": rb"""- match: {class: ktransformers.models.modeling_deepseek.DeepseekV2YarnRotaryEmbedding}
  replace:
    class: ktransformers.operators.RoPE.YarnRotaryEmbedding
    kwargs: {generate_device: "cuda", prefill_device: "cuda"}
- match: {name: '^model\.layers\..*\.mlp$', class: ktransformers.models.modeling_deepseek.DeepseekV2MoE}
  replace:
    class: ktransformers.operators.experts.KDeepseekV2MoE
    kwargs: {generate_device: "cuda:1", prefill_device: "cuda:1"}
- match: {class: ktransformers.models.modeling_deepseek_v3.MoEGate}
  replace: {class: ktransformers.operators.gate.KMoEGate}
- match: {name: "^model$"}
  replace:
    class: "ktransformers.operators.models.KDeepseekV2Model"
    kwargs: {per_layer_prefill_intput_threshold: 0, transfer_map: {10: "cuda:1", 20: "cuda:2"}}
- match: {name: "^model.embed_tokens"}
  replace: {class: "default", kwargs: {generate_device: "cpu", prefill_device: "cpu"}}
- match: {name: "^lm_head", class: torch.nn.Linear}
  replace: {class: ktransformers.operators.linear.KTransformersLinear, kwargs: {generate_op: "VLinearMarlin"}}
- match: {name: "^model\\.layers\\..*\\.self_attn$"}
  replace: {class: ktransformers.operators.attention.KDeepseekV2Attention, kwargs: {absorb_for_prefill: False}}
""",
}


def rule_files(folder: Path) -> Target:
    """Read against a model's modules, as `moegraft check --model` does."""
    tiny_qwen().config.save_pretrained(folder / "model")
    model, registry, file = build_meta_model(folder / "model"), load_registry(), folder / "rules.yaml"
    originals = {**shipped_rules(), "every key": EVERY_KEY, **{f"theirs {name}": text for name, text in THEIRS.items()}}
    return Target(file, originals, text_file, lambda: plan(model, read_rules(file, registry=registry), registry=registry))


def their_rule_files(folder: Path) -> Target:
    """Converted, as `moegraft init --from-ktransformers` does."""
    file, paths = folder / "theirs.yaml", Paths.typical()
    return Target(file, THEIRS, text_file, lambda: convert(read_their_rules(file), paths))


def load(folder: Path, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = optimize_and_load(folder, "cpu-exact", progress=False, threads=1, **options)
    return model


def safetensors_files(folder: Path) -> Target:
    model = tiny_qwen()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    originals = {"float32": file.read_bytes()}
    model.bfloat16().save_pretrained(folder)
    originals["bfloat16"] = file.read_bytes()
    return Target(file, originals, safetensors_file, lambda: load(folder))


def indexes(folder: Path) -> Target:
    tiny_qwen().save_pretrained(folder, max_shard_size="20KB")
    file = folder / "model.safetensors.index.json"
    return Target(file, {"index": file.read_bytes()}, json_file, lambda: load(folder))


def gguf_files(folder: Path) -> Target:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_experts": 3, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(OlmoeConfig(**SIZES, **sizes))
    model.config.save_pretrained(folder)
    file = folder / "model.gguf"
    originals = {}
    for kind in (BlockType.F32, BlockType.BF16, BlockType.Q8_0, BlockType.Q4_0, BlockType.Q5_1):
        write_gguf(file, model, {"ffn": kind, "attn_q.": kind})
        originals[kind.name] = file.read_bytes()
    return Target(file, originals, _bytes_edited, lambda: load(folder, gguf=file))


def packed_files(folder: Path) -> Target:
    """Files of the packed experts' cache: a damaged one is not used."""
    model = tiny_qwen()
    module = next(module for path, module in model.named_modules() if path.endswith("experts"))
    layout = read_layout(module)
    cache = PackedCache(folder)
    key = key_for("a" * 64, layout, "int8")

    def fill(packed: Any) -> None:
        for expert in range(layout.num_experts):
            for part in layout.parts():
                packed.pack(expert, part, layout.cut(part, module.get_parameter(layout.parameter(part))[expert].detach()).numpy())

    cache.build(key, layout, fill)
    file = cache.path(key)
    right = cache.open(key, layout)
    assert right is not None
    expected = right.buffer.tobytes()

    def read() -> None:
        found = cache.open(key, layout)
        assert found is None or found.buffer.tobytes() == expected, "damaged experts are used"

    return Target(file, {"int8": file.read_bytes()}, packed_file, read)


def packed_file(data: bytes, chance: random.Random) -> bytes:
    """Edit the header with its checksum right, or bytes."""
    if chance.random() < 0.5:
        return _bytes_edited(data, chance)
    start = len(b"moegraft-experts") + 8
    size = int.from_bytes(data[start - 8 : start - 4], "little")
    try:
        body = _as_json(_json_edited(json.loads(data[start : start + size]), chance), chance)
    except (ValueError, RecursionError, KeyError, AttributeError):
        return _bytes_edited(data, chance)
    header = data[: start - 8] + len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
    return header.ljust(1 << 16, b"\0")[: 1 << 16] + data[1 << 16 :]


def thresholds_files(folder: Path) -> Target:
    file = folder / "moegraft_thresholds.json"

    def read() -> None:
        found = read_thresholds(file)
        for name in found.layers:
            found.threshold(name, found.grid[-1] / 2, "layer")
            found.threshold(name, found.grid[0], "global")

    return Target(file, {"demo": (demo_path() / file.name).read_bytes()}, json_file, read)


def saved_chats(folder: Path) -> Target:
    model = load_in_memory(tiny_qwen())
    cache, ids = DynamicCache(config=model.config), torch.arange(5)[None]
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    messages = [Message("system", "Answer."), Message("user", "a\U0001f600"), Message("assistant", "b")]
    file = folder / "chat.safetensors"
    write_chat(file, model, SavedChat(messages, ids[0].tolist(), cache))
    originals = {"chat": file.read_bytes()}

    def read() -> None:
        for message in read_chat(file, model).messages:
            message.content.encode()  # it can be shown

    return Target(file, originals, safetensors_file, read)


def load_in_memory(model: PreTrainedModel) -> PreTrainedModel:
    found: PreTrainedModel = optimize_and_load(model, "cpu-exact", progress=False, threads=1)
    return found


def configs(folder: Path) -> Target:
    file = folder / "config.json"
    originals = {}
    small = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    made = (tiny_qwen().config, MixtralConfig(**SIZES, **small, num_local_experts=3))
    for config in made:
        config.save_pretrained(folder)
        originals[config.model_type] = file.read_bytes()
    fp8 = {**json.loads(originals["qwen3_moe"]), "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    originals["fp8"] = json.dumps(fp8).encode()
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
    originals["compressed"] = json.dumps({**fp8, "quantization_config": {"quant_method": "compressed-tensors", **groups}}).encode()
    originals["demo"] = (demo_path() / "config.json").read_bytes()
    return Target(file, originals, json_file, lambda: optimize_and_load(folder, "cpu", dry_run=True))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of files, with its numbers of cases in both forms."""

    target: Callable[[Path], Target]
    short: int
    long: int


KINDS = {
    "rules": Kind(rule_files, 100, 40_000),
    "ktransformers": Kind(their_rule_files, 30, 10_000),
    "safetensors": Kind(safetensors_files, 20, 8_000),
    "index": Kind(indexes, 20, 4_000),
    "gguf": Kind(gguf_files, 15, 8_000),
    "packed": Kind(packed_files, 50, 10_000),
    "thresholds": Kind(thresholds_files, 50, 8_000),
    "chat": Kind(saved_chats, 50, 6_000),
    "config": Kind(configs, 50, 6_000),
}


# The property.


class TooSlowError(BaseException):
    """A file took more time than it may; no `except` of the readers catches it."""


class _Watch:
    """Notices, while `folder` is set, every file that is opened outside of it and of Python's own folders, and every change of one."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen: list[str] = []
        own = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), str(ROOT), str(ROOT.resolve()), *filter(None, sys.path)}
        self._readable = (*(f"{os.path.realpath(path)}{os.sep}" for path in own), "/proc/", "/sys/", "/dev/", "/usr/", "/etc/")
        self._changes = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "shutil.")
        self._runs = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "socket.getaddrinfo")

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, int) or path is None:
                return
            writes = bool(set(mode or "") & set("wax+")) or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            place = os.path.realpath(os.fsdecode(path))
            if writes or not place.startswith((self.folder, *self._readable)):
                self.seen.append(f"opens {place} with {mode or flags}")
        elif event.startswith((*self._changes, *self._runs)):
            self.seen.append(f"{event}{arguments}"[:300])


@pytest.fixture(scope="module")
def watch() -> Iterator[_Watch]:
    found = _Watch()
    sys.addaudithook(found)  # hooks stay to the end of the process
    yield found
    found.folder = None


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) << 10


def _failure(target: Target, watch: _Watch) -> str | None:
    """Read the file; return what it did other than loading or raising a typed error."""

    def stop(*_: object) -> None:
        raise TooSlowError

    found = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
    before = _peak_bytes()
    handler = signal.signal(signal.SIGPROF, stop)
    watch.seen.clear()
    watch.folder = f"{target.file.parent.resolve()}{os.sep}"
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        target.read()
    except MoegraftError as error:
        message = str(error)
        if isinstance(error, RuleErrors):  # of a shipped file where a model does not fit it
            if not all(each.position.line > 0 and each.position.column > 0 for each in error.diagnostics):
                found = f"an error without a place: {message}"
        elif not message.isascii() and "\ud800" in message:
            found = f"an error that cannot be printed: {message!r}"
        elif str(target.file.parent) not in message:
            found = f"an error that does not name the file: {type(error).__name__}: {message}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 # any other kind is the finding
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != stop.__name__]
        ours = next((frame for frame in reversed(frames) if "moegraft" in frame.filename or str(ROOT) in frame.filename), frames[-1])
        inner = frames[-1]
        found = f"{type(error).__name__}: {str(error)[:300]}\n  in {ours.filename}:{ours.lineno}, from {inner.filename}:{inner.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        watch.folder = None
    if found is None and watch.seen:
        found = f"it {watch.seen[0]}"
    grown = _peak_bytes() - before
    if found is None and grown > FILE_COPIES * target.file.stat().st_size + OTHER_BYTES:
        found = f"{grown >> 20} MiB for a file of {target.file.stat().st_size} bytes"
    return found


def case(kind: str, number: int, target: Target) -> tuple[str, bytes]:
    """Return the corpus file of a case, and what its edits make of it."""
    chance = random.Random(f"{kind} {number}")
    name = chance.choice(sorted(target.originals))
    data = target.originals[name]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        data = target.edit(data, chance)
    return name, data


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    made: dict[str, Target] = {}

    def target(kind: str) -> Target:
        if kind not in made:
            found = KINDS[kind].target(tmp_path_factory.mktemp(kind))
            for data in found.originals.values():  # everything is imported and cached before anything is measured
                _replace(found.file, data)
                _read_once(found)
            made[kind] = found
        return made[kind]

    return target


def _replace(file: Path, data: bytes) -> None:
    """Write a new file; an older one may still be mapped."""
    file.unlink(missing_ok=True)
    file.write_bytes(data)


def _read_once(target: Target) -> None:
    with suppress(MoegraftError):  # KTransformers' files are refused as rule files
        target.read()


@contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        long = metafunc.config.getoption("--long")
        chunks = [
            (name, first, min(CHUNK, count - first))
            for name, kind in KINDS.items()
            for count in [kind.long if long else kind.short]
            for first in range(0, count, CHUNK)
        ]
        metafunc.parametrize(("kind", "first", "count"), chunks, ids=[f"{name}-{first}" for name, first, _ in chunks])


def test_a_damaged_file_loads_or_is_refused(
    kind: str, first: int, count: int, targets: Callable[[str], Target], watch: _Watch, tmp_path: Path
) -> None:
    target = targets(kind)
    findings: dict[str, str] = {}
    with quiet():
        for number in range(first, first + count):
            name, data = case(kind, number, target)
            _replace(target.file, data)
            found = _failure(target, watch)
            if found is not None:
                kept = tmp_path / f"{kind}-{number}"
                kept.write_bytes(data)
                findings.setdefault(found.rpartition("\n")[2], f"case {number}, of {name}, in {kept}: {found}")
    assert not findings, "\n".join(findings.values())


def with_values(**values: object) -> Callable[[bytes], bytes]:
    """Return an edit of a JSON file."""
    return lambda data: json.dumps({**json.loads(data), **values}).encode()


def with_metadata(name: str, value: object, text_of_it: str | None = None) -> Callable[[bytes], bytes]:
    """Return an edit of JSON that is text in the header of a safetensors file."""

    def edit(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header["__metadata__"][name] = json.dumps(value) if text_of_it is None else text_of_it
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return edit


def with_header(body: bytes) -> Callable[[bytes], bytes]:
    """Return an edit of a packed file's header."""
    return lambda data: data[:16] + len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def scalar_tensor(data: bytes) -> bytes:
    """Write a GGUF file whose first tensor has no dimensions and type bfloat16."""
    name = b"x"
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 0, BlockType.BF16, 0)
    key = b"general.architecture"
    field = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, 5) + b"olmoe"
    return (b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + field + tensor).ljust(256, b"\0")


ONCE: dict[str, tuple[str, str, Callable[[bytes], bytes]]] = {
    "many layers": ("config", "qwen3_moe", with_values(num_hidden_layers=1024)),
    "more layers than memory": ("config", "mixtral", with_values(num_hidden_layers=10**12)),
    "more experts than an int32": ("config", "mixtral", with_values(num_local_experts=2**40)),
    "heads of no width": ("config", "mixtral", with_values(num_attention_heads=0)),
    "experts of no width": ("config", "mixtral", with_values(intermediate_size=0)),
    "a hidden state of no width": ("config", "demo", with_values(hidden_size=0)),
    "architectures of numbers": ("config", "qwen3_moe", with_values(architectures=[5])),
    "quantisation as a number": ("config", "qwen3_moe", with_values(quantization_config=5)),
    "code as a list": ("config", "qwen3_moe", with_values(auto_map=["a"])),
    "a dtype of integers": ("config", "qwen3_moe", with_values(dtype="int8")),
    "a list": ("config", "qwen3_moe", lambda data: b"[]"),
    "deep lists": ("config", "qwen3_moe", lambda data: b"[" * 100_000),
    "a lone surrogate": ("config", "qwen3_moe", with_values(**{"\ud800": 2**40})),
    "a shard with a long name": ("index", "index", with_values(weight_map={"a": "b" * 5000})),
    "a key that cannot be printed": ("index", "index", with_values(weight_map={"\ud800": "model-00001-of-00003.safetensors"})),
    "a threshold of 30 digits": (
        "thresholds",
        "demo",
        lambda data: data.replace(b"0.0,", b"0,", 1).replace(b"]", b", 1" + b"0" * 30 + b"]"),
    ),
    "a header that is no mapping": ("packed", "int8", with_header(b"[]")),
    "a header without a key": ("packed", "int8", with_header(b"{}")),
    "a deep header": ("packed", "int8", with_header(b"[" * 20_000)),
    "a token that is infinite": ("chat", "chat", with_metadata("token_ids", [float("inf")])),
    "deep messages": ("chat", "chat", with_metadata("messages", None, "[" * 100_000)),
    "a message that cannot be shown": ("chat", "chat", with_metadata("messages", [{"role": "user", "content": "\ud800"}])),
    "a tensor without dimensions": ("gguf", "F32", scalar_tensor),
}


@pytest.mark.parametrize("name", ONCE)
def test_what_once_did_something_else(name: str, targets: Callable[[str], Target], watch: _Watch) -> None:
    kind, original, edit = ONCE[name]
    target = targets(kind)
    _replace(target.file, edit(target.originals[original]))
    with quiet():
        assert _failure(target, watch) is None
