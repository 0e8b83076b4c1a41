"""Ctrl-C as a request to stop the answer, obeyed where the model's state is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria
from transformers.modeling_layers import GradientCheckpointingLayer


class PromptInterrupted(Exception):
    """The answer was stopped before its first token."""


class StopRequest(StoppingCriteria):
    """Set by the first Ctrl-C; `generate` asks it after each token. A second Ctrl-C raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.requested = False
        self._tokens_seen = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._tokens_seen = True
        return torch.full((input_ids.shape[0],), self.requested, dtype=torch.bool, device=input_ids.device)

    @contextmanager
    def listening(self, model: PreTrainedModel) -> Iterator[None]:
        """Ctrl-C goes to this request while the body runs.

        Raises:
            PromptInterrupted: stopped while the prompt was read, which can take minutes: between two layers of the model.
        """
        hooks = [
            module.register_forward_pre_hook(self._between_layers)
            for module in model.modules()
            if isinstance(module, GradientCheckpointingLayer)  # what transformers builds decoder layers on
        ]
        main_thread = threading.current_thread() is threading.main_thread()  # others cannot set signal handlers
        previous = signal.signal(signal.SIGINT, self._request) if main_thread else None
        try:
            yield
        finally:
            if main_thread:
                signal.signal(signal.SIGINT, previous)
            for hook in hooks:
                hook.remove()

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def _between_layers(self, module: torch.nn.Module, args: Any) -> None:
        if self.requested and not self._tokens_seen:
            raise PromptInterrupted
