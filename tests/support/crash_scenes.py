"""What a process may die in: scenes that write files, and a server that plays each in a process of its own, forked from one that has
imported everything.

The server reads a JSON request per line: {"scene", "folder", "act": "prepare" | "play" | "recover", "fault", "copies"}, where the fault is
null or [kind, error, at, stays].
It answers twice: with the process id as soon as the process runs, and with its end: {"status", "output", "operations"}. Of several copies
it answers with the first's process id and the first status that is not 0.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# Before the libraries are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from typer.testing import CliRunner

from moegraft.cpu_backend import PackedExperts
from moegraft.injection import build_meta_model, graft, optimize_and_load, plan
from moegraft.injection.cli.chat.conversation import Message, SavedChat, read_chat, write_chat
from moegraft.injection.cli.moegraft import app
from moegraft.injection.demo import demo_path
from moegraft.injection.estimate import measure
from moegraft.injection.rules import read_rules
from moegraft.operators.atomic_file import SUFFIX
from moegraft.operators.base import Rate
from moegraft.operators.experts.packed_cache import HEADER_BYTES
from moegraft.operators.registry import load_registry
from moegraft.operators.routing_trace import Trace
from moegraft.operators.sparsity import LayerThresholds, Thresholds, read_thresholds, write_thresholds
from moegraft.operators.timeline import Timeline, write_trace
from support.families import tiny_model

IDS = torch.tensor([[5, 17, 33, 60, 3, 8, 61]])
REFUSED = 3  # exit code of a scene that ends in an error for users
ERRORS = (OSError, ValueError)  # those for users: MoegraftError is a ValueError


@dataclass(frozen=True, slots=True)
class Scene:
    """Attributes:
    play: writes to the folder `out`, as a program would; raises one of ERRORS where it cannot.
    check: raises AssertionError where a file of `out` is not whole, or is not of the newest content where `complete` is true.
    """

    play: Callable[[Path], None]
    check: Callable[[Path, bool], None]
    prepare: Callable[[Path], None] = lambda folder: None


def _prepare_pack(folder: Path) -> None:
    tiny_model().save_pretrained(folder / "model")
    for name, cache in (("rules", f", cache_dir: '{folder / 'out'}'"), ("plain", "")):
        rules = f"- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {{weights: int8{cache}}}}}\n"
        (folder / f"{name}.yaml").write_text(rules)
    torch.save(_logits(folder, "plain"), folder / "expected.pt")


def _logits(folder: Path, rules: str) -> torch.Tensor:
    with torch.no_grad():
        model = optimize_and_load(folder / "model", folder / f"{rules}.yaml", progress=False)
        logits: torch.Tensor = model(IDS).logits
    return logits


def _pack(folder: Path) -> None:
    packs, pack = [], PackedExperts.pack

    def counting(packed: PackedExperts, *arguments: Any) -> None:
        packs.append(arguments[0])
        pack(packed, *arguments)

    PackedExperts.pack = counting  # type: ignore[method-assign]
    logits = _logits(folder, "rules")
    assert torch.equal(logits, torch.load(folder / "expected.pt")), "the experts are not the checkpoint's"
    print(f"packed {len(packs)} matrices")


def _check_pack(folder: Path, complete: bool) -> None:
    files = [file for file in (folder / "out").iterdir() if not file.name.endswith(SUFFIX)]
    assert len(files) == 2 or (len(files) < 2 and not complete), files
    assert all(file.suffix == ".experts" and file.stat().st_size > HEADER_BYTES for file in files), files


STOCK: list[PreTrainedModel] = []  # one for all processes
MESSAGES = [Message("user", "what?"), Message("assistant", "that." * 1000)]


def _chat() -> SavedChat:
    cache = DynamicCache(config=STOCK[0].config)
    with torch.no_grad():
        STOCK[0](IDS, past_key_values=cache, use_cache=True)
    return SavedChat(MESSAGES, IDS[0].tolist(), cache)


def _save(folder: Path) -> None:
    path = folder / "out" / "talk.safetensors"
    if not path.exists():
        write_chat(path, STOCK[0], _chat())


def _check_save(folder: Path, complete: bool) -> None:
    path = folder / "out" / "talk.safetensors"
    if complete or path.exists():
        found = read_chat(path, STOCK[0])
        assert found.messages == MESSAGES and found.cache is not None and found.token_ids == IDS[0].tolist()
        for mine, other in zip(found.cache.layers, _chat().cache.layers, strict=True):  # type: ignore[union-attr]
            assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)


def _thresholds(tokens: int) -> Thresholds:
    numbers = tuple(0.001 * (1 + step) for step in range(102))
    layers = {f"layers.{layer}": LayerThresholds(4, 8, 8, 0, "0" * 32, numbers) for layer in range(8)}
    return Thresholds("model", "type", "0" * 64, tokens, 1, 2, layers, numbers)


def _check_thresholds(folder: Path, complete: bool) -> None:
    path = folder / "out" / "thresholds.json"
    assert read_thresholds(path).tokens == 2 or (not complete and read_thresholds(path).tokens == 1)


def _trace(source: str) -> Trace:
    chosen = np.tile(np.arange(2), (500, 3, 1))
    weights = np.full(chosen.shape, 0.5, np.float32)
    scores = np.random.default_rng(0).random((500, 3, 8), np.float32)
    return Trace(scores, chosen, weights, np.full((3, 500, 3, 2), -1), np.arange(500) == 0, ("a", "b", "c"), source)


def _check_trace(folder: Path, complete: bool) -> None:
    found = Trace.load(folder / "out" / "routing.npz").source
    assert found == "new" or (not complete and found == "old")


def _measured(gbps: float) -> measure.Measurements:
    rates = {name: Rate(20.0, 500.0) for name in ("float32", "float16", "bfloat16", "int8", "int4")}
    return measure.Measurements(gbps, rates, rates, 0.1, 0.0)


@contextmanager
def _own_cache(folder: Path) -> Iterator[None]:
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield


def _measure(folder: Path, gbps: float) -> None:
    with _own_cache(folder / "out"):
        measure.save(_measured(gbps))


def _check_measured(folder: Path, complete: bool) -> None:
    with _own_cache(folder / "out"):
        found = measure.load()
    assert found is not None
    assert found.read_gbps == 2.0 or (not complete and found.read_gbps == 1.0)


def _timeline(folder: Path, spans: int) -> None:
    timeline = Timeline("CPU")
    for number in range(spans):
        timeline.add("CPU", str(number), number, number + 1)
    write_trace(folder / "out" / "trace.json", [timeline])


def _check_timeline(folder: Path, complete: bool) -> None:
    events = [event for event in json.loads((folder / "out" / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 200 or (not complete and len(events) == 100)


def _run(*arguments: str) -> None:
    """Run the program; what it refuses is raised."""
    done = CliRunner().invoke(app, list(arguments))
    if done.exit_code == 2:
        raise OSError(done.output)
    if done.exit_code:
        raise AssertionError(f"exit code {done.exit_code}: {done.output}") from done.exception


def _prepare_init(folder: Path) -> None:
    with _own_cache(folder / "home"):
        measure.save(_measured(1.0))
    (folder / "out" / "rules.yaml").write_text("- match: {kind: linear}\n  replace: {class: default}\n")


def _init(folder: Path) -> None:
    with _own_cache(folder / "home"):
        _run("init", "--force", "--out", str(folder / "out" / "rules.yaml"))


def _check_init(folder: Path, complete: bool) -> None:
    found = read_rules(folder / "out" / "rules.yaml", registry=load_registry())
    assert next(rule.operator for rule in found.rules) == "hybrid_experts" or (not complete and len(found.rules) == 1)


def _calibrate(folder: Path) -> None:
    out = folder / "out"
    files = ("--out", str(out / "thresholds.json"), "--routing", str(out / "routing.npz"))
    _run("calibrate", "--force", *files, "--tokens", "256", "--window", "64", "--target", "0.5", "--model", str(demo_path()))


def _check_calibrated(folder: Path, complete: bool) -> None:
    found = folder / "out" / "thresholds.json", folder / "out" / "routing.npz"
    assert not complete or all(file.exists() for file in found)
    if found[0].exists():
        assert len(read_thresholds(found[0]).layers) > 0
    if found[1].exists():
        assert Trace.load(found[1]).num_tokens == 256


SCENES = {
    "pack": Scene(_pack, _check_pack, _prepare_pack),
    "save": Scene(_save, _check_save),
    "thresholds": Scene(
        lambda folder: write_thresholds(_thresholds(2), folder / "out" / "thresholds.json"),
        _check_thresholds,
        lambda folder: write_thresholds(_thresholds(1), folder / "out" / "thresholds.json"),
    ),
    "routing": Scene(
        lambda folder: _trace("new").save(folder / "out" / "routing.npz"),
        _check_trace,
        lambda folder: _trace("old").save(folder / "out" / "routing.npz"),
    ),
    "measurements": Scene(lambda folder: _measure(folder, 2.0), _check_measured, lambda folder: _measure(folder, 1.0)),
    "timeline": Scene(lambda folder: _timeline(folder, 200), _check_timeline, lambda folder: _timeline(folder, 100)),
    "init": Scene(_init, _check_init, _prepare_init),
    "calibrate": Scene(_calibrate, _check_calibrated),
}


def _act(scene: Scene, folder: Path, act: str) -> None:
    if act == "prepare":
        (folder / "out").mkdir(parents=True)
        scene.prepare(folder)
        return
    if act == "recover":
        scene.check(folder, False)
    scene.play(folder)
    if act == "recover":
        assert not scratch_files(folder), "what the dead process left remains"
        scene.check(folder, True)


def scratch_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "out").rglob("*") if path.name.endswith(SUFFIX)]


def serve() -> None:
    """Answer requests until the input ends."""
    torch.set_num_threads(1)
    STOCK.append(tiny_model())
    model = build_meta_model(demo_path(), weights=True)
    graft(model, plan(model, "cpu"))  # what each load imports and caches on first use; no thread is started
    gc.freeze()  # so that collections in the children copy no pages
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        scene, folder = SCENES[request["scene"]], Path(request["folder"])
        output = folder.with_suffix(".txt")
        output.unlink(missing_ok=True)
        count, counted = os.pipe()
        children = []
        for _ in range(request["copies"]):
            child = os.fork()
            if child == 0:
                _child(scene, folder, request["act"], request["fault"], output, counted)
            children.append(child)
        os.close(counted)
        print(json.dumps({"pid": children[0]}), flush=True)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        operations = sum(int(number) for number in os.read(count, 1000).split())
        os.close(count)
        text = output.read_text(errors="replace") if output.exists() else ""
        print(json.dumps({"status": next(filter(None, statuses), 0), "output": text, "operations": operations}), flush=True)


def _child(scene: Scene, folder: Path, act: str, fault: tuple[int, int, int, bool] | None, output: Path, counted: int) -> NoReturn:
    status = 1
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    layer = ctypes.CDLL(None)
    layer.faulty_files_count.restype = ctypes.c_long
    try:
        if fault is not None:
            kind, error, at, stays = fault
            layer.faulty_files(os.fsencode(folder / "out"), kind, error, ctypes.c_long(at), stays)
        _act(scene, folder, act)
        status = 0
    except ERRORS as error:
        status = REFUSED
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    except BaseException:  # noqa: BLE001 # reported by its status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os.write(counted, f"{layer.faulty_files_count()} ".encode())
        os._exit(status)


if __name__ == "__main__":
    serve()
