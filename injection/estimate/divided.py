"""Predictions for a model whose experts are divided over several machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moegraft.injection.estimate.forecast import TargetMachine
from moegraft.injection.estimate.memory import memory_of
from moegraft.injection.estimate.network import Network
from moegraft.injection.estimate.planned import PlannedModel, Workload
from moegraft.injection.estimate.speed import Speed, Work, missing_rates, predict, work_of
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.parallel import KEPT_FREE, divide_by_speed
from moegraft.injection.planning import Plan, plan
from moegraft.injection.rules import RuleFile
from moegraft.operators.cache_form import KvCache, kv_cache
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.expert_group import Shares
from moegraft.operators.experts_layer import experts_per_token
from moegraft.operators.layout import read_layout
from moegraft.operators.registry import OperatorRegistry

# What a layer takes more when one other rank is asked, and with each further one, as `doctor --measure` found in two and three processes
# on two cores (240 to 262 us, and 126 us more).
ASKED_S = 2.5e-4
EACH_FURTHER_S = 1.3e-4
CABLE_S = 5e-5  # that a message and its reply take longer between two machines; an assumption
NETWORK_GBIT = 10.0  # where none is given or measured
DRAWS = 4000  # of a token's experts, for the mean of the machine with the most of them


@dataclass(frozen=True, slots=True)
class Node:
    """One machine: its share of the experts, the bytes it needs with Python and its libraries, and those it has."""

    rank: int
    share: float
    needed_bytes: int
    available_bytes: int

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True)
class DividedForecast:
    """The machines, and the speed of all together; None if no rates are measured.

    Attributes:
        network_gbit: the bandwidth of each machine's link.
    """

    nodes: tuple[Node, ...]
    speed: Speed | None
    network_gbit: float

    @property
    def fits(self) -> bool:
        return all(node.fits for node in self.nodes)


def divided_forecast(
    meta_model: MetaModel,
    rules: RuleFile,
    whole: Plan,
    load: Workload,
    memory: Sequence[int],
    target: TargetMachine,
    registry: OperatorRegistry,
    network_gbit: float | None = None,
    measured: Network | None = None,
) -> DividedForecast:
    """Predict the memory of each machine, and the speed of machines that are as fast as this one.

    Args:
        whole: the plan for one machine.
        network_gbit: the bandwidth between the machines; by default the slowest link of `measured`, or else 10.
        measured: the messages' time.
        memory: bytes of each machine; the first one also holds what is not experts.

    Raises:
        NotEnoughMemoryError: the experts do not fit.
        RuleErrors: the rules cannot be divided.
        UnsupportedModelError: there are more machines than experts, or the rules have shares for another number of machines.
    """
    experts = sum(swap.footprint.by_device.get("cpu", 0) for swap in whole.swaps if swap.operator_type.kind == "experts")
    rest = whole.bytes_by_device.get("cpu", 0) - experts
    if isinstance(rules.shares, str):
        bytes_free = [int(free * (1 - KEPT_FREE)) - (0 if rank else rest) for rank, free in enumerate(memory)]
        sizes: Sequence[float] = divide_by_speed([1.0] * len(memory), bytes_free, experts)
    else:
        sizes = rules.shares
        if len(sizes) != len(memory):
            raise UnsupportedModelError(f"parallel.shares has {len(sizes)} numbers, for {len(memory)} machines; give one for each")
    cache = kv_cache(meta_model.skeleton)
    nodes = []
    for rank, free in enumerate(memory):
        shares = Shares(tuple(sizes), rank)
        planned = PlannedModel(meta_model, plan(meta_model, rules, registry=registry, shares=shares), registry)
        nodes.append(Node(rank, shares.sizes[rank] / sum(shares.sizes), _needed(planned, cache, load, rank), free))
    gbit = network_gbit or (NETWORK_GBIT if measured is None else measured.slowest.gbit)
    message_s = _message_s(len(sizes) - 1, measured)
    speed = _speed(PlannedModel(meta_model, whole, registry), load, cache, target, sizes, gbit, message_s)
    return DividedForecast(tuple(nodes), speed, gbit)


def _message_s(others: int, measured: Network | None) -> float:
    """Return the time that a layer takes longer when all other ranks are asked for one row."""
    if others == 0:
        return 0.0
    if measured is None:
        return ASKED_S + CABLE_S + EACH_FURTHER_S * (others - 1)
    one_s, all_s = 1e-6 * max(link.layer_us for link in measured.links), 1e-6 * measured.all_us
    further = len(measured.links) - 1
    each_s = max(all_s - one_s, 0.0) / further if further else EACH_FURTHER_S
    return one_s + each_s * (others - 1)


def _needed(planned: PlannedModel, cache: KvCache, load: Workload, rank: int) -> int:
    memory = memory_of(planned, replace(cache, form=planned.cache_form()), load, on_gpu=False)
    return memory.needed if rank == 0 else memory.at_rest


def _speed(
    planned: PlannedModel,
    load: Workload,
    cache: KvCache,
    target: TargetMachine,
    sizes: Sequence[float],
    network_gbit: float,
    message_s: float,
) -> Speed | None:
    measured = target.measured
    if measured is None:
        return None
    works = work_of(planned)
    missing = missing_rates(works, measured)
    if missing:
        return Speed(None, None, missing)
    config = planned.meta_model.source.config.get_text_config()
    layers = [swap for swap in planned.plan.swaps if swap.operator_type.kind == "experts"]
    layout = read_layout(planned.meta_model.skeleton.get_submodule(layers[0].module))
    held = np.array([len(Shares(tuple(sizes), rank).experts(layout.num_experts)) for rank in range(len(sizes))])
    top_k = min(experts_per_token(config), layout.num_experts)

    def divided(work: Work, tokens: int) -> Work:
        if work.kind != "experts":
            return work
        largest = _largest_part(held, top_k, tokens)
        return replace(work, nbytes=int(work.nbytes * largest), weight_count=int(work.weight_count * largest))

    def messages_s(tokens: int) -> float:
        item = planned.meta_model.dtype.itemsize
        nbytes = 2 * tokens * layout.hidden * item * (len(sizes) - 1)  # there and back, all over rank 0's link
        return len(layers) * (message_s + nbytes * 8 / (network_gbit * 1e9))

    def tokens_s(tokens: int, *, decode: bool) -> float:
        speed = predict(
            [divided(work, tokens) for work in works],
            measured,
            layers=config.num_hidden_layers,
            kv_bytes=cache.nbytes(load.context, load.batch),
            load=replace(load, batch=tokens) if decode else replace(load, prompt=tokens),
            replays=planned.replays_steps(load),
        )
        found = speed.decode_tokens_s if decode else speed.prefill_tokens_s
        assert found is not None, "all rates are known"
        return tokens / (tokens / found + messages_s(tokens))

    return Speed(tokens_s(load.batch, decode=True), tokens_s(load.prompt, decode=False))


def _largest_part(held: np.ndarray[tuple[int], np.dtype[np.int64]], top_k: int, tokens: int) -> float:
    """Return the part of a step's experts that the busiest machine computes: the mean over random choices of `top_k` experts."""
    if tokens > 1:  # nearly all experts are needed, each machine's alike
        return float(held.max() / held.sum())
    drawn = np.random.default_rng(0).multivariate_hypergeometric(held, top_k, DRAWS)
    return float(drawn.max(-1).mean() / top_k)
