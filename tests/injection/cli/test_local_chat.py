"""`local_chat` as scripts see it: what is on stdout, what on stderr, and the exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.families import save_unloadable
from support.programs import Program
from typer.testing import CliRunner, Result

from moegraft.injection.cli.local_chat import app
from moegraft.injection.demo import demo_path

Run = Callable[..., Result]
# How lines begin that a busy machine prints about what takes long.
STAGES = ("importing ", "reading ", "planning", "building ", "loading ", "preparing ", "computing ")
ANSWER = ["--no-do-sample", "--max-new-tokens", "12"]


@pytest.fixture
def run(chat_folder: Path) -> Run:
    """Runs local_chat on the tiny model."""

    def on_tiny_model(*arguments: str | Path, stdin: str | bytes = b"", model: str | Path = chat_folder) -> Result:
        return CliRunner().invoke(app, ["--model", str(model), *map(str, arguments)], input=stdin, prog_name="local_chat")

    return on_tiny_model


def refused(result: Result) -> str:
    """The sentence on stderr of a run that a user's mistake ended."""
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_the_answer_alone_is_on_stdout(run: Run) -> None:
    result = run("--prompt", "hello", *ANSWER)
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout) == 13 and result.stdout[:12].isalpha() and result.stdout[12] == "\n"
    [line] = [line for line in result.stderr.splitlines() if not line.startswith(STAGES)]
    assert (
        line.startswith("[prompt: 8 tokens at ")
        and "; answer: 12 tokens at " in line
        and line.endswith("; stopped by --max-new-tokens 12]")
    )
    assert "\x1b" not in result.stderr, "no colour, no spinner where nobody looks"


def test_more_and_less_is_printed_as_wished(run: Run) -> None:
    assert run("--prompt", "hello", "--quiet", *ANSWER).stderr == ""
    assert "answer: " not in run("--prompt", "hello", "--no-stats", *ANSWER).stderr
    verbose = run("--prompt", "hello", "--verbose", *ANSWER).stderr
    assert "2 x experts: hybrid_experts" in verbose and " as native programs" in verbose
    assert "exclude each other" in refused(run("--prompt", "hello", "--verbose", "--quiet"))


@pytest.mark.parametrize("given", ["option", "pipe", "file", "kt"])
def test_a_prompt_is_the_same_wherever_it_comes_from(given: str, run: Run, tmp_path: Path, chat_folder: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello\nthere\n")
    wanted = run("--prompt", "hello\nthere", *ANSWER, "--seed", "3").stdout
    ktransformers = f"--model_path {chat_folder} --optimize_config_path qwen3_moe --cpu_infer 1 --max_new_tokens 12 --no_do_sample"
    arguments: dict[str, list[str]] = {
        "option": [*ANSWER, "--prompt=hello\nthere"],
        "pipe": ANSWER,
        "file": [*ANSWER, "--prompt-file", str(file)],
        "kt": [*ktransformers.split(), "--prompt_file", str(file)],
    }
    result = run(*arguments[given], stdin="hello\nthere\n" if given == "pipe" else "")
    assert (result.exit_code, result.stdout) == (0, wanted)


def test_a_seed_repeats_an_answer(run: Run) -> None:
    drawn = ["--prompt", "hello", "--temperature", "1", "--max-new-tokens", "30"]
    first, again, other = (run(*drawn, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_tiny_temperature_of_the_model_is_greedy(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(chat_folder, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_sample": True, "temperature": 1e-6}))
    asked = ["--prompt", "hello", "--max-new-tokens", "12"]
    greedy = run(*asked, "--no-do-sample").stdout
    assert [run(*asked, "--seed", seed, model=folder).stdout for seed in ("1", "2")] == [greedy, greedy]


def test_several_sequences_and_stop_strings_of_the_model(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(chat_folder, folder)
    path, whole = folder / "generation_config.json", run("--prompt", "hello", *ANSWER).stdout
    own = {"do_sample": True, "num_return_sequences": 2, "stop_strings": [whole[6:9]]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    result = run("--prompt", "hello", *ANSWER, model=folder)
    assert result.stdout == whole[: whole.index(whole[6:9]) + 3] + "\n"
    assert "stopped" not in result.stderr


def test_an_unknown_instruction_set_is_one_message(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGRAFT_ISA", "mmx")
    assert "set MOEGRAFT_ISA to one of these, or unset it" in refused(run("--prompt", "hello", "--quiet"))


def test_a_model_without_a_template_continues_the_text(run: Run, text_folder: Path) -> None:
    result = run("--prompt", "once upon", *ANSWER, model=text_folder)
    assert result.exit_code == 0
    assert "no chat template" in result.stderr


def test_a_dry_run_prints_the_plan_alone(run: Run) -> None:
    result = run("--dry-run", "--rules", "cpu", "--var", "weights=int4")
    assert result.exit_code == 0 and all(line.startswith(STAGES) for line in result.stderr.splitlines())
    assert "model.layers.{0-1}.mlp.experts" in result.stdout and "weights=int4" in result.stdout


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing/here", "not a hub id!"])
def test_a_model_that_is_not_there(run: Run, model: str) -> None:
    message = refused(run("--prompt", "hello", model=model))
    assert message.startswith(f"local_chat: error: {model}: ")
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no config", "no config.json in this folder"),
        ("unknown model type", "wizard_moe"),
        ("no tokenizer", "no tokenizer can be read"),
        ("damaged tokenizer", "no tokenizer can be read"),
        ("tokenizer of another version", "no tokenizer can be read (data did not match any variant of untagged enum"),
        ("no weights", "safetensors"),
    ],
)
def test_a_folder_that_cannot_be_used(run: Run, chat_folder: Path, tmp_path: Path, change: str, said: str) -> None:
    folder = shutil.copytree(chat_folder, tmp_path / "model")
    if change == "no config":
        (folder / "config.json").unlink()
    elif change == "unknown model type":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "wizard_moe"}))
    elif change == "no tokenizer":
        for file in folder.glob("*token*"):
            file.unlink()
    elif change == "damaged tokenizer":
        (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {')
    elif change == "tokenizer of another version":
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": {"type": "Unknown"}}))
    else:
        (folder / "model.safetensors").unlink()
    message = refused(run("--prompt", "hello", "--quiet", model=folder))
    assert said in message
    assert message.count("\n") == 1, message


def test_experts_that_cannot_be_read_end_in_a_sentence(run: Run, tmp_path: Path) -> None:
    rules = tmp_path / "disk.yaml"
    rules.write_text(f"extends: cpu\nvars: {{weights: int8, cache_dir: '{tmp_path}/cache', memory: 1500KiB}}\n")
    options = ("--prompt", "To be", "--max-new-tokens", "2", "--quiet", "--rules", rules)
    assert run(*options, model=demo_path()).exit_code == 0
    for path in (tmp_path / "cache").glob("*.experts"):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:65536] + bytes(path.stat().st_size - 65536))
    message = refused(run(*options, model=demo_path()))
    assert message.startswith(f"local_chat: error: {tmp_path}/cache/") and message.count("\n") == 1
    assert re.search(r"\.experts: expert \d+ at byte \d+ is damaged .*: remove the file", message)


def test_rules_that_are_wrong(run: Run, tmp_path: Path) -> None:
    rules = tmp_path / "mine.yaml"
    rules.write_text("- match: {name: mlp.expert$}\n  replace: {class: hybrid_experts}\n  recursion: false\n")
    message = refused(run("--prompt", "hello", "--rules", rules))
    assert f"{rules}:3:3: error: " in message
    assert "wieght" in refused(run("--prompt", "hello", "--var", "wieght=int4"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rules", "none.yaml"], "none.yaml:1:1: error: there is no such rule file"),
        (["--rules", "broken.yaml"], "broken.yaml:2:4: error: not valid YAML"),
        (["--model", "./none"], "local_chat: error: ./none: no such file or folder"),
    ],
)
def test_paths_and_syntax_are_checked_before_pytorch_is_imported(options: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("rules: {\n  }}\n")
    code = "import sys\nfrom moegraft.injection.cli.local_chat import main\ntry:\n main()\nfinally:\n assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(message)


def test_warnings_of_the_plan_are_logged_once(run: Run, tmp_path: Path) -> None:
    rules = tmp_path / "mine.yaml"
    rules.write_text("""- match: {kind: experts, layers: "0-1,7"}\n  replace: {class: hybrid_experts}\n""")
    result = run("--prompt", "hello", "--rules", rules, *ANSWER)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count(f"{rules}:1:34: warning: layers '7'") == 1


def test_a_plan_that_does_not_fit(run: Run, tmp_path: Path, chat_folder: Path) -> None:
    shutil.copytree(chat_folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    save_unloadable(tmp_path)
    message = refused(run("--prompt", "hello", "--quiet", model=tmp_path))
    assert "memory" in message and message.count("\n") == 1


@pytest.mark.parametrize(
    ("stdin", "said"),
    [(b"", "the prompt is empty"), (b" \n\t\n", "the prompt is empty"), (b"caf\xe9", "not UTF-8 text (byte 0xe9 at offset 3)")],
)
def test_a_pipe_without_a_prompt(run: Run, stdin: bytes, said: str) -> None:
    assert said in refused(run(stdin=stdin))


def test_a_prompt_that_cannot_be(run: Run, tmp_path: Path) -> None:
    assert refused(run("--prompt-file", tmp_path / "none")) == f"local_chat: error: {tmp_path / 'none'}: No such file or directory\n"
    assert "the prompt is empty" in refused(run("--prompt", ""))
    for option, more in (("--prompt", []), ("--system", ["--prompt", "a"])):  # Python decodes 0xe9 of an argument to U+DCE9
        message = refused(run(option, "caf\udce9", *more))
        assert message.endswith(f"local_chat: error: {option}: not UTF-8 text (byte 0xe9 at offset 3)\n")
    assert "give only one of them" in refused(run("--prompt", "a", "--prompt-file", "b"))
    assert "this model's context 4096" in refused(run("--prompt", "x" * 5000))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "hot"], "--temperature"),
        (["--top-p", "1.5"], "--top-p"),
        (["--temprature", "1"], "--temperature"),
        (["--no-do-sample", "--top-k", "3"], "local_chat: error: --no-do-sample leaves --top-k without effect; give one or the other\n"),
        (["--var", "int4"], "local_chat: error: --var int4: give NAME=VALUE, as in --var cache=0.25\n"),
        (["--dtype", "floaty"], "float32"),
    ],
)
def test_options_that_make_no_sense(run: Run, arguments: list[str], said: str) -> None:
    assert said in refused(run("--prompt", "hello", *arguments))


def test_a_chat_on_the_cpu_imports_nothing_that_it_does_not_use(chat_folder: Path) -> None:
    unused = ("moegraft.operators.offload.engine", "moegraft.injection.calibration", "moegraft.injection.verify", "fastapi", "matplotlib")
    code = (
        "import sys\nfrom moegraft.injection.cli.local_chat import app\napp(sys.argv[1:], standalone_mode=False)\n"
        f"print([name for name in {unused} if name in sys.modules])"
    )
    arguments = ["--model", str(chat_folder), "--prompt", "hello", *ANSWER]
    shown = subprocess.run([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, check=True).stdout.decode()
    assert shown.endswith("\n[]\n"), shown


@pytest.mark.parametrize(("name", "value"), [("--threads", 1025), ("--seed", 1 << 64)])
def test_numbers_that_no_machine_takes_are_refused_as_options(name: str, value: int) -> None:
    result = CliRunner().invoke(app, [name, str(value)], input="hello")
    assert result.exit_code == 2 and name in result.stderr, result.output


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.split()[0]) == (0, "moegraft")


def test_a_reader_that_leaves_is_no_error(program: list[str], chat_folder: Path) -> None:
    arguments = ["--model", str(chat_folder), "--prompt", "hello", "--no-do-sample", "--max-new-tokens", "2000"]
    chat = Program([*program[1:], *arguments], os.environ)
    assert chat.stdout.read(1).isalpha()
    chat.stdout.close()
    said = chat.stderr.read()
    assert chat.wait() == 141  # as a shell reports a program that SIGPIPE ended
    assert "Traceback" not in said and "Broken pipe" not in said


def test_where_stdout_is_closed_the_answer_goes_nowhere(program: list[str], chat_folder: Path) -> None:
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", *program, "--model", str(chat_folder), "--prompt", "hello", "--quiet", *ANSWER]
    done = subprocess.run(closing, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_trace_shows_the_work_of_each_device(run: Run, tmp_path: Path) -> None:
    rules = tmp_path / "emulated.yaml"
    rules.write_text("version: 1\nextends: hybrid\nvars: {gpu: emulated, cache: 0.5}\nrules: []\n")
    path = tmp_path / "trace.json"
    result = run("--prompt", "hello", "--rules", rules, "--trace", path, "--verbose", *ANSWER)
    assert result.exit_code == 0, result.stderr
    assert f"{path}: " in result.stderr and "in slots of emulated:0" in result.stderr
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"plan", "CPU"}


@pytest.mark.parametrize("gpu", ["emulated", "none"])
def test_a_trace_shows_the_rounds_of_drafts(run: Run, tmp_path: Path, gpu: str) -> None:
    rules = tmp_path / "drafting.yaml"
    draft = "- match: {kind: model}\n  replace: {class: speculative_draft, kwargs: {draft_top_k: 2, max_draft: 3, schedule: fixed}}\n"
    experts = "hybrid\nvars: {gpu: emulated, cache: 0.5}" if gpu == "emulated" else "cpu-exact"
    rules.write_text(f"version: 1\nextends: {experts}\nrules:\n{draft}")
    path = tmp_path / "trace.json"
    result = run("--prompt", "hello", "--rules", rules, "--trace", path, *ANSWER)
    assert result.exit_code == 0, result.stderr
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X" and event["cat"] == "rounds"]
    names = [span["name"] for span in sorted(spans, key=lambda span: span["ts"])]
    first = names.index("draft")
    assert names[first : first + 4] == ["draft", "rollback", "verify", "rollback"]
    assert set(names) <= {"draft", "rollback", "verify", "plain step"}
    verified = [span["args"] for span in spans if span["name"] == "verify"]
    assert all(0 <= span["accepted"] <= span["drafted"] <= 3 for span in verified)
    drafted = [span["args"]["tokens"] for span in spans if span["name"] == "draft"]
    assert drafted == [span["drafted"] for span in verified]


def test_a_trace_shows_the_steps_of_the_cpu(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = run("--prompt", "hello", "--rules", "cpu-exact", "--trace", path, "--no-do-sample", "--max-new-tokens", "40")
    assert result.exit_code == 0, result.stderr
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    steps = sorted((event for event in events if event["cat"] == "step"), key=lambda event: event["ts"])
    assert [event["name"] for event in steps[:2]] == ["layer by layer"] * 2, "the first two are recorded"
    assert steps[-1]["name"] == "program"
    for step in (steps[0], steps[-1]):
        within = [event["name"] for event in events if event["cat"] == "CPU" and 0 <= event["ts"] - step["ts"] <= step["dur"]]
        assert {"experts", "attention"} <= set(within)


def test_a_trace_that_cannot_be_written_is_reported_before_the_answer(run: Run, tmp_path: Path) -> None:
    rules = tmp_path / "emulated.yaml"
    rules.write_text("version: 1\nextends: hybrid\nvars: {gpu: emulated, cache: 0.5}\nrules: []\n")
    assert str(tmp_path / "no") in refused(run("--prompt", "hello", "--rules", rules, "--trace", tmp_path / "no" / "trace.json", *ANSWER))


def test_a_model_that_keeps_no_cache_answers(run: Run, chat_folder: Path, tmp_path: Path) -> None:
    """Checkpoints saved after training state `use_cache: false`."""
    folder = shutil.copytree(chat_folder, tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), "use_cache": False}))
    result = run("--prompt", "hello", *ANSWER, model=folder)
    assert result.exit_code == 0, result.exception
    assert len(result.stdout) == 13
