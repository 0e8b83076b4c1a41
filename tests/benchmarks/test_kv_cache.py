"""The benchmark of quantised caches measures each backend that is installed, beside the exact cache."""

from __future__ import annotations

from support import import_benchmark

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path

benchmark, texts = import_benchmark("kv_cache"), import_benchmark("harness.texts")


def test_the_exact_cache_differs_from_itself_by_nothing() -> None:
    window = texts.token_ids(texts.held_out()[:2000])[None, :160]
    exact, *others = benchmark.rows(optimize_and_load(demo_path(), "cpu-exact", progress=False, threads=1), [window], "bundled")
    assert (exact["backend"], exact["kl_nats"], exact["same_token"]) == ("exact", 0.0, 1.0)
    assert exact["tokens"] == 79
    for row in others:
        assert row["cache_bytes"] < exact["cache_bytes"] and row["kl_nats"] > 0
