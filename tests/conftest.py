"""What every test shares: no network, quiet libraries, one thread for stock PyTorch."""

from __future__ import annotations

import os

# Read by the libraries when they are imported, so set before anything here imports them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny models: more threads cost more than they bring
