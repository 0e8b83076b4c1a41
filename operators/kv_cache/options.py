"""The options of `quantized_kv_cache`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from transformers import cache_utils

from moegraft.operators.cache_form import QuantisedForm

Backend = Literal["hqq", "quanto", "fp8"]
# hqq has 1 bit as well, which leaves little of the text, and 3, of which it brings back ten values at a time, wherever tokens end.
BITS: dict[Backend, tuple[int, ...]] = {"hqq": (2, 4, 8), "quanto": (2, 4), "fp8": (8,)}
DEFAULT_BITS: dict[Backend, int] = {"hqq": 8, "quanto": 4, "fp8": 8}
PACKAGES: dict[Backend, tuple[str, str] | None] = {"hqq": ("hqq", "hqq"), "quanto": ("optimum.quanto", "optimum-quanto"), "fp8": None}
RESIDUAL = 128


@dataclass(frozen=True, slots=True)
class QuantizedKvCacheOptions:
    """Options of `quantized_kv_cache`.

    Attributes:
        backend: who quantises: `hqq` (the package of that name) and `quanto` (optimum-quanto, which compiles a kernel when it is first
            used) have a scale and a zero point for every `group` values; `fp8` is transformers' own, with one scale for a layer's keys
            and one for its values, taken from the first tokens.
        bits: of a stored value: 2, 4 or 8 with `hqq`, 2 or 4 with `quanto`. By default 8, with `quanto` 4.
        group: values of one head of one token that share a scale. By default the largest of 64, 32, 16 and 8 that divides heads.
        residual: tokens that wait in the model's dtype until so many are there, and are quantised together with all before them;
            a prompt is quantised at once. By default 128. `fp8` has none.
    """

    backend: Backend = "hqq"
    bits: int | None = None
    group: int | None = None
    residual: int | None = None

    def __post_init__(self) -> None:
        known = BITS[self.backend]
        if self.bits is not None and self.bits not in known:
            raise ValueError(f"bits with 'backend: {self.backend}' must be {_either(known)}, not {self.bits}")
        if self.backend == "fp8" and (self.group is not None or self.residual is not None):
            name = "group" if self.group is not None else "residual"
            raise ValueError(f"'backend: fp8' has one scale for all tokens and keeps none apart: '{name}' cannot go with it")
        for name, value in (("group", self.group), ("residual", self.residual)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")

    @property
    def value_bits(self) -> int:
        return DEFAULT_BITS[self.backend] if self.bits is None else self.bits

    def form(self, group: int) -> QuantisedForm:
        """What a layer's cache becomes, `group` being that of this model."""
        if self.backend == "fp8":
            return QuantisedForm(self.value_bits, None, 0)
        return QuantisedForm(self.value_bits, group, self.residual or RESIDUAL)

    def cache_config(self, group: int) -> dict[str, object]:
        """What transformers' `QuantizedCache` takes; groups lie along a head, which is its axis 1 with hqq and 0 with quanto."""
        if self.backend == "fp8":
            return {"backend": self.backend}
        axis = 1 if self.backend == "hqq" else 0
        sizes = {"nbits": self.value_bits, "q_group_size": group, "residual_length": self.residual or RESIDUAL}
        return {"backend": self.backend, "axis_key": axis, "axis_value": axis, **sizes}

    def why_not_here(self) -> str | None:
        """What this installation lacks."""
        package = PACKAGES[self.backend]
        if self.backend == "fp8" and not hasattr(cache_utils, "Fp8QuantizedLayer"):
            return "this version of transformers has no fp8 cache: install transformers 5.23, or write 'backend: hqq'"
        if package is not None and not _is_installed(package[0]):
            extra = "kv-cache" if self.backend == "hqq" else "kv-quanto"
            return f"{package[1]} is not installed; install it with pip install 'moegraft[{extra}]' (or pip install {package[1]})"
        return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent is not there
        return False


def _either(values: tuple[int, ...]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
