"""`moegraft calibrate`: it writes a file that loads, says what the file says, and every mistake is one sentence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT
from support.byte_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import Result

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.injection.injected import sparse_layers
from moegraft.injection.texts import read_text
from moegraft.operators.errors import RuleFileError
from moegraft.operators.routing_trace import Trace
from moegraft.operators.sparsity import FILE_NAME, read_thresholds

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
RULES = (
    "- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {{sparsity: {{target: {target}, scope: routed{more}}}}}}}\n"
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(read_text("calibration")[:1200])
    return path


def test_the_file_loads_with_any_target(folder: Path, run_json: RunJson, text: Path, tmp_path: Path) -> None:
    out, rules = tmp_path / "mine.json", tmp_path / "rules.yaml"
    found = run_json("calibrate", "--model", folder, "--rules", "cpu-exact", "--text", text, "--out", out, "--target", 0.6, "--window", 100)
    assert found["exit_code"] == 0
    written = read_thresholds(out)
    assert found["layers"] == list(written.layers) == [f"model.layers.{number}.mlp.experts" for number in range(1, 12)]
    assert (found["tokens"], found["held_out_tokens"]) == (written.tokens, written.held_out_tokens)
    assert found["tokens"] + found["held_out_tokens"] == len(text.read_bytes())
    assert written.text_sha256 == found["text_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert written.model == folder.name and str(folder.parent) not in out.read_text()
    (row,) = found["held_out"]
    assert row["achieved"] == pytest.approx(0.6, abs=0.05) and row["perplexity"] > 0 and 0 < row["agreement"] <= 1
    rules.write_text(RULES.format(target=0.9, more=", thresholds: mine.json"))
    model = optimize_and_load(folder, rules, progress=False)  # the file's path is relative to the rules
    for path, layer in sparse_layers(model).items():
        assert layer.threshold == written.threshold(path, 0.9, "layer")


def test_people_read_a_table(folder: Path, run: Run, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    arguments = ("calibrate", "--model", folder, "--rules", "cpu-exact", "--text", text, "--out", out)
    result = run(*arguments, "--target", 0.5, "--target", 0.9, "--tokens", 600)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    first = read_thresholds(out)
    assert lines[0] == f"11 layers calibrated on {first.tokens} tokens"
    assert lines[1].endswith(f"tokens is {first.held_out[0].dense_perplexity:.4g}")
    assert [line.split()[0] for line in lines[2:5]] == ["target", "0.5", "0.9"]
    assert lines[5] == f"{out}: written; in rules: sparsity: {{target: 0.9, scope: routed, thresholds: mine.json}}"
    # The same text gives the same thresholds, whatever is tried; the first two thirds of it other ones.
    assert run(*arguments, "--force", "--target", 0.3, "--tokens", 600).exit_code == 0
    assert read_thresholds(out).layers == first.layers
    assert run(*arguments, "--force", "--target", 0.3, "--tokens", 400).exit_code == 0
    assert read_thresholds(out).layers != first.layers


def test_rules_that_name_the_file_can_make_it(folder: Path, run: Run, text: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES.format(target=0.9, more=", thresholds: new.json"))
    assert run("check", rules, "--model", folder).exit_code == 1
    assert run("calibrate", "--model", folder, "--rules", rules, "--text", text, "--out", tmp_path / "new.json").exit_code == 0
    assert run("check", rules, "--model", folder).exit_code == 0
    (tmp_path / "new.json").write_text("{}")
    refused = run("check", rules, "--model", folder)
    assert refused.exit_code == 1 and "not a thresholds file" in refused.output and f"{rules}:2:" in refused.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "nothing to write: give --out FILE for thresholds, --routing FILE.npz for the routing, or --router-maps FILE"),
        (("--routing", "no/such/folder/x.npz"), "no/such/folder/x.npz: the folder no/such/folder does not exist"),
        (("--routing", ".", "--force", "--tokens", "50"), "--routing . is a folder; give the name of a file in it"),
        (("--out", "/proc/x.json", "--tokens", "50"), "error: /proc/x.json: "),  # before the text is read
        (("--out", "x.json", "--target", "1.5"), "target is a share from 0 to below 1, not 1.5"),
        (("--out", "x.json", "--target", "0"), "target 0 leaves no neuron out"),
        (("--out", "x.json", "--scope", "all"), "'all' is not one of"),
        (("--out", "x.json", "--rules", "nowhere.yaml"), "nowhere.yaml"),
        (("--out", "x.json", "--text", "nowhere.txt"), "nowhere.txt: No such file"),
        (("--out", "x.json", "--var", "a"), "give NAME=VALUE"),
        (
            ("--out", "no/such/folder/x.json", "--tokens", "100", "--target", "0.5"),
            "no/such/folder/x.json: the folder no/such/folder does not exist",
        ),
        (("--out", "x.json", "--tokens", "50"), "the text has 50 tokens; at least 64 are needed"),
        (("--out", "x.json", "--rules", "linear.yaml"), "no operator of these rules can leave neurons out"),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence(
    folder: Path, run: Run, arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("linear.yaml").write_text("- {match: {kind: linear}, replace: {class: quantized_linear}}\n")
    result = run("calibrate", "--model", folder, *arguments)
    assert result.exit_code == 2 and says in result.stderr.replace("\n", " "), result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert not Path("x.json").exists()


def test_recorded_routing_is_what_the_routers_choose(folder: Path, run_json: RunJson, text: Path, tmp_path: Path) -> None:
    """The trace of two windows has the stock routers' choices, and a static cache takes it as its profile."""
    trace_path = tmp_path / "routing.npz"
    arguments = ("--model", folder, "--rules", "cpu-exact", "--text", text, "--tokens", 90, "--window", 50)
    found = run_json("calibrate", *arguments, "--routing", trace_path)
    assert found["exit_code"] == 0 and set(found) == {"exit_code", "routing"}
    trace = Trace.load(trace_path)
    assert list(trace.layers) == found["routing"]["layers"] == [f"model.layers.{number}.mlp.experts" for number in range(1, 12)]
    assert (trace.num_tokens, trace.num_experts, trace.top_k) == (90, 4, 2)
    assert trace.starts.nonzero()[0].tolist() == [0, 50] and trace.source == f"{folder.name}, {text.name}"
    ids = torch.tensor(byte_tokenizer()(text.read_text())["input_ids"][:90])
    model = AutoModelForCausalLM.from_pretrained(folder)
    chosen: list[torch.Tensor] = []
    experts = model.get_submodule(trace.layers[3])
    hook = experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1]))
    with torch.no_grad():
        for window in ids.split(50):
            model(window[None])
    hook.remove()
    assert trace.chosen[:, 3].tolist() == torch.cat(chosen).tolist()
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "- match: {kind: experts}\n  replace: {class: hybrid_experts, "
        "kwargs: {gpu: emulated, cache: {slots: 2, policy: static, profile: routing.npz}}}\n"
    )
    loaded = optimize_and_load(folder, rules, progress=False, threads=1)
    assert loaded(ids[None, :8]).logits.isfinite().all()


def test_router_maps_are_fitted_and_used(folder: Path, run: Run, run_json: RunJson, text: Path, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    arguments = (
        "calibrate",
        "--model",
        folder,
        "--rules",
        "cpu-exact",
        "--text",
        text,
        "--tokens",
        400,
        "--window",
        50,
        "--router-maps",
        maps,
    )
    found = run_json(*arguments)
    assert found["exit_code"] == 0 and set(found) == {"exit_code", "router_maps"}
    shares = found["router_maps"]["named_by_routers"] + found["router_maps"]["named_by_maps"]
    assert len(shares) == 6 and all(0 < share <= 1 for share in shares)
    assert run(*arguments).exit_code == 2, "the file exists"
    assert f"two files would be written to {maps}" in run(*arguments, "--routing", maps, "--force").stderr.replace("\n", "")
    result = run(*arguments, "--force")
    assert "layers ahead  named by routers  named by maps" in result.stdout and "prefetch: {maps: maps}" in result.stdout
    rules, ids = tmp_path / "rules.yaml", torch.arange(5, 60)[None]
    rules.write_text(
        "- match: {kind: experts}\n  replace: {class: hybrid_experts, kwargs: {gpu: emulated, cache: {slots: 2}, prefetch: {maps: maps}}}\n"
    )
    plain, loaded = (optimize_and_load(folder, each, progress=False, threads=1) for each in ("cpu-exact", rules))
    torch.testing.assert_close(loaded(ids).logits, plain(ids).logits, atol=1e-3, rtol=1e-3)
    maps.write_bytes(b"x")
    with pytest.raises(RuleFileError, match=r"rules\.yaml:2:.*maps: no file of router maps .*; moegraft calibrate --router-maps FILE fits"):
        optimize_and_load(folder, rules, progress=False)
    maps.unlink()
    with pytest.raises(RuleFileError, match=r"rules\.yaml:2:.*maps: No such file or directory; moegraft calibrate"):
        optimize_and_load(folder, rules, progress=False)


def test_thresholds_and_routing_in_one_run(folder: Path, run: Run, text: Path, tmp_path: Path) -> None:
    out, trace_path = tmp_path / "x.json", tmp_path / "x.npz"
    arguments = ("calibrate", "--model", folder, "--rules", "cpu-exact", "--text", text, "--tokens", 100, "--target", 0.5)
    result = run(*arguments, "--out", out, "--routing", trace_path)
    assert result.exit_code == 0, result.output
    assert read_thresholds(out).tokens < 100 == Trace.load(trace_path).num_tokens
    assert "routing of 100 tokens in 11 layers, 2 of 4 experts per token" in result.stdout
    assert f"{trace_path}: written; in rules: cache: {{policy: static, profile: x.npz}}" in result.stdout.replace("\n", "")
    kept = trace_path.read_bytes()
    again = run(*arguments, "--routing", trace_path)
    assert again.exit_code == 2 and "give --force to overwrite it" in again.stderr and trace_path.read_bytes() == kept


def test_a_file_that_is_there_is_kept(folder: Path, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    out.write_text("dear")
    result = run("calibrate", "--model", folder, "--out", out)
    assert result.exit_code == 2 and "give --force to overwrite it" in result.stderr
    assert out.read_text() == "dear"


def test_text_that_is_none(folder: Path, run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.bin"
    text.write_bytes(b"abc\xff")
    result = run("calibrate", "--model", folder, "--rules", "cpu-exact", "--text", text, "--out", tmp_path / "x.json")
    assert result.exit_code == 2 and f"{text}: not UTF-8 text (byte 0x" in result.stderr


def test_wrong_rules_are_exit_code_1(folder: Path, run: Run, rules: Callable[[str], Path], tmp_path: Path) -> None:
    path = rules("- {match: {kind: experts}, replace: {class: hybrid_experts, kwargs: {weight: int8}}}\n")
    result = run("calibrate", "--model", folder, "--rules", path, "--out", tmp_path / "x.json")
    assert result.exit_code == 1 and "did you mean 'weights'" in result.stderr


def test_verify_judges_layers_with_every_neuron(folder: Path, run_json: RunJson, run: Run, text: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {kind: experts}\n  replace: {class: hybrid_experts, kwargs: {sparsity: {target: 0.8, scope: routed}}}\n")
    found = run_json("verify", "--model", folder, "--rules", rules, "--text", text, "--tokens", 200)
    assert found["exit_code"] == 0 and all(layer["relative_error"] < 1e-4 for layer in found["layers"])
    assert found["left_out"] == pytest.approx(0.8, abs=0.05)
    assert found["logits"]["kl_nats"] > 1e-3  # the neurons are missed
    shown = run("verify", "--model", folder, "--rules", rules, "--text", text, "--tokens", 200).stdout
    assert f"the injected logits leave out {100 * found['left_out']:.1f} % of the routed ones" in shown
    whole = run_json("verify", "--model", folder, "--rules", "cpu-exact", "--text", text, "--tokens", 50)
    assert whole["left_out"] is None


def test_the_demos_thresholds_are_its_own_and_what_the_guides_say() -> None:
    model = optimize_and_load(demo_path(), "sparse", progress=False)
    thresholds = read_thresholds(demo_path() / FILE_NAME)
    assert len(thresholds.layers) == 5 and thresholds.model_type == "qwen3_moe"
    for path, layer in sparse_layers(model).items():
        assert layer.threshold == thresholds.threshold(path, 0.5, "layer")
    for guide, rows in (
        (ROOT / "benchmarks" / "README.md", "| {target:g} | {perplexity:.2f} | {agreement:.1f} % |"),
        (demo_path() / "README.md", "| {target:g} | {achieved:.1f} % | {perplexity:.2f} | {agreement:.1f} % |"),
    ):
        text = guide.read_text(encoding="utf-8")
        for row in thresholds.held_out:
            values = {"achieved": 100 * row.achieved, "perplexity": row.perplexity, "agreement": 100 * row.agreement}
            assert rows.format(target=row.target, **values) in text, (guide, row)
        assert f"perplexity ({thresholds.held_out[0].dense_perplexity:.2f} with every neuron)" in text
    assert json.loads((demo_path() / FILE_NAME).read_text())["criterion"] == "abs_act_gate"
