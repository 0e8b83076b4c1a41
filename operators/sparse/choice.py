"""The choice of a kernel path for sparse experts, timed on the machine for each layer's sizes and sparsity and stored on disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from moegraft.operators.atomic_file import new_file, user_cache
from moegraft.operators.errors import error_sentence
from moegraft.operators.machine import version_of

logger = logging.getLogger(__name__)

# Without timings, an estimate from the bytes read, which no GPU has measured: `pair` up to so many tokens.
PAIR_TOKENS = 64
DENSE = "dense"
# A sparse path must be faster than the dense one by more than the difference of two timings of one program.
LEAST_GAIN = 1.02


@dataclass(frozen=True, slots=True)
class TimedCase:
    """Everything except the number of tokens that the fastest path depends on."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    weights: str  # the packed weight type
    gated: bool
    sparsity: float  # share of routed neurons left out, rounded to 0.01
    gpu: str
    resident: int  # experts with a slot

    @property
    def key(self) -> str:
        """The case and the versions of the packages that compile and run the kernels, as JSON."""
        made_with = {name: version_of(name) for name in ("triton", "torch", "moegraft")}
        return json.dumps({**asdict(self), **made_with}, sort_keys=True)


def bucket_of(tokens: int) -> int:
    """Return the power of two that `tokens` are rounded up to."""
    return 1 << max(0, tokens - 1).bit_length()


def choices_path() -> Path | None:
    """Return the file in the user's cache folder; None if the user has none."""
    try:
        return user_cache("sparse_paths.json")
    except FileNotFoundError:
        return None


def default_path(tokens: int) -> str:
    return "pair" if tokens <= PAIR_TOKENS else DENSE


def fastest(times_ms: Mapping[str, float]) -> str:
    """Return the fastest path, but the dense one unless another is faster by LEAST_GAIN."""
    best = min(times_ms, key=times_ms.__getitem__)
    return DENSE if DENSE in times_ms and times_ms[best] * LEAST_GAIN > times_ms[DENSE] else best


class PathChoices:
    """The paths of one model's layers; equal layers are timed once.

    Args:
        file: the file that keeps times between processes; None for no file.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._times: dict[str, dict[str, dict[str, float]]] = {}  # by case, bucket and path
        self._read = file is None
        self._keys: dict[TimedCase, str] = {}  # looking up versions takes a millisecond, too long for every call

    def path(self, case: TimedCase, tokens: int, measure: Callable[[int], Mapping[str, float]] | None) -> str:
        """Return the path for a batch of `tokens`.

        Args:
            measure: times the paths for a bucket, in ms; None where timing is not possible now, so that an unknown bucket gets a default.
        """
        bucket = bucket_of(tokens)
        key = self._keys.get(case)
        if key is None:
            key = self._keys[case] = case.key
        times = self._known(key).get(str(bucket))
        if times is None and measure is not None:
            times = self._add(key, bucket, dict(measure(bucket)))
        return fastest(times) if times else default_path(tokens)

    def times(self) -> Iterator[tuple[str, int, Mapping[str, float]]]:
        """Yield the case, the bucket and the ms by path of all timings so far."""
        for case, buckets in self._times.items():
            for bucket, times in buckets.items():
                yield case, int(bucket), times

    def _known(self, case: str) -> dict[str, dict[str, float]]:
        if not self._read and self._file is not None:
            self._times = _read(self._file)
            self._read = True
        return self._times.setdefault(case, {})

    def _add(self, case: str, bucket: int, times: dict[str, float]) -> dict[str, float]:
        self._known(case)[str(bucket)] = times
        logger.debug("sparse experts, %d tokens: %s", bucket, ", ".join(f"{path} {ms:.4f} ms" for path, ms in times.items()))
        if self._file is not None:
            _write(self._file, self._times)
        return times


def _read(file: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return the times in the file; none where it cannot be read, in which case it is written again."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {
            str(case): {str(int(bucket)): {str(path): float(ms) for path, ms in times.items()} for bucket, times in buckets.items()}
            for case, buckets in found.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write(file: Path, times: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Add times to the file; if the folder cannot be written, the next process measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(file) as new:
            others = _read(file)  # no other process writes it now
            merged = {case: {**others.get(case, {}), **times.get(case, {})} for case in {**others, **times}}
            new.write(json.dumps(merged, indent=1, sort_keys=True).encode())
    except OSError as error:
        logger.warning("%s: the choice of kernels is not saved: %s", file, error_sentence(error))
