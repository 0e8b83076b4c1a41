"""What the server tells of its work: the figures of an answer, and Prometheus' text format."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.serving import Server, ask, serving, until

from moegraft.injection.cli.models import LoadedModel, load_model
from moegraft.injection.cli.options import ModelOptions
from moegraft.injection.cli.output import Terminal
from moegraft.injection.cli.serve.engine import difference, work_counts
from moegraft.injection.cli.serve.service import Limits

text_string_to_metric_families = pytest.importorskip(
    "prometheus_client.parser", reason="an extra for tests: pip install 'moegraft[test]'"
).text_string_to_metric_families

QUIET = Terminal(io.StringIO(), Console(file=io.StringIO()), quiet=True)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> tuple[Samples, dict[str, str]]:
    """Return the samples and the kinds of a page of metrics, as Prometheus' own parser reads them."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "each is described once"
    found = [((sample.name, frozenset(sample.labels.items())), sample.value) for family in families for sample in family.samples]
    assert len(dict(found)) == len(found), "each series comes once"
    return dict(found), {family.name: family.type for family in families}


def value(samples: Samples, metric: str, /, **labels: str) -> float:
    return samples[f"moegraft:{metric}", frozenset(labels.items())]


def of_model(samples: Samples, metric: str, /, **labels: str) -> float:
    return samples[f"vllm:{metric}", frozenset({"model_name": "the-bundled-model", **labels}.items())]


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


def test_a_stock_model_counts_no_work(stock: LoadedModel) -> None:
    assert work_counts(stock.model) == {}
    with serving(stock) as server:
        made = ask(server, "hello", max_tokens=1).model_extra["moegraft"]
    assert made["work"] == {} and made["tokens_per_second"] is None and made["first_token_ms"] > 0


def test_metrics_have_every_figure_in_prometheus_form(shared: Server) -> None:
    ask(shared, "Who goes there?", max_tokens=8)
    samples, kinds = parse(shared.get("/metrics"))
    engine = shared.service.engine
    ended = {end: value(samples, "requests_total", ending=end) for end in ("stop", "length", "cancelled", "failed")}
    assert ended == engine.endings and sum(ended.values()) >= 1
    assert of_model(samples, "generation_tokens_total") == engine.completion_tokens
    assert of_model(samples, "prompt_tokens_total") == engine.prompt_tokens == of_model(samples, "request_prompt_tokens_sum") > 0
    assert kinds["moegraft:work"] == "counter" and kinds["vllm:time_to_first_token_seconds"] == "histogram"
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


def test_histograms_have_what_requests_took(loaded: LoadedModel) -> None:
    """A request waits for another, reads 8 of its tokens from the cache, and each has its times counted once."""
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.005))
    try:
        with serving(loaded, Limits(max_batch=2)) as server, ThreadPoolExecutor(3) as pool:
            first = ask(server, "hello", max_tokens=4)
            again = ask(server, "hello", first.choices[0].message.content, "more", max_tokens=1)
            both = [pool.submit(ask, server, question, max_tokens=60) for question in ("one", "two")]
            replies = [first, again, *(one.result() for one in both)]
            until(lambda: sum(server.service.engine.endings.values()) == 4)
            samples, kinds = parse(server.get("/metrics"))
    finally:
        hook.remove()

    def read(metric: str, **labels: str) -> float:
        return samples[f"vllm:{metric}", frozenset({"model_name": "tiny", **labels}.items())]

    usages = [reply.usage for reply in replies]
    for metric in ("time_to_first_token_seconds", "request_queue_time_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
        assert kinds[f"vllm:{metric}"] == "histogram" and read(f"{metric}_count") == 4
        buckets = [number for (name, _), number in samples.items() if name == f"vllm:{metric}_bucket"]
        assert buckets == sorted(buckets) and buckets[-1] == 4
    assert read("time_to_first_token_seconds_sum") == pytest.approx(
        sum(reply.moegraft["first_token_ms"] for reply in replies) / 1e3, rel=0.01
    )
    assert read("inter_token_latency_seconds_count") == sum(usage.completion_tokens - 1 for usage in usages)
    assert read("request_time_per_output_token_seconds_count") == 3, "an answer of one token has no such time"
    assert read("inter_token_latency_seconds_sum") >= 0.005 * read("inter_token_latency_seconds_count")
    assert read("request_generation_tokens_sum") == sum(usage.completion_tokens for usage in usages)
    assert read("prefix_cache_queries_total") == sum(usage.prompt_tokens for usage in usages)
    assert read("prefix_cache_hits_total") == sum(usage.prompt_tokens_details.cached_tokens for usage in usages) > 0
    assert read("request_success_total", finished_reason="length") == 4
    batches = samples["moegraft:batch_size_bucket", frozenset({("model_name", "tiny"), ("le", "1.0")})]
    assert 0 < batches < samples["moegraft:batch_size_count", frozenset({("model_name", "tiny")})], "two ran together"


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
