"""The experts of a model that stay in files, of which host memory has as many as a budget allows: the level under a GPU's slots.

What decides and reads is native (`ExpertFrames`), as a recorded step computes a token without Python.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moegraft.cpu_backend import ExpertFrames, PackedExperts
from moegraft.operators.errors import NotEnoughMemoryError, UnsupportedModelError, human_bytes
from moegraft.operators.machine import probe_machine
from moegraft.operators.offload.options import CacheOptions, make_policy, parse_bytes
from moegraft.operators.router_maps import RouterMaps
from moegraft.operators.routing import Router, RouterRows

logger = logging.getLogger(__name__)
# Of what is free when the rest of the model is loaded; the rest is for the KV cache, activations and other programs. An estimate.
AUTO_SHARE = 0.8


def budget_bytes(memory: str, free_bytes: int) -> int:
    """Return the bytes of the option `memory`, where so many are free."""
    return int(AUTO_SHARE * free_bytes) if memory == "auto" else parse_bytes(memory)


@dataclass(frozen=True, slots=True)
class InFile:
    """Where the packed experts of a layer are.

    Attributes:
        offset: of the first, a multiple of 64.
        checksums: CRC-32 of each; empty where the file was verified already.
    """

    path: Path
    offset: int
    checksums: Sequence[int] = ()


class FramedLayers:
    """The layers of one model whose experts share frames, in the model's order."""

    def __init__(self) -> None:
        self._memory: tuple[str, CacheOptions] | None = None
        self._layers: list[tuple[PackedExperts, InFile] | None] = []
        self._frames: ExpertFrames | None = None

    def join(self, memory: str, policy: CacheOptions, num_experts: int, expert_bytes: int) -> int:
        """Return the number of a layer; called in the model's order, before weights are read.

        Raises:
            UnsupportedModelError: layers have different budgets or cache policies.
            NotEnoughMemoryError: the budget is too small for a layer.
        """
        before, _ = self._memory = self._memory or (memory, policy)
        if before != memory:
            raise UnsupportedModelError(f"memory is one budget for the experts of all layers, and the rules give {before} and {memory}")
        if self._memory != (memory, policy):
            raise UnsupportedModelError("one cache policy ranks the experts of all layers in memory, and the rules give several")
        least = ExpertFrames.least_bytes_for(num_experts, expert_bytes)
        if memory != "auto" and parse_bytes(memory) < least:
            raise NotEnoughMemoryError(
                f"memory: {memory} is too small: the {num_experts} experts of a layer, and those that are being read, take "
                f"{human_bytes(least)}"
            )
        self._layers.append(None)
        return len(self._layers) - 1

    def loaded(self, number: int, packed: PackedExperts, stored: InFile) -> None:
        """Take a layer whose file is complete; `packed` maps it."""
        self._layers[number] = packed, stored

    def open(self, places: Callable[[], Mapping[int, tuple[str, Router | None, Path | None]]]) -> None:
        """Allocate the frames once all layers are loaded, before slots of a GPU are filled from them; called again, nothing happens.

        Args:
            places: returns each layer's path, the router that predicts it, and a file of maps that take the router's place where they can.

        Raises:
            NotEnoughMemoryError: too little memory is free for a layer.
        """
        if self._frames is not None or all(layer is None for layer in self._layers):  # in memory where no file can be written
            return
        found = places()
        layers = [(*found[number], *layer) for number, layer in enumerate(self._layers) if layer is not None]
        frames = ExpertFrames()
        for *_, packed, stored in layers:
            frames.add(packed, str(stored.path), stored.offset, stored.checksums)
        assert self._memory is not None, "a layer has joined"
        memory, options = self._memory
        free = probe_machine().available_bytes
        budget = budget_bytes(memory, free)
        least = frames.least_frames * frames.frame_bytes
        if budget < least:
            raise NotEnoughMemoryError(
                f"memory: {memory}: {human_bytes(budget)} of {human_bytes(free)} that are free, and the experts of a layer, with "
                f"those that are being read, take {human_bytes(least)}"
            )
        experts = [packed.shape.num_experts for *_, packed, _ in layers]
        paths = [path for path, *_ in layers]
        frames.open(budget, make_policy(options, paths, max(experts), top_k=max(experts)))  # scores are those of a token's experts alone
        self._frames = frames
        for number, (_, router, maps, packed, _) in enumerate(layers):
            if router is not None and packed.shape.num_experts == router.num_experts:  # of several processes, each holds some of them
                fitted = RouterMaps(maps).rows(paths[number - 1], router) if maps is not None and number else None
                _predict_by(frames, number, fitted or router.rows())
        every, size = sum(experts), sum(packed.nbytes for *_, packed, _ in layers)
        folder = layers[0][-1].path.parent
        if frames.frames >= every:
            logger.info(
                "memory has room for all %d experts (%s), which are read from %s as they are needed", every, human_bytes(size), folder
            )
            return
        held = human_bytes(frames.frames * frames.frame_bytes)
        text = "memory holds %d of %d experts (%s of %s); the others are read from %s as they are needed"
        logger.info(text, frames.frames, every, held, human_bytes(size), folder)

    @property
    def unfilled_bytes(self) -> int:
        """The bytes of frames that no expert was read into yet, which the system still counts as free."""
        frames = self._frames
        return 0 if frames is None else max(0, frames.frames - int(frames.counts()["reads"])) * frames.frame_bytes

    def statistics(self) -> Mapping[str, object]:
        """Return the frames and what they counted so far; nothing where there are none."""
        frames = self._frames
        return {} if frames is None else {"frames": frames.frames, "frame_bytes": frames.frame_bytes, **frames.counts()}


def _predict_by(frames: ExpertFrames, layer: int, rows: RouterRows | None) -> None:
    """Predict a layer by rows in host memory."""
    if rows is None or rows.weight.device.type != "cpu" or rows.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return
    bias, choice_bias = (None if each is None else each.float().contiguous() for each in (rows.bias, rows.choice_bias))
    frames.set_router(layer, rows.weight.contiguous(), bias, choice_bias)
