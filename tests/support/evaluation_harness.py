"""A task of the language model evaluation harness (lm-eval) that needs no download, and its scores.

The task, `word_order`, asks which of four lines of held-out text comes next; three of them have two words exchanged.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support import import_benchmark

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
    lines = import_benchmark("harness.texts").held_out().splitlines(keepends=True)
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
