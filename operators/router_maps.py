"""Linear maps from the input of a layer's router to the logits of a later layer's router, fitted to a text by least squares.

HybriMoE (section IV-C) asks a later layer's router on the earlier input. A map that is fitted to what that router will see names more
experts: of the bundled model's, one to three layers ahead, 86, 82 and 79 % instead of 74, 64 and 60 % (benchmarks/README.md).

A file of maps is a safetensors file with `SOURCE>TARGET.weight` (E, H) float16 and `.bias` (E,) float32 for paths of two experts modules.

Shapes: T tokens, E experts, K experts per token, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn

from moegraft.operators.atomic_file import new_file
from moegraft.operators.errors import MoegraftError, UnsupportedModelError, error_sentence
from moegraft.operators.routing import Router, RouterRows
from moegraft.operators.routing_trace import DEPTHS, routed_calls
from moegraft.operators.structure import MTP

FORMAT = "moegraft router maps 1"
# Tokens for which a router's own rows count as much as the text: a map that few tokens fit stays near the router's weights.
PRIOR_TOKENS = 100
ROUNDING = 1e-13  # variance of equal float32 numbers of mean square 1 that were computed in different orders


class RouterMapsError(MoegraftError):
    """A file has no router maps, or those of another model; the message names it."""


class RouterMaps:
    """The maps of a file.

    Attributes:
        shapes: (E, H) of each, by the paths of its source and its target.

    Raises:
        OSError, RouterMapsError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes = _shapes(path, path.stat().st_mtime_ns)

    def rows(self, source: str, router: Router) -> RouterRows | None:
        """Return what names the experts of `router` on the input of the router at the path `source`; None where there is no map."""
        own = router.rows()
        if own is None or (source, router.path) not in self.shapes:
            return None
        with safe_open(self.path, "pt") as file:
            # Copies: a file that is written over would end the process in which its memory is still read.
            weight, bias = (file.get_tensor(f"{source}>{router.path}.{part}").clone() for part in ("weight", "bias"))
        return RouterRows(weight, bias, own.choice_bias).to(own.weight.device)


def why_unfit(maps: Path | None, shape: tuple[int, int], path: str | None = None) -> str | None:
    """Return why a file of maps, where one is given, cannot serve a layer with rows (E, H), or that of `path`; None where it can."""
    if maps is None:
        return None
    try:
        shapes = RouterMaps(maps).shapes
    except (OSError, RouterMapsError) as error:
        return f"{error_sentence(error)}; moegraft calibrate --router-maps FILE fits maps to a text"
    if path is not None and not any(path in pair for pair in shapes):
        # MTP layers run in drafts alone, in which nothing is fitted.
        return None if path.startswith(f"{MTP}.") else f"{maps}: the maps of another model, which has no {path}"
    found = {each for (_, target), each in shapes.items() if path in (None, target)}
    if not found or shape in found:
        return None
    others = " or ".join(f"{experts} experts of width {hidden}" for experts, hidden in sorted(found))
    return f"{maps}: maps of layers with {others}, where this one has {shape[0]} of width {shape[1]}"


@lru_cache(maxsize=1)  # each layer of a plan asks for it
def _shapes(path: Path, changed_ns: int) -> Mapping[tuple[str, str], tuple[int, int]]:
    """The shapes (E, H) of the maps, by their pairs of paths."""
    if not path.is_file():
        raise RouterMapsError(f"{path}: not a file")
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            if (file.metadata() or {}).get("format") != FORMAT:
                raise RouterMapsError(f"{path}: no file of router maps")
    except SafetensorError as error:
        raise RouterMapsError(f"{path}: no file of router maps ({error_sentence(error)})") from error
    found = {}
    for name, shape in shapes.items():
        pair, _, part = name.rpartition(".")
        source, arrow, target = pair.partition(">")
        if not arrow or part not in ("weight", "bias") or shapes.get(f"{pair}.bias") != shapes.get(f"{pair}.weight", ())[:1]:
            raise RouterMapsError(f"{path}: damaged: {name} {shape} has no matching other part")
        if part == "weight":
            found[source, target] = (shape[0], shape[1])
    return found


@dataclass(slots=True)
class _Sums:
    """Of one router's inputs x (T, H), and of the rests (T, E) that the router of each later layer leaves of its logits, by path."""

    shift: torch.Tensor  # (H,) float32, subtracted from x: products of large equal parts would leave little of the others
    x: torch.Tensor  # (H,) float64
    xx: torch.Tensor  # (H, H) float64
    tokens: int = 0
    rests: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # (E,), (H, E) float64


@torch.no_grad()
def fit_maps(model: nn.Module, texts: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fit maps to texts, each (T,) int64 in one forward pass, and return the tensors of their file.

    Takes H * H * 8 bytes of memory for each layer.

    Raises:
        UnsupportedModelError: no two layers have routers that choose by rows of weights.
    """
    sums: dict[str, _Sums] = {}
    routers: dict[str, Router] = {}
    for calls in routed_calls(model, texts):
        inputs = [call.router_input.float().cpu() for call in calls]
        for number, (call, unshifted) in enumerate(zip(calls, inputs, strict=True)):
            if call.router.path not in sums:
                zeros = torch.zeros(unshifted.shape[1], dtype=torch.float64)
                sums[call.router.path] = _Sums(unshifted.mean(0), zeros, torch.outer(zeros, zeros))
            own = sums[call.router.path]
            x = unshifted - own.shift
            routers[call.router.path] = call.router
            own.tokens += len(x)
            own.x += x.double().sum(0)
            own.xx += (x.T @ x).double()
            for later, seen in list(zip(calls, inputs, strict=True))[number + 1 : number + 1 + DEPTHS]:
                rows = later.router.rows()
                if rows is None:
                    continue
                rest = F.linear(seen - unshifted, rows.weight.float().cpu())
                total, product = own.rests.get(later.router.path, (0, 0))
                own.rests[later.router.path] = rest.double().sum(0) + total, (x.T @ rest).double() + product
    tensors = {}
    for source, own in sums.items():
        if not own.rests:
            continue
        mean = own.x / own.tokens
        centred = own.xx - own.tokens * mean[:, None] * mean
        if not bool(centred.isfinite().all()):
            raise UnsupportedModelError(f"{source}: the inputs of its router are not finite, so that nothing can be fitted to them")
        prior = PRIOR_TOKENS * centred.trace() / (own.tokens * len(mean))
        size = (mean + own.shift).square().mean()
        if own.tokens < 2 or not bool(prior > PRIOR_TOKENS * (size * ROUNDING + torch.finfo(torch.float32).tiny)):
            raise UnsupportedModelError(f"{source}: all inputs of its router are alike, to which nothing can be fitted; give a longer text")
        factor = torch.linalg.cholesky(centred + prior * torch.eye(len(mean), dtype=torch.float64))
        for target, (total, product) in own.rests.items():
            rows = routers[target].rows()
            assert rows is not None, "it has left a rest"
            moved = torch.cholesky_solve(product - mean[:, None] * total, factor).T
            bias = total / own.tokens - moved @ (mean + own.shift) + (0 if rows.bias is None else rows.bias.double().cpu())
            tensors[f"{source}>{target}.weight"] = (rows.weight.double().cpu() + moved).to(torch.float16).contiguous()
            tensors[f"{source}>{target}.bias"] = bias.float()
    if not tensors:
        raise UnsupportedModelError("no two layers have routers that choose experts by rows of weights: there is nothing to fit")
    return tensors


def save_maps(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write the tensors of `fit_maps`.

    Raises:
        OSError: the file cannot be written.
    """
    with new_file(path) as file:
        file.write(safetensors.torch.save(dict(tensors), {"format": FORMAT}))


@torch.no_grad()
def named_shares(model: nn.Module, texts: Iterable[torch.Tensor], maps: RouterMaps) -> list[tuple[float, float]]:
    """Return which share of the tokens' experts routers and maps name, by the number of layers ahead; a text is as in `fit_maps`."""
    hits = torch.zeros(DEPTHS, 2, dtype=torch.float64)
    counts = torch.zeros(DEPTHS, 1, dtype=torch.float64)
    for calls in routed_calls(model, texts):
        for number, call in enumerate(calls):
            for depth, later in enumerate(calls[number + 1 : number + 1 + DEPTHS]):
                rows = maps.rows(call.router.path, later.router)
                if rows is None:
                    continue
                chosen = later.top_k_index
                named = later.router.route(call.router_input), rows.choose(call.router_input, chosen.shape[1])
                hits[depth] += torch.tensor([float((each[:, :, None] == chosen[:, None]).sum()) for each in named])
                counts[depth] += chosen.numel()
    return [(float(routed / count), float(fitted / count)) for (routed, fitted), (count,) in zip(hits, counts, strict=True) if count]
