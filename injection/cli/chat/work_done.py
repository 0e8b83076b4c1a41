"""What drafts and devices did since the model was loaded, in the words that are shown for it."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel

from moegraft.injection.graft import Injection


def work_lines(model: PreTrainedModel) -> list[str]:
    """A line for drafts, if there were any, and one for each device that experts share."""
    injection: object = getattr(model, "moegraft", None)
    if not isinstance(injection, Injection):
        return []
    lines = []
    operator = injection.model_operator
    if operator is not None and operator.statistics().get("rounds"):
        lines.append(f"drafts: {_drafts(operator.statistics())}")
    devices = injection.statistics()["devices"]
    assert isinstance(devices, Mapping), "devices by name"
    return [*lines, *(f"{name}: {_named(found)}" for name, found in devices.items())]


def _drafts(found: Mapping[str, object]) -> str:
    seconds = {name: f"{_number(found[f'{name}_ms']) / 1e3:.2f} s" for name in ("draft", "verify", "plain")}
    shares = found["acceptance_by_position"]
    assert isinstance(shares, tuple), "a share for each position"
    lossy = "" if found["agreement"] is None else f"; {_cost(found)}"
    return (
        f"{found['rounds']} rounds of {_number(found['tokens_per_round']):.2f} tokens; accepted by position "
        f"{' '.join(f'{share:.2f}' for share in shares)}; {seconds['draft']} drafting, {seconds['verify']} verifying, "
        f"{seconds['plain']} for {found['plain_tokens']} tokens without a draft; {found['schedule']}{lossy}"
    )


def _cost(found: Mapping[str, object]) -> str:
    """Of a mode that changes what the model says."""
    return (
        f"{_number(found['agreement']):.1%} as lossless decoding has it, perplexity {_number(found['perplexity']):.2f} under the full model"
    )


def _number(value: object) -> float:
    assert isinstance(value, int | float), f"a figure, not {value!r}"
    return float(value)


def _named(found: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" if name == "slots" else f"{name}: {value}" for name, value in found.items())
