"""Two models' logits on one text: how far apart their next-token distributions are, and how well each predicts the text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

CHUNK = 64  # positions at a time: a float64 row of a large vocabulary has a megabyte


@dataclass(frozen=True, slots=True)
class LogitsError:
    """Injected against stock, over all positions.

    Attributes:
        kl_nats: mean of KL(stock || injected), in nats.
        top1_agreement: share of positions where both find the same token likeliest.
        stock_perplexity, injected_perplexity: of the text's own next tokens.
    """

    positions: int
    kl_nats: float
    top1_agreement: float
    stock_perplexity: float
    injected_perplexity: float


def compare_logits(stock: torch.Tensor, injected: torch.Tensor, ids: torch.Tensor) -> LogitsError:
    """
    Args:
        stock, injected: (T, V) of any float dtype.
        ids: (T,) the tokens that the logits were computed on; T is 2 at least.
    """
    kl = agreed = 0.0
    losses = [0.0, 0.0]
    for start in range(0, len(ids), CHUNK):
        part = slice(start, start + CHUNK)
        ours, theirs = (logits[part].double().log_softmax(-1) for logits in (injected, stock))
        kl += float(F.kl_div(ours, theirs, log_target=True, reduction="sum"))
        agreed += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
        following = ids[start + 1 : start + CHUNK + 1]
        for index, logs in enumerate((theirs, ours)):
            losses[index] += float(F.nll_loss(logs[: len(following)], following, reduction="sum")) if len(following) else 0.0
    perplexities = [float(torch.tensor(loss / (len(ids) - 1), dtype=torch.float64).exp()) for loss in losses]
    return LogitsError(len(ids), kl / len(ids), agreed / len(ids), perplexities[0], perplexities[1])
