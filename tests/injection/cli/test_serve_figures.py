"""What the server tells of its work: the figures of an answer, and Prometheus' text format."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.serving import Server, ask, serving

from moegraft.injection.cli.models import LoadedModel, load_model
from moegraft.injection.cli.options import ModelOptions
from moegraft.injection.cli.output import Terminal
from moegraft.injection.cli.serve.engine import BOUNDS_S, Histogram, difference
from moegraft.injection.cli.serve.metrics import work_counts
from moegraft.injection.cli.serve.service import Limits

QUIET = Terminal(io.StringIO(), Console(file=io.StringIO()), quiet=True)
SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(?:,|$)')
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> tuple[Samples, dict[str, str]]:
    """The samples and the kinds of a page of metrics; fails on anything that Prometheus would refuse."""
    samples: Samples = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in helped, f"{name} is described once"
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind in ("counter", "gauge", "histogram") and name in helped and name not in kinds
            kinds[name] = kind
        else:
            found = SAMPLE.match(line)
            assert found, line
            name, labels, value = found.groups()
            pairs = tuple(LABEL.findall(labels or ""))
            assert sum(len(key) + len(said) + 4 for key, said in pairs) - 1 == len(labels) if labels else not pairs, line
            family = re.sub(r"_(bucket|sum|count)$", "", name) if name not in kinds else name
            assert family in kinds and next(reversed(kinds)) == family, f"{name} stands under its own head"
            assert (name, pairs) not in samples, f"{line} twice"
            samples[name, pairs] = float(value)
            assert kinds[family] != "counter" or family.endswith("_total")
    assert helped == set(kinds)
    return samples, kinds


def value(samples: Samples, metric: str, /, **labels: str) -> float:
    return samples[f"moegraft_{metric}", tuple(labels.items())]


@pytest.fixture(scope="module")
def shared(chat_folder: Path) -> Iterator[Server]:
    """A model whose experts are on two devices, that drafts and leaves neurons out."""
    variables = ["gpu=emulated", "weights=stored", "cache=0.5", "target=0.5"]
    loaded = load_model(ModelOptions(rules="all", var=variables, threads=1), QUIET)
    with serving(loaded, Limits()) as server:
        yield server


def test_an_answer_has_its_figures(shared: Server) -> None:
    before = work_counts(shared.service.loaded.model)
    whole = ask(shared, "What news from Rome?", temperature=0)
    chunks = list(ask(shared, "Speak of the king.", temperature=0, stream=True, stream_options={"include_usage": True}))
    first, second = whole.model_extra["moegraft"], chunks[-1].model_extra["moegraft"]
    for made in (first, second):
        assert made["first_token_ms"] > 0 and made["tokens_per_second"] > 0 and not made["together"]
        work = made["work"]
        assert 0 < work["experts_computed_on_cpu"] <= work["experts_used"] and work["experts_found_on_gpu"] <= work["experts_used"]
        assert 0 < work["neurons_left_out"] < work["neurons"]
        assert work.get("tokens_accepted", 0) <= work.get("tokens_drafted", 0)
    assert first["work"]["tokens_drafted"] > 0
    total = difference(work_counts(shared.service.loaded.model), before)
    for name, count in total.items():
        assert first["work"].get(name, 0) + second["work"].get(name, 0) == count, f"{name}: each answer counts its own"
    assert json.loads(shared.get("/v1/status"))["work"]["experts_used"] >= total["experts_used"]
    assert all("moegraft" not in (chunk.model_extra or {}) for chunk in chunks[:-1])


def test_a_stock_model_counts_no_work(loaded: LoadedModel) -> None:
    assert work_counts(loaded.model) == {}
    with serving(loaded) as server:
        made = ask(server, "hello", max_tokens=1).model_extra["moegraft"]
    assert made["work"] == {} and made["tokens_per_second"] is None and made["first_token_ms"] > 0


def test_metrics_have_every_figure_in_prometheus_form(shared: Server) -> None:
    ask(shared, "Who goes there?", max_tokens=8)
    samples, kinds = parse(shared.get("/metrics"))
    engine = shared.service.engine
    ended = {end: value(samples, "requests_total", ending=end) for end in ("stop", "length", "cancelled", "failed")}
    assert ended == engine.endings and sum(ended.values()) >= 1
    assert value(samples, "completion_tokens_total") == engine.completion_tokens
    assert value(samples, "prompt_tokens_total") == engine.prompt_tokens > 0
    assert value(samples, "first_token_seconds_count") == sum(ended.values())
    assert kinds["moegraft_work_total"] == "counter" and kinds["moegraft_first_token_seconds"] == "histogram"
    for name, count in work_counts(shared.service.loaded.model).items():
        assert value(samples, "work_total", what=name) == count
    injection: Any = shared.service.loaded.model.moegraft
    statistics = injection.statistics()
    for path, said in statistics["modules"].items():
        for name in (name for name, figure in said.items() if isinstance(figure, int | float)):
            assert value(samples, "operator", module=path, name=name) == pytest.approx(said[name])
    for name, said in statistics["devices"].items():
        for what in (what for what, figure in said.items() if isinstance(figure, int | float)):
            assert value(samples, "device", device=name, name=what) == said[what]
    assert value(samples, "device", device="emulated:0", name="used") == work_counts(shared.service.loaded.model)["experts_used"]
    (group,) = statistics["sparsity"]
    assert value(samples, "sparsity", target="0.5", scope="routed", name="routed_sparsity") == pytest.approx(group["routed_sparsity"])


def test_series_keep_their_names(shared: Server) -> None:
    """A label that changes with the figures would be a new series at each look."""
    ask(shared, "Speak of the queen.", max_tokens=8)
    before, _ = parse(shared.get("/metrics"))
    ask(shared, "Tell me of love and death.", max_tokens=8)
    after, _ = parse(shared.get("/metrics"))
    grown = {key for key in after.keys() - before.keys() if "acceptance_by_position" not in str(key)}
    assert not grown and before.keys() <= after.keys()


def test_a_histogram_counts_each_time_once() -> None:
    times = Histogram()
    for seconds in (0.0, BOUNDS_S[0], BOUNDS_S[0] + 1e-9, BOUNDS_S[-1] + 1):
        times.add(seconds)
    assert times.counts[:2] == [2, 1] and times.counts[-1] == 1 and sum(times.counts) == 4


def test_times_do_not_shrink_in_the_histogram(shared: Server) -> None:
    samples, _ = parse(shared.get("/metrics"))
    buckets = [count for (name, _), count in samples.items() if name == "moegraft_first_token_seconds_bucket"]
    assert buckets == sorted(buckets) and len(buckets) == len(BOUNDS_S) + 1
    assert buckets[-1] == value(samples, "first_token_seconds_count") and value(samples, "first_token_seconds_sum") > 0


def test_a_failure_to_count_ends_no_answer(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    with serving(loaded) as server:

        def fail() -> dict[str, int]:
            raise RuntimeError("no count")

        server.service.engine._counts = fail
        assert ask(server, "hello").choices[0].message.content
    assert any("cannot be counted" in record.message for record in caplog.records)


def test_metrics_have_the_times_of_decode_steps(chat_folder: Path) -> None:
    loaded = load_model(ModelOptions(model=str(chat_folder), rules="cpu-exact"), QUIET)
    with serving(loaded) as server:
        ask(server, "Who goes there?", max_tokens=20)
        samples, _ = parse(server.get("/metrics"))
    found: Any = loaded.model.moegraft.statistics()["decode_steps"]  # type: ignore[union-attr]
    assert found["replayed_steps"] > 5
    for name in ("replayed_steps", "programs", "step_us", "outside_kernels_us"):
        assert value(samples, "decode_steps", name=name) == pytest.approx(found[name])
