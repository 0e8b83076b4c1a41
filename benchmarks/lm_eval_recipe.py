"""How does leaving neurons out change the scores of the language model evaluation harness (lm-eval)? The method of the published study.

    pip install lm-eval
    python benchmarks/lm_eval_recipe.py --model Qwen/Qwen3-30B-A3B --tasks arc_challenge,arc_easy,hellaswag,winogrande,truthfulqa_mc2
    python benchmarks/lm_eval_recipe.py                  # the bundled model, on a task from held-out text; no download

An injected model is a PreTrainedModel, which the harness accepts: `HFLM(pretrained=model, tokenizer=tokenizer)`. The rules are those of any
file (`--rules`) with `sparsity` at each target. The task of the bundled model, `word_order`, asks which of four lines comes next; three of
them have two words exchanged.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.record import Recorder, parser
from harness.texts import held_out
from transformers import AutoTokenizer

from moegraft.injection import optimize_and_load
from moegraft.injection.calibration import sparse_layers, sparse_rules
from moegraft.injection.demo import demo_path
from moegraft.injection.rules import read_rules
from moegraft.operators.registry import load_registry
from moegraft.operators.sparsity import achieved, total_counts
from moegraft.operators.thresholds import SparsityOptions

TARGETS = (0.0, 0.5, 0.7, 0.85, 0.9, 0.95)
TASK = """
task: word_order
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{before}}}}"
doc_to_choice: choices
doc_to_target: right
target_delimiter: ""
metric_list:
- {{metric: acc, aggregation: mean, higher_is_better: true}}
- {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


def write_task(folder: Path, questions: int) -> None:
    """Write the task `word_order`: 6 lines of held-out text, then the next line or copies with two neighbouring words exchanged."""
    lines = held_out().splitlines(keepends=True)
    drawn = random.Random(0)
    rows: list[dict[str, object]] = []
    while len(rows) < questions:
        place = drawn.randrange(6, len(lines))
        words = lines[place].split()
        if len(set(words)) < max(6, len(words)):
            continue
        choices = [" ".join(words)] + [_exchanged(words, at) for at in drawn.sample(range(len(words) - 1), 3)]
        drawn.shuffle(choices)
        rows.append({"before": "".join(lines[place - 6 : place]), "choices": choices, "right": choices.index(" ".join(words))})
    data = folder / "word_order.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "word_order.yaml").write_text(TASK.format(data=data), encoding="utf-8")


def _exchanged(words: list[str], at: int) -> str:
    return " ".join([*words[:at], words[at + 1], words[at], *words[at + 2 :]])


def scores(model: Any, tokenizer: Any, tasks: list[str], limit: int | None, include: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return each task's results by the harness's names."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1),
        tasks=tasks,
        limit=limit,
        task_manager=TaskManager(include_path=str(include)),
        bootstrap_iters=0,
    )
    assert found is not None, "only the first of several processes gets results, and this is the only one"
    yield from found["results"].items()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default=None, help="hub id or folder; default: the bundled model")
    options.add_argument("--rules", default="cpu-exact", help="rule file, or the name of a shipped one")
    options.add_argument("--tasks", default="word_order", help="names separated by commas")
    options.add_argument("--targets", type=float, nargs="+", default=TARGETS, help="shares of routed neurons to leave out")
    options.add_argument("--limit", type=int, default=200, help="questions per task; 0 for all")
    given = options.parse_args()
    path, registry = given.model or demo_path(), load_registry()
    tokenizer, rules = AutoTokenizer.from_pretrained(path), read_rules(given.rules, registry=registry)
    rows = Recorder("lm_eval", ("torch", "transformers", "lm-eval"), write=given.write)
    with tempfile.TemporaryDirectory() as name:
        write_task(Path(name), given.limit or 1000)
        for target in given.targets:
            model = optimize_and_load(path, sparse_rules(rules, registry, SparsityOptions(target, "routed")), progress=False)
            for task, found in scores(model, tokenizer, given.tasks.split(","), given.limit or None, Path(name)):
                left_out = achieved(total_counts(sparse_layers(model).values()))
                values = {key.partition(",")[0]: round(value, 4) for key, value in found.items() if isinstance(value, float)}
                rows.add({"model": given.model or "demo", "task": task, "target": target, "left_out": round(left_out or 0.0, 4), **values})


if __name__ == "__main__":
    main()
