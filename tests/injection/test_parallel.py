"""Experts over several processes: equal to one process in every family, and no process waits for one that is gone."""

from __future__ import annotations

import json
import re
import signal
import socket
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.families import build_model, case_of, save_checkpoint, served_cases
from support.gguf_files import write_gguf
from support.ranks import PATIENCE_S, end, start_ranks
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moegraft.cpu_backend import default_threads
from moegraft.injection import plan, read_rules
from moegraft.injection.api import build_meta_model
from moegraft.injection.parallel import check_distributed_config, divide_by_speed, part_of
from moegraft.operators.errors import NotEnoughMemoryError, RuleFileError, UnsupportedModelError
from moegraft.operators.expert_group import Shares
from moegraft.operators.registry import load_registry

FEW = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "granitemoe", "qwen3_next", "minimax_m2", "ernie4_5_moe")
BESIDE = ("deepseek_v3", "qwen3_next")  # of these, one calls its shared experts after the routed ones and one before
GENERATING = tuple(case.model_type for case in served_cases() if case.generates)
ON_CPU = "with several processes, experts run on the CPU"
# Operators and options with which experts are not divided, and what the refusal contains.
UNDIVIDED = {
    "hybrid_experts, kwargs: {gpu: auto}": ON_CPU,
    "hybrid_experts, kwargs: {gpu: 'cuda:0,cuda:1'}": ON_CPU,  # several GPUs of a process
    "hybrid_experts, kwargs: {gpu: auto, decode: graph}": ON_CPU,  # captured steps
    "hybrid_experts, kwargs: {sparsity: {target: 0.5, scope: routed}}": "sparsity is not supported",
    "sparse_experts, kwargs: {sparsity: {target: 0.5, scope: routed}}": "sparse_experts needs all experts",
}
PROGRAM = "from moegraft.injection.cli.moegraft import main; main()"
# Prints for each model a line of JSON: whether greedy tokens and logits equal the stock model's, what other ranks returned, and in which
# order a layer asks the others, computes its shared experts and adds, with logits as without that order.
COMPARE = textwrap.dedent(
    """
    import json, sys, torch
    from pathlib import Path
    from support.families import case_of, prompt, stock_model
    from moegraft.injection import optimize_and_load
    from moegraft.operators.expert_group import _Link
    from moegraft.operators.structure import SHARED_NAMES

    events = []

    def noted(owner, name, event, of=None):
        plain = getattr(owner, name)

        def noting(self, *args):
            if of is None or self in of:
                events.append(event)
            return plain(self, *args)

        setattr(owner, name, noting)

    noted(_Link, "ask", "ask")
    noted(_Link, "add_to", "add")

    def beside(model, ids):
        overlaps = {name: each.overlap for name, each in model.named_modules() if getattr(each, "overlap", None)}
        blocks = [model.get_submodule(name.rpartition(".")[0]) for name in overlaps]
        shared = [getattr(block, name) for block in blocks for name in SHARED_NAMES if hasattr(block, name)]
        for kind in set(map(type, shared)):
            noted(kind, "forward", "shared", shared)
        with torch.no_grad():
            events.clear()
            found, order = model(input_ids=ids).logits, " ".join(events)
            for each in overlaps.values():
                each.order = "other"
            return order, torch.equal(found, model(input_ids=ids).logits)

    rules = sys.argv[1]
    for path in map(Path, sys.argv[2:]):
        case = case_of(path.name)
        file = path / "model.gguf"
        model = optimize_and_load(path, rules, progress=False, gguf=file if file.exists() else None)
        ids = prompt(9, batch=2)
        found = model.generate(ids, max_new_tokens=8, do_sample=False)
        if model.moegraft.follows:
            print(json.dumps({"model": path.name, "tokens": found.tolist()}))
            model.moegraft.follow()
            continue
        stock = stock_model(case, path)
        with torch.no_grad():
            logits, expected = (each(input_ids=ids).logits.double() for each in (model, stock))
        error = float((logits - expected).abs().max() / expected.abs().max())
        expected = stock.generate(ids, max_new_tokens=8, do_sample=False).tolist()
        calls = [row["calls"] for row in model.moegraft.statistics()["ranks"]]
        row = {"model": path.name, "error": error, "tokens": found.tolist(), "expected": expected, "calls": calls}
        print(json.dumps(row | dict(zip(("events", "equal"), beside(model, ids)))))
        model.moegraft.close()
    """
)
# For each rule file, prints what a process alone (`alone.yaml` beside it) and all ranks generate with the bundled model.
RULES = textwrap.dedent(
    """
    import json, sys
    from pathlib import Path
    from transformers import AutoTokenizer
    from moegraft.injection import optimize_and_load
    from moegraft.injection.demo import demo_path

    ids = AutoTokenizer.from_pretrained(demo_path())("First Citizen: Before we", return_tensors="pt").input_ids
    for rules in map(Path, sys.argv[1:]):
        model = optimize_and_load(demo_path(), rules, dtype="float32", progress=False)
        if model.moegraft.follows:
            model.moegraft.follow()
            continue
        found = model.generate(ids, max_new_tokens=24, do_sample=False).tolist()
        replayed = model.moegraft.statistics()["decode_steps"].get("replayed_steps", 0)
        model.moegraft.close()
        alone = optimize_and_load(demo_path(), rules.with_name("alone-" + rules.name), dtype="float32", progress=False)
        print(json.dumps([rules.stem, replayed, found, alone.generate(ids, max_new_tokens=24, do_sample=False).tolist()]))
    """
)
# Prints what each kind of call of `generate` returns on this rank, and what its streamer was given.
RESULTS = textwrap.dedent(
    """
    import hashlib, json, sys, torch
    from support.families import prompt
    from transformers.generation.streamers import BaseStreamer
    from moegraft.injection import optimize_and_load

    class Told(BaseStreamer):
        def __init__(self):
            self.tokens, self.ends = [], 0

        def put(self, value):
            self.tokens.append(value.tolist())

        def end(self):
            self.ends += 1

    def plain(value):
        if isinstance(value, torch.Tensor):  # a digest: nobody reads the pipe of the second rank before the first one ends
            return [str(value.dtype), list(value.shape), hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:8]]
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items() if name not in ("past_key_values", "cache")}
        return [plain(each) for each in value] if isinstance(value, (tuple, list)) else value

    model = optimize_and_load(sys.argv[1], sys.argv[2], progress=False)
    full = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    calls = {
        "ids": {},
        "dict": {"return_dict_in_generate": True},
        "scores": full,
        "states": {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True},
        "batch": {"batch": 2, **full},
        "sampled": {"do_sample": True, "num_return_sequences": 2, **full},
        "beams": {"num_beams": 2, "num_return_sequences": 2, **full},
        "by config": {"by_config": True},
        "streamed": {"streamer": Told()},
        "streamed dict": {"streamer": Told(), "return_dict_in_generate": True},
        "streamed from nothing": {"streamer": Told(), "ids": False},
        "streamed batch": {"streamer": Told(), "batch": 2},
    }
    if not model.moegraft.follows:
        torch.manual_seed(5)
    for name, options in calls.items():
        ids, batch = options.pop("ids", True), options.pop("batch", 1)
        model.generation_config.return_dict_in_generate = options.pop("by_config", False)
        given = {"inputs": prompt(5, batch=batch)} if ids else {"bos_token_id": 1}
        found = model.generate(**given, max_new_tokens=4, **{"do_sample": False, **options})
        told = options.get("streamer")
        print(json.dumps([name, type(found).__name__, plain(found), [told.tokens, told.ends] if told else None]))
    model.moegraft.follow()
    """
)
# Generates until it is ended.
FOREVER = textwrap.dedent(
    """
    import sys, torch
    from support.families import prompt
    from moegraft.injection import optimize_and_load

    model = optimize_and_load(sys.argv[1], "cpu-exact", progress=False)
    print("ready", flush=True)
    if model.moegraft.follows:
        model.moegraft.follow()
    while True:
        model(input_ids=prompt(3))
    """
)

# Rank 1 has other shares at first, then loads slowly, and is stopped for a moment while rank 0 waits for it and Ctrl-C is pressed. At last,
# rank 0 deletes its model.
ENDURE = textwrap.dedent(
    """
    import gc, os, signal, sys, threading, time
    from pathlib import Path
    from support.families import prompt
    import moegraft.injection.api as api
    from moegraft.operators.errors import UnsupportedModelError

    path, pid, released = sys.argv[1], Path(sys.argv[4]), Path(sys.argv[5])
    follows = os.environ["RANK"] == "1"
    try:
        api.optimize_and_load(path, sys.argv[3 if follows else 2], progress=False)
    except UnsupportedModelError as error:
        print(error)
    if follows:
        pid.write_text(str(os.getpid()))
        load = api.load
        api.load = lambda *args, **kwargs: (time.sleep(6), load(*args, **kwargs))[1]
    model = api.optimize_and_load(path, sys.argv[2], progress=False)
    if follows:
        model.moegraft.follow()
        released.touch()
        sys.exit()
    expected = model(input_ids=prompt(9)).logits
    other = int(pid.read_text())
    os.kill(other, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    threading.Timer(0.6, os.kill, (other, signal.SIGCONT)).start()
    try:
        model(input_ids=prompt(9))
    except KeyboardInterrupt:
        print("interrupted", bool((model(input_ids=prompt(9)).logits == expected).all()))
    del model
    gc.collect()
    for _ in range(200):
        if released.exists():
            print("released")
            break
        time.sleep(0.1)
    """
)
# Prints what each of four loads is refused with: rank 1 has no rules, the model is in memory, rank 1 has no sensible time-out, and another
# model is loaded. Rank 0 then closes that model at once, and the next one while a sign of life waits for rank 1, which follows neither
# until it is closed. At last, rank 0 compares the weights' fingerprint with that of a process which holds all of them.
REFUSE = textwrap.dedent(
    """
    import os, sys, time
    from pathlib import Path
    from transformers import AutoModelForCausalLM
    from moegraft.injection import optimize_and_load
    from moegraft.injection.cli.chat.conversation import fingerprint
    from moegraft.operators.errors import MoegraftError

    path, rules, alone, rank = *sys.argv[1:], int(os.environ["RANK"])

    def refused(file):
        try:
            optimize_and_load(path, file, progress=False)
        except MoegraftError as error:
            print(error)

    refused("missing.yaml" if rank else rules)
    stock, path = path, AutoModelForCausalLM.from_pretrained(path)
    refused(rules)
    path = stock
    os.environ["MOEGRAFT_RANK_TIMEOUT"] = "0" if rank else "60"
    refused(rules)
    os.environ["MOEGRAFT_RANK_TIMEOUT"] = "12"
    tried = Path(alone).with_name("tried")
    for waited_s in (0, 4):
        closed = Path(alone).with_name(f"closed-{waited_s}")
        model = optimize_and_load(path, rules, progress=False)
        if not waited_s:
            refused(rules)
        if rank:
            tried.touch()
            while not closed.exists():
                time.sleep(0.05)
            model.moegraft.follow()
            print("followed")
        else:
            found = fingerprint(model)
            while not tried.exists():  # once it is closed, rank 1 would not be refused
                time.sleep(0.05)
            time.sleep(waited_s)
            model.moegraft.close()
            closed.touch()
    if rank == 0:
        print(found == fingerprint(optimize_and_load(path, alone, progress=False)))
    """
)
# Rank 1 fails alone at one place after another while rank 0 waits for it, and then computes; prints what each rank ends with.
ALONE = textwrap.dedent(
    """
    import os, pathlib, sys, threading, time
    from types import SimpleNamespace
    import torch
    from support.families import prompt
    import moegraft.injection.api as api
    import moegraft.injection.parallel as parallel
    from moegraft.operators import expert_group
    from moegraft.operators.experts.hybrid import HybridExperts

    path, auto, given, whole, *undivided = sys.argv[1:]
    rank = int(os.environ["RANK"])
    described = SimpleNamespace(tp_size=2, ep_size=2, tp_plan={})

    def attempt(rules, call=None):
        began = time.monotonic()
        try:
            model = api.optimize_and_load(path, rules, progress=False, distributed_config=described)
            if call is not None:
                call(model)
        except (Exception, KeyboardInterrupt) as error:
            print(f"{type(error).__name__}: {error}".splitlines()[-1])
        assert time.monotonic() - began < 200, "nobody waits for the time of a connection"

    def failing(place, name, error, rules=given, call=None, on=1):
        def fail(*args, **kwargs):
            raise error
        if rank == on:
            saved, _ = getattr(place, name), setattr(place, name, fail)
        attempt(rules, call)
        if rank == on:
            setattr(place, name, saved)

    failing(api, "load_registry", ImportError("no such plug-in"))
    failing(parallel, "_machine_id", PermissionError("no identity"))
    failing(parallel.Processes, "take_cores", PermissionError("no cores"))
    failing(parallel, "probe_machine", PermissionError("no machine"), auto)
    failing(HybridExperts, "weight_samples", MemoryError("no sample"))
    failing(HybridExperts, "load", KeyboardInterrupt())
    for rules in undivided:
        attempt(rules)

    def answer(model):
        print("found", model.generate(prompt(3), max_new_tokens=2).shape)

    def fails_once(model):
        if rank == 0:
            try:
                model(input_ids=prompt(3))
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
            finite = model(input_ids=prompt(3)).logits.isfinite().all().item()
            model.moegraft.close()
            # A thread that frees connections while the interpreter ends would abort the process.
            print(finite and not any(each.name == "moegraft-ranks" for each in threading.enumerate()))
        else:
            reply, group = expert_group._Buffer.reply, expert_group._Buffer
            def fail(*args):
                group.reply = reply
                raise MemoryError("no buffer")
            group.reply = fail
            model.moegraft.follow()
            print("followed")

    attempt(given, fails_once)
    failing(torch, "save", OSError("no result"), call=lambda model: (answer(model), model.moegraft.close()), on=0)
    time.sleep(1)
    parallel.CONNECTING_S, parallel.NOTICE_S = 5, 1
    ended = pathlib.Path(path, "ended")
    if rank:
        attempt(given)
        parallel.CONNECTING_S = 300
        model = api.optimize_and_load(path, given, progress=False)
        del model
        time.sleep(3)
        attempt(given)
        ended.touch()
    else:
        model = api.optimize_and_load(path, whole, progress=False)
        answer(model)
        time.sleep(6)
        model = api.optimize_and_load(path, given, progress=False)
        attempt(given)
        while not ended.exists():  # this process has the store, where the other reads why
            time.sleep(0.02)
    """
)
# Loads a small model, so that all libraries are there, then a large one, and prints the most anonymous memory that the second took beyond
# the first, beside the bytes that this rank holds by the plan and its CPUs.
MEMORY = textwrap.dedent(
    """
    import json, os, sys, threading, time
    from moegraft.injection import optimize_and_load

    def anonymous():
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    small, large, rules = sys.argv[1:]
    model = optimize_and_load(small, rules, progress=False)
    model.moegraft.follow()
    model.moegraft.close()
    before, most, ended = anonymous(), [0], threading.Event()

    def sample():
        while not ended.wait(0.002):
            most[0] = max(most[0], anonymous())

    threading.Thread(target=sample, daemon=True).start()
    model = optimize_and_load(large, rules, progress=False)
    ended.set()
    plan = model.moegraft.plan
    print(json.dumps([most[0] - before, plan.bytes_by_device["cpu"], sorted(os.sched_getaffinity(0))]))
    model.moegraft.follow()
    """
)


def saved(folder: Path, model_type: str) -> Path:
    case = case_of(model_type)
    save_checkpoint(case, folder / model_type)
    return folder / model_type


def rules_with(folder: Path, shares: str, base: str = "cpu-exact") -> Path:
    file = folder / "divided.yaml"
    file.write_text(f"extends: {base}\nparallel: {{shares: {shares}}}\n")
    return file


def compare(folder: Path, families: tuple[str, ...], shares: str, count: int, timeout_s: float = PATIENCE_S) -> None:
    models = [str(saved(folder, family)) for family in families]
    with_file = case_of("mixtral")
    write_gguf(folder / "mixtral" / "model.gguf", build_model(with_file))
    results = end(start_ranks(["-c", COMPARE, str(rules_with(folder, shares)), *models], count), timeout_s)
    assert [code for code, _, _ in results] == [0] * count, "\n".join(err for _, _, err in results)
    lead, *others = ([json.loads(line) for line in out.splitlines()] for _, out, _ in results)
    assert [row["model"] for row in lead] == list(families)
    for place, row in enumerate(lead):
        assert row["error"] < 1e-5, row["model"]
        assert row["tokens"] == row["expected"], row["model"]
        assert min(row["calls"]) > 0, f"{row['model']}: every rank has computed"
        assert row["equal"], f"{row['model']}: shared experts that run beside the others' change no bit"
        if row["model"] in BESIDE:
            assert re.fullmatch(r"(( ask)+ shared( add)+)+", " " + row["events"]), row["model"]
        assert all(other[place]["tokens"] == row["tokens"] for other in others)


def test_three_ranks_equal_the_stock_model(tmp_path: Path, long: bool) -> None:
    compare(tmp_path, GENERATING if long else FEW, "[3, 2, 1]", 3, timeout_s=3000 if long else PATIENCE_S)


def test_two_ranks_equal_the_stock_model_in_every_family(tmp_path: Path, long: bool) -> None:
    if not long:
        pytest.skip("three ranks show the same in less time; --long runs both")
    compare(tmp_path, GENERATING, "[5, 1]", 2, timeout_s=3000)


def test_generate_returns_the_same_kind_of_result_on_all_ranks(tmp_path: Path) -> None:
    results = end(start_ranks(["-c", RESULTS, str(saved(tmp_path, "mixtral")), str(rules_with(tmp_path, "[2, 1]"))], 2))
    assert [code for code, _, _ in results] == [0, 0], "\n".join(err for _, _, err in results)
    lead, other = ([json.loads(line) for line in out.splitlines()] for _, out, _ in results)
    assert len(lead) == 12
    kinds = {name: kind for name, kind, _, _ in lead}
    assert kinds["ids"] == "Tensor" and kinds["dict"] == kinds["by config"] == "GenerateDecoderOnlyOutput"
    assert kinds["beams"] == "GenerateBeamDecoderOnlyOutput"
    for of_lead, of_other in zip(lead, other, strict=True):
        assert of_other == of_lead, of_lead[0]
    assert {len(told[0]) for _, _, _, told in lead if told} == {5}, "the prompt, then four tokens one by one"


def test_drafts_caches_and_packed_files_work_on_two_ranks(tmp_path: Path) -> None:
    experts = "rules: [{id: experts, match: {kind: experts}, replace: {class: hybrid_experts, kwargs: {weights: %s, cache_dir: %s}}}]"
    texts = {
        "drafts": "extends: speculative",
        "quantised": "extends: cpu\nrules: [{match: {kind: model}, replace: {class: quantized_kv_cache, kwargs: {backend: fp8}}}]",
        "packed": f"extends: cpu\n{experts % ('int4', tmp_path / 'packed')}",
        "mapped": f"extends: cpu\n{experts % ('int4', tmp_path / 'packed')}",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(f"{text}\nparallel: {{shares: [1, 2]}}\n")
        (tmp_path / f"alone-{name}.yaml").write_text(f"{text}\nparallel: {{shares: none}}\n")
    results = end(start_ranks(["-c", RULES, *(str(tmp_path / f"{name}.yaml") for name in texts)], 2))
    assert [code for code, _, _ in results] == [0, 0], "\n".join(err for _, _, err in results)
    rows = [json.loads(line) for line in results[0][1].splitlines()]
    assert [name for name, *_ in rows] == list(texts)
    for name, replayed, found, alone in rows:
        assert found == alone, name
        assert (replayed > 0) == (name != "quantised"), f"{name}: programs append to a plain cache"
    layers = 5
    assert len(list((tmp_path / "packed").glob("*.experts"))) == 3 * layers, "a file for each share, and for all experts"


def test_the_server_answers_eight_clients_and_ends_when_a_rank_is_killed() -> None:
    ranks = start_ranks(["-m", "moegraft.injection.cli.moegraft", "serve", "--port", "0"], 2, MOEGRAFT_RANK_TIMEOUT="12")
    lead = ranks[0].stderr
    assert lead is not None
    address = ""
    while not address:
        line = lead.readline()
        assert line, "the server has ended"
        address = next((word for word in line.split() if word.startswith("http") and word.endswith("/v1")), "")
    openai = pytest.importorskip("openai", reason="an extra for tests: pip install 'moegraft[test]'")
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
    model = client.models.list().data[0].id

    def answer(_: int) -> str:
        return str(client.completions.create(model=model, prompt="First Citizen:", max_tokens=8, temperature=0).choices[0].text)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answer, range(8)))
    assert len(set(answers)) == 1 and answers[0]
    ranks[1].kill()
    (code, _, said), _ = end(ranks)
    assert code == 2 and "rank 1 on " in said and "start all ranks again" in said


def test_a_killed_rank_ends_the_others_with_its_name(tmp_path: Path) -> None:
    ranks = start_ranks(["-c", FOREVER, str(saved(tmp_path, "mixtral"))], 3)
    for each in ranks:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    ranks[1].kill()
    began = time.monotonic()
    (lead, _, said), (killed, _, _), (third, _, _) = end(ranks)
    assert time.monotonic() - began < 60
    assert killed == -signal.SIGKILL and lead == 1 and third in (0, 1)
    assert "GroupLostError: rank 1 on " in said and "start all ranks again" in said


@pytest.mark.long
def test_slow_loading_interrupts_other_rules_and_deleted_models_lose_no_rank(tmp_path: Path) -> None:
    rules = [tmp_path / name for name in ("own.yaml", "other.yaml")]
    for file, shares in zip(rules, ("[1, 1]", "[1, 2]"), strict=True):
        file.write_text(f"extends: cpu-exact\nparallel: {{shares: {shares}}}\n")
    arguments = map(str, (saved(tmp_path, "mixtral"), *rules, tmp_path / "pid", tmp_path / "released"))
    results = end(start_ranks(["-c", ENDURE, *arguments], 2, MOEGRAFT_RANK_TIMEOUT="4"))
    assert [code for code, _, _ in results] == [0, 0], "\n".join(err for _, _, err in results)
    refused, *found = results[0][1].splitlines()
    assert "rank 1 on " in refused and "has shares (1.0, 2.0), not (1.0, 1.0)" in refused
    assert found == ["interrupted True", "released"]


def test_refusals_reach_all_ranks_rank_0_closes_alone_and_saved_chats_know_all_experts(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("divided.yaml", "alone.yaml")]
    for file, shares in zip(files, ("[2, 1]", "none"), strict=True):
        file.write_text(f"extends: cpu-exact\nparallel: {{shares: {shares}}}\n")
    results = end(start_ranks(["-c", REFUSE, str(saved(tmp_path, "mixtral")), *map(str, files)], 2))
    assert [code for code, _, _ in results] == [0, 0], "\n".join(err for _, _, err in results)
    lead, other = (out.splitlines() for _, out, _ in results)
    for line, name in ((lead[0], "missing.yaml"), (lead[2], "MOEGRAFT_RANK_TIMEOUT must be a number of seconds above 0")):
        assert "rank 1 on " in line and name in line
    assert "missing.yaml" in other[0] and "not '0'" in other[2]
    for lines in (lead, other):
        assert "this model is in memory" in lines[1] and "another model is loaded over these processes" in lines[3]
    assert other[4:] == ["followed", "followed"], "rank 0 has closed each model before rank 1 followed it"
    assert lead[4] == "True", "the fingerprint is that of one process with all experts"
    assert "ended or does not answer" not in results[0][2]


def test_a_rank_that_fails_alone_ends_all_with_its_message(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("auto.yaml", "given.yaml", "whole.yaml")]
    for file, shares in zip(files, ("auto", "[2, 1]", "none"), strict=True):
        file.write_text(f"extends: cpu-exact\nparallel: {{shares: {shares}}}\n")
    for number, replaced in enumerate(UNDIVIDED):
        file = tmp_path / f"undivided-{number}.yaml"
        file.write_text(f"version: 1\nrules: [{{match: {{kind: experts}}, replace: {{class: {replaced}}}}}]\n")
        files.append(file)
    results = end(start_ranks(["-c", ALONE, str(saved(tmp_path, "mixtral")), *map(str, files)], 2))
    assert [code for code, _, _ in results] == [0, 0], "\n".join(err for _, _, err in results)
    lead, other = (out.splitlines() for _, out, _ in results)
    alone = ("no such plug-in", "no identity", "no cores", "no machine", "no sample")
    for place, reason in enumerate(alone):
        assert "MoegraftError: rank 1 on " in lead[place] and reason in lead[place]
        assert other[place].endswith(reason)
    assert "GroupLostError: another process ended while the model was loaded" in lead[5] and other[5] == "KeyboardInterrupt: "
    for lines in (lead, other):
        for place, reason in enumerate(UNDIVIDED.values(), 6):
            assert reason in lines[place]
    lead, other = lead[6 + len(UNDIVIDED) :], other[6 + len(UNDIVIDED) :]
    assert "rank 1 on " in lead[0] and "failed: MemoryError: no buffer" in lead[0] and lead[1] == "True" and other[0] == "followed"
    assert lead[2] == "OSError: no result" and other[1] == "GroupLostError: rank 0 failed: OSError: no result"
    assert "rank 1 cannot reach all of the 2 processes" in other[2] and "with the same model and rules" in other[2]
    assert "missing after 5 s: rank 0 on " in other[2] and "it has loaded a whole model" in other[2]
    assert "rank 1, waits up to 5 s for rank 0 on " in results[1][2], "reported before it ends"
    assert lead[3].startswith("found") and "another model is loaded over these processes" in lead[4]
    assert "MoegraftError: rank 0 on " in other[3] and "another model is loaded over these processes" in other[3]


def test_a_program_that_fails_before_it_loads_ends_the_others(tmp_path: Path, long: bool) -> None:
    without = tmp_path / "without"
    without.mkdir()
    (without / "config.json").write_bytes((saved(tmp_path, "mixtral") / "config.json").read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases = {
            f"serve --port {taken.getsockname()[1]}": ("serve --port 0", 0, "cannot listen on 127.0.0.1 port"),
            "serve --port 0": (f"serve --port 0 --model {without}", 1, "tokenizer"),
        }
        for lead, (other, failing, reason) in list(cases.items())[: None if long else 1]:
            code = f"import os, sys; sys.argv[1:] = {[lead.split(), other.split()]}[int(os.environ['RANK'])]; {PROGRAM}"
            results = end(start_ranks(["-c", code], 2))
            assert [code for code, _, _ in results] == [2, 2], "\n".join(err for _, _, err in results)
            assert reason in results[failing][2] and "rank" not in results[failing][2]
            assert f"rank {failing} on " in results[1 - failing][2] and reason in results[1 - failing][2]


def test_a_missing_shard_on_one_rank_ends_all_with_its_message(tmp_path: Path) -> None:
    model = saved(tmp_path, "mixtral")
    code = textwrap.dedent(
        """
        import os, sys
        from moegraft.injection import optimize_and_load
        folder = sys.argv[1] if os.environ["RANK"] == "0" else sys.argv[2]
        optimize_and_load(folder, "cpu-exact", progress=False)
        """
    )
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((model / "config.json").read_bytes())
    (broken / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])
    results = end(start_ranks(["-c", code, str(model), str(broken)], 2))
    assert [code for code, _, _ in results] == [1, 1]
    assert "MoegraftError: rank 1 on " in results[0][2] and "broken/model.safetensors" in results[0][2]
    assert "CheckpointError: " in results[1][2]


def test_a_rank_holds_the_bytes_of_its_share_alone(tmp_path: Path) -> None:
    meta = build_meta_model(saved(tmp_path, "qwen3_moe"), weights=True)
    whole = plan(meta, "cpu")
    parts = [plan(meta, "cpu", shares=Shares((3, 2, 1), rank)) for rank in range(3)]
    experts = [sum(swap.footprint.total_bytes for swap in each.swaps if swap.operator == "hybrid_experts") for each in [whole, *parts]]
    assert sum(experts[1:]) == experts[0] and experts[1] > experts[2] > experts[3] > 0
    assert [each.rest_bytes for each in parts] == [whole.rest_bytes, 0, 0]
    assert {swap.operator for swap in parts[1].swaps} == {"hybrid_experts"}


def test_a_rank_keeps_to_its_share_of_the_memory_and_to_its_own_cores(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=32,
        num_experts_per_tok=2,
        moe_intermediate_size=1024,
        dtype=torch.bfloat16,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "large")
    rules = tmp_path / "divided.yaml"
    experts = "{match: {kind: experts}, replace: {class: hybrid_experts, kwargs: {weights: bfloat16}}}"
    rules.write_text(f"version: 1\nrules: [{experts}]\nparallel: {{shares: [3, 1]}}\n")
    results = end(start_ranks(["-c", MEMORY, str(saved(tmp_path, "mixtral")), str(tmp_path / "large"), str(rules)], 2))
    assert [code for code, _, _ in results] == [0, 0], "\n".join(err for _, _, err in results)
    held, cpus = [], []
    for _, out, _ in results:
        most, share, own = json.loads(out)
        held.append(share)
        cpus.append(set(own))
        assert most < 1.1 * share + (8 << 20), f"{most >> 20} MiB for a share of {share >> 20} MiB"
    experts_bytes = 2 * 32 * 3 * 512 * 1024 * 2
    assert held[1] == experts_bytes // 4 and held[0] > 3 * experts_bytes // 4
    if default_threads() > 1:
        assert not cpus[0] & cpus[1], "each process keeps to its own cores"


@pytest.mark.long
def test_doctor_measures_the_messages_of_all_ranks(tmp_path: Path) -> None:
    ranks = start_ranks(["-m", "moegraft.injection.cli.moegraft", "doctor", "--measure", "--json"], 3, XDG_CACHE_HOME=str(tmp_path))
    (code, out, err), *others = end(ranks)
    assert code == 0 and [other[:2] for other in others] == [(0, "")] * 2, err
    found = json.loads(out)
    assert len(found["links"]) == 2 and found["all_us"] >= 0
    assert all(link["layer_us"] >= 0 and link["gbit"] > 0 for link in found["links"])
    assert list(tmp_path.rglob("network.json"))


def test_shares_cover_all_experts_and_give_each_rank_one() -> None:
    for sizes in [(1.0,), (3, 2, 1), (100, 1, 1, 1), (1, 1, 1, 100), (0.1, 0.1)]:
        for count in (len(sizes), 7, 8, 129):
            if count < len(sizes):
                continue
            ranges = [Shares(sizes, rank).experts(count) for rank in range(len(sizes))]
            assert [expert for each in ranges for expert in each] == list(range(count))
            assert all(len(each) > 0 for each in ranges)
    assert [len(Shares((3, 2, 1), rank).experts(12)) for rank in range(3)] == [6, 4, 2]
    with pytest.raises(UnsupportedModelError, match="2 experts cannot be spread over 3 processes"):
        Shares((1, 1, 1), 0).experts(2)


def test_processes_of_a_machine_divide_its_cores() -> None:
    for count in (1, 2, 3, 5):
        cores = [(number, number + 8) for number in range(8)]
        parts = [part_of(cores, place, count) for place in range(count)]
        assert [core for part in parts for core in part] == cores
        assert {len(part) for part in parts} <= {8 // count, 8 // count + 1}


def test_automatic_shares_follow_speed_within_memory() -> None:
    assert divide_by_speed([30, 10], [1000, 1000], 1000) == pytest.approx([0.75, 0.25])
    assert divide_by_speed([30, 10, 10], [500, 1000, 1000], 1000) == pytest.approx([0.5, 0.25, 0.25])
    with pytest.raises(NotEnoughMemoryError, match="400 B, 500 B"):
        divide_by_speed([1, 1], [400, 500], 1000)


@pytest.mark.parametrize(
    ("shares", "message"),
    [("[1, 0]", "shares must be"), ("[]", "shares must be"), ("fast", "shares must be"), ("[1, .inf]", "shares must be")],
)
def test_wrong_shares_are_refused_with_their_place(tmp_path: Path, shares: str, message: str) -> None:
    with pytest.raises(RuleFileError, match=rf"divided.yaml:2:\d+: error: {message}"):
        read_rules(rules_with(tmp_path, shares), registry=load_registry())


def test_the_description_of_other_parallelism_is_refused_by_name() -> None:
    class Config:
        tp_size = ep_size = 2
        tp_plan: dict[str, str] = {}

    check_distributed_config(Config(), 2)
    with pytest.raises(UnsupportedModelError, match=r"ep_size is 2, and 3|tp_size is 2, and 3"):
        check_distributed_config(Config(), 3)
    Config.tp_plan = {"layers.*": "colwise"}
    with pytest.raises(UnsupportedModelError, match="tp_plan"):
        check_distributed_config(Config(), 2)
