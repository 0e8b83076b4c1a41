"""How the next token is chosen, under the names that `generate` gives its options."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

PANEL = "Sampling (by default what the model's generation_config.json says)"
SHAPING = ("temperature", "top_p", "top_k", "min_p")  # of use only when sampling
LEAST_TEMPERATURE = 1e-5  # below it the likeliest token is taken: logits divided by less can overflow float32
LEAST_PENALTY = 0.01  # penalties divide logits, too
# What `generate` takes for "off": a model's own values for these have to be overridden when its user asks for greedy.
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None}


def _option(name: str, metavar: str | None, about: str, **bounds: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=about, rich_help_panel=PANEL, show_default=False, **bounds)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling as the user asked for it; None leaves the model's own choice."""

    max_new_tokens: Annotated[int | None, _option("--max-new-tokens", "N", "Longest answer, in tokens.", min=1)] = None
    do_sample: Annotated[
        bool | None, _option("--do-sample/--no-do-sample", None, "Draw tokens at random, or always take the likeliest.")
    ] = None
    temperature: Annotated[
        float | None, _option("--temperature", "X", f"Flatness of the draw; below {LEAST_TEMPERATURE:g} takes the likeliest.", min=0.0)
    ] = None
    top_p: Annotated[
        float | None, _option("--top-p", "X", "Draw from the likeliest tokens that hold this probability.", min=0.0, max=1.0)
    ] = None
    top_k: Annotated[int | None, _option("--top-k", "N", "Draw from this many of the likeliest tokens; 0: from all.", min=0)] = None
    min_p: Annotated[
        float | None, _option("--min-p", "X", "Leave out tokens below this share of the likeliest one's probability.", min=0.0, max=1.0)
    ] = None
    repetition_penalty: Annotated[float | None, _option("--repetition-penalty", "X", "Above 1: repeat less.")] = None
    no_repeat_ngram_size: Annotated[
        int | None, _option("--no-repeat-ngram-size", "N", "Never repeat this many tokens in a row; 0: may.", min=0)
    ] = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"--{field.name.replace('_', '-')} must be a finite number, not {value}")
        if self.repetition_penalty is not None and self.repetition_penalty < LEAST_PENALTY:
            raise ValueError(f"--repetition-penalty must be above 0, and at least {LEAST_PENALTY:g}; 1 means none")
        if self.top_p == 0:
            raise ValueError("--top-p must be above 0; use --no-do-sample to always take the likeliest token")
        if self._greedy_temperature:
            if self.do_sample:
                raise ValueError(
                    f"--temperature {self.temperature:g} always takes the likeliest token, --do-sample draws; give one of them"
                )
        elif self.do_sample is False and self._shaping():
            names = ", ".join(f"--{name.replace('_', '-')}" for name in self._shaping())
            raise ValueError(f"--no-do-sample leaves {names} without effect; give one or the other")

    @property
    def _greedy_temperature(self) -> bool:
        return self.temperature is not None and self.temperature < LEAST_TEMPERATURE

    def _shaping(self) -> list[str]:
        return [name for name in SHAPING if getattr(self, name) is not None]

    def overrides(self, *, model_samples: bool) -> dict[str, Any]:
        """Keyword arguments for `generate`; naming a shape of the draw asks for drawing."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None}
        if self.do_sample is False or self._greedy_temperature or (self.do_sample is None and not self._shaping() and not model_samples):
            return {**given, **NEUTRAL, "do_sample": False}
        return {**given, "do_sample": True}
