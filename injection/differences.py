"""What changes from one plan of a model to another, module by module."""

from __future__ import annotations

from dataclasses import dataclass

from moegraft.injection.plan import Plan, Swap


@dataclass(frozen=True, slots=True)
class Difference:
    """A module that the two plans treat otherwise; None: it stays as it is."""

    module: str
    before: Swap | None
    after: Swap | None


def differences(before: Plan, after: Plan) -> list[Difference]:
    """Every module with another operator, other options or other bytes, in the order of the model as far as a plan knows it."""
    first = {swap.module: swap for swap in before.swaps}
    second = {swap.module: swap for swap in after.swaps}
    found = [Difference(module, first.get(module), second.get(module)) for module in dict.fromkeys([*first, *second])]
    return [difference for difference in found if not _same(difference.before, difference.after)]


def _same(before: Swap | None, after: Swap | None) -> bool:
    """Whether two rules come to the same thing, however they are written."""
    if before is None or after is None:
        return before is after
    held = before.footprint.by_device == after.footprint.by_device
    return before.operator == after.operator and before.options == after.options and held
