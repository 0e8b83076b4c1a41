"""Train the bundled demo model: a Qwen3-MoE of 5 million parameters that writes blank verse, on 2 cores in about an hour.

    python benchmarks/train_demo.py --out injection/demo --work build/train_demo

Shapes: B windows, S tokens per window, T = B * S tokens, L layers, E experts, V vocabulary.
"""

import argparse
import math
import random
import time
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from demo_recipe import (
    CONTEXT,
    Evaluation,
    build_model,
    evaluate,
    expert_share,
    export,
    router_logits,
    to_bfloat16,
    train_tokenizer,
)
from harness.record import write_rows
from harness.texts import TEXT, split_text
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

STEP_TOKENS = 2 * CONTEXT
PEAK_RATE, WEIGHT_DECAY, DROPOUT = 1.5e-3, 0.1, 0.2
WARMUP = 0.03  # share of the run
BALANCE = 0.02  # weight of the load-balancing loss
EVAL_EVERY = 100  # steps


@dataclass(slots=True)
class Progress:
    """The progress of a run, which every checkpoint contains."""

    step: int = 0
    elapsed_s: float = 0.0
    best_loss: float = math.inf
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)


def cut_scenes(speeches: list[list[int]], end: int, seed: int) -> Tensor:
    """Return one pass over the plays as tokens `(N,)`, with END before every scene of two to four speeches; the cuts depend on the seed."""
    draw = random.Random(seed)
    stream: list[int] = []
    left = 0
    for speech in speeches:
        if left == 0:
            stream.append(end)
            left = draw.randint(2, 4)
        stream.extend(speech)
        left -= 1
    return torch.tensor(stream)


def draw_windows(stream: Tensor, seed: int) -> Tensor:
    """Draw random windows `(B, S + 1)`: one batch in eight has the whole context, to train its positions, others a quarter of it."""
    draw = random.Random(seed)
    size = CONTEXT if draw.random() < 1 / 8 else CONTEXT // 4
    starts = [draw.randrange(len(stream) - size) for _ in range(STEP_TOKENS // size)]
    return torch.stack([stream[start : start + size + 1] for start in starts])


def add_dropout(model: nn.Module, rate: float) -> None:
    """Drop channels of the embeddings and of each attention and expert block's output, in train mode only.

    One mask serves all positions of a window (arXiv:1512.05287, section 4), which is cheap to draw.
    """

    def drop(module: nn.Module, _args: object, output: Any) -> Any:
        hidden_states = output[0] if isinstance(output, tuple) else output  # (B, S, H)
        mask = functional.dropout(torch.ones_like(hidden_states[:, :1]), rate, module.training)
        return (hidden_states * mask, *output[1:]) if isinstance(output, tuple) else hidden_states * mask

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "self_attn", "mlp")):
            module.register_forward_hook(drop)


def balance_loss(layers: list[Tensor], top_k: int) -> Tensor:
    """Return Switch Transformer's balancing loss (arXiv:2101.03961, equation 4) per layer: 1 when all experts have the same load.

    The loss in transformers sums the layers first, so that an idle expert of one layer is not seen if the same index is busy in another.
    """
    terms = [logits.shape[-1] * (expert_share(logits, top_k) * logits.float().softmax(-1).mean(0)).sum() for logits in layers]
    return torch.stack(terms).mean()


def share_done(progress: Progress, options: argparse.Namespace) -> float:
    """Return the share of the run that is done, by steps or by time, whichever is larger."""
    return max(progress.step / options.steps, progress.elapsed_s / 60 / options.minutes)


def learning_rate(done: float) -> float:
    """Return the learning rate at the share `done` of the run: linear warm-up, then a cosine to zero."""
    if done < WARMUP:
        return PEAK_RATE * (done + 1e-3) / WARMUP
    return PEAK_RATE * 0.5 * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP)))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW without weight decay of the norms."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


def take_step(model: Any, twin: Any, optimizer: torch.optim.Optimizer, windows: Tensor) -> Tensor:
    """Update `model` in float32 with the gradients of `twin`, its copy in bfloat16, on windows `(B, S + 1)`.

    Returns the cross-entropy in nats per token, without the balancing loss.
    """
    twin.train()
    with router_logits(twin) as layers:
        logits = twin(input_ids=windows[:, :-1], use_cache=False).logits  # (B, S, V)
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
    (loss + BALANCE * balance_loss(layers, twin.config.num_experts_per_tok)).backward()
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    for weight, low in pairs:
        weight.grad, low.grad = low.grad.float(), None
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for weight, low in pairs:
            low.copy_(weight)
    return loss.detach()


def save_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write the checkpoint atomically, so that an interrupted run keeps the previous one."""
    state = {name: getattr(progress, name) for name in Progress.__slots__}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Resume a run from its last checkpoint."""
    if not path.exists():
        raise ValueError(f"{path}: there is no checkpoint to resume; leave --resume out, or name the --work folder of the run")
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return Progress(**{name: state[name] for name in Progress.__slots__})


def train(model: Any, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> Progress:
    """Train until the schedule or the time ends; the returned progress has the weights of the best validation."""
    training, validation = split_text(TEXT.read_text())
    speeches = [tokenizer.encode(speech + "\n\n", verbose=False) for speech in training.rstrip("\n").split("\n\n")]
    pass_steps = sum(map(len, speeches)) // STEP_TOKENS
    optimizer = make_optimizer(model)
    checkpoint = options.work / "state.pt"
    progress = load_state(checkpoint, model, optimizer) if options.resume else Progress()
    twin = to_bfloat16(deepcopy(model))
    add_dropout(twin, DROPOUT)
    since, losses, stream = time.monotonic(), [], torch.empty(0)
    done = share_done(progress, options)
    while done < 1:
        if not len(stream) or progress.step % pass_steps == 0:
            stream = cut_scenes(speeches, tokenizer.eos_token_id, options.seed + progress.step // pass_steps)
        windows = draw_windows(stream, options.seed + progress.step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done)
        losses.append(take_step(model, twin, optimizer, windows))
        progress.step += 1
        now = time.monotonic()
        progress.elapsed_s += now - since
        since = now
        done = share_done(progress, options)
        if progress.step % EVAL_EVERY == 0 or done >= 1:
            record(twin, evaluate(twin, tokenizer, validation), progress, torch.stack(losses).mean().item())
            losses.clear()
            save_state(checkpoint, model, optimizer, progress)
    return progress


def record(model: Any, result: Evaluation, progress: Progress, train_loss: float) -> None:
    """Add a point to the curve, print it, and keep the weights if they are the best so far."""
    point = {
        "steps": progress.step,
        "tokens": progress.step * STEP_TOKENS,
        "minutes": round(progress.elapsed_s / 60, 2),
        "train_loss": round(train_loss, 4),
        "validation_loss": round(result.loss, 4),
        "validation_bits_per_byte": round(result.bits_per_byte, 4),
        "smallest_expert_share": round(result.load.min().item(), 4),
        "largest_expert_share": round(result.load.max().item(), 4),
    }
    progress.curve.append(point)
    speed = point["tokens"] / progress.elapsed_s
    print(*(f"{name} {value}" for name, value in point.items()), f"tokens/s {speed:.0f}", sep="  ", flush=True)
    if result.loss < progress.best_loss:
        progress.best_loss = result.loss
        progress.best_weights = {name: weight.clone() for name, weight in model.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint to resume from")
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit; the learning rate reaches zero at it, or after all steps")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1623)
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in --work")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    training, validation = split_text(TEXT.read_text())
    tokenizer = train_tokenizer(training)
    model = build_model(tokenizer)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters", flush=True)
    progress = train(model, tokenizer, options)
    model.load_state_dict(progress.best_weights)
    export(model, tokenizer, options.out)
    shipped = evaluate(model, tokenizer, validation)
    print(f"exported: {shipped.loss:.4f} nats per token, {shipped.bits_per_byte:.4f} bits per byte")
    packages = ("torch", "transformers", "tokenizers")
    origin = {"seed": options.seed, "threads": torch.get_num_threads()}
    write_rows("demo_training", [{**point, **origin} for point in progress.curve], packages)
    loads = [(layer, expert, share) for layer, shares in enumerate(shipped.load.tolist()) for expert, share in enumerate(shares)]
    rows = [{"layer": layer, "expert": expert, "share_of_routed_tokens": round(share, 4)} for layer, expert, share in loads]
    write_rows("demo_expert_load", rows, packages)


if __name__ == "__main__":
    main()
