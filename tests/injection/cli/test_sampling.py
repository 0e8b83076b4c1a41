"""Sampling options: what they ask of `generate`, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from moegraft.injection.cli.options import SamplingOptions


@pytest.mark.parametrize(
    ("given", "model_samples", "asked"),
    [
        ({}, True, {"do_sample": True}),
        ({}, False, {"do_sample": False, "temperature": 1.0, "top_k": 50}),
        ({"temperature": 0.7}, False, {"do_sample": True, "temperature": 0.7}),  # the shape of a draw asks for drawing
        ({"temperature": 0.0}, True, {"do_sample": False, "temperature": 1.0}),
        ({"temperature": 1e-40}, True, {"do_sample": False, "temperature": 1.0}),  # nothing can be divided by it
        ({"do_sample": False}, True, {"do_sample": False, "top_p": 1.0, "min_p": None}),  # the model's own shape is taken back
        ({"top_k": 0, "min_p": 0.1}, False, {"do_sample": True, "top_k": 0, "min_p": 0.1}),
        ({"repetition_penalty": 1.2, "no_repeat_ngram_size": 3}, False, {"do_sample": False, "repetition_penalty": 1.2}),
    ],
)
def test_options_become_arguments_of_generate(given: dict[str, Any], model_samples: bool, asked: dict[str, Any]) -> None:
    arguments = SamplingOptions(**given).overrides(model_samples=model_samples)
    assert arguments.items() >= asked.items()


@pytest.mark.parametrize(
    ("given", "model_temperature", "samples"),
    [
        ({}, 1e-6, False),
        ({"do_sample": True}, 1e-6, False),
        ({"top_p": 0.9}, 1e-6, False),
        ({"temperature": 0.7}, 1e-6, True),  # the user's temperature replaces the model's
        ({}, 0.7, True),
        ({}, None, True),
    ],
)
def test_a_tiny_temperature_of_the_model_is_greedy(given: dict[str, Any], model_temperature: float | None, samples: bool) -> None:
    arguments = SamplingOptions(**given).overrides(model_samples=True, model_temperature=model_temperature)
    assert arguments["do_sample"] is samples
    assert samples or arguments["temperature"] == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"do_sample": False, "top_p": 0.9}, "--no-do-sample leaves --top-p without effect"),
        ({"do_sample": True, "temperature": 0.0}, "give only one of them"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty must be above 0"),
        ({"do_sample": True, "temperature": 1e-40}, "give only one of them"),
        ({"repetition_penalty": 1e-40}, "--repetition-penalty must be above 0"),
        ({"repetition_penalty": float("nan")}, "--repetition-penalty must be a finite number"),
        ({"temperature": float("nan")}, "--temperature must be a finite number"),
        ({"min_p": float("nan")}, "--min-p must be a finite number"),
        ({"top_p": 0.0}, "--top-p must be above 0"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingOptions(**given)
