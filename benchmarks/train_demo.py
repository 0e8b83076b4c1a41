"""Train the bundled demo model: a Qwen3-MoE of 5 million parameters that writes blank verse and calls tools, on 2 cores in about an hour.

    torchrun --nproc-per-node 2 benchmarks/train_demo.py --out injection/demo --work build/train_demo
    python benchmarks/train_demo.py --out injection/demo --work build/train_demo --mtp --minutes 40

The second command trains a layer for multi-token prediction on the model that the first one wrote, which it leaves as it is.

Shapes: B windows, S tokens per window, T = B * S tokens, L layers, E experts, K experts per token, H hidden, V vocabulary, D depths.
"""

import argparse
import json
import math
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness.demo_tokenizer import train_tokenizer
from harness.demo_windows import Mixture, cut_scenes, encode_dialogue
from harness.induction_heads import add_induction_heads
from harness.mtp_training import MtpLayer, drafted_logits, sampled_acceptance
from harness.muon import Muon, sum_over_processes
from harness.record import write_rows
from harness.texts import TEXT, split_text, token_ids
from harness.tool_dialogues import NO_TOOL, Writer
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moegraft.injection.checkpoint.files import MTP_FILE

CONTEXT, WINDOW = 8192, 256  # tokens of the longest training window, and of most
STEP_TOKENS = 2048  # in each process
EVALUATED = 99  # seed of the held-out dialogues
ROPE_THETA, ATTENTION_GAIN = 1e5, 1.8
# To which share of the run windows have which sizes, by their weights in the draw: dialogues are short first.
SIZES: tuple[tuple[float, dict[int, float]], ...] = (
    (0.4, {WINDOW: 1.0}),
    (1.0, {WINDOW: 0.88, 512: 0.05, 1024: 0.03, 2048: 0.025, 4096: 0.012, CONTEXT: 0.003}),
)
PASS_STEPS = 500  # batches of one process until the plays are cut into scenes in another way
KINDS = "ppdddddr"  # of a batch's windows: plays, dialogues and repeats
PEAK_RATE, WEIGHT_DECAY, DROPOUT = 2e-3, 0.1, 0.1
WARMUP, DECAY = 0.03, 0.35  # shares of the run
BALANCE = 0.02  # weight of the load-balancing loss
EVAL_EVERY = 100  # steps

MTP_RATE, MTP_STEP_TOKENS, MTP_WINDOW, MTP_DIALOGUES = 2e-3, 512, 1024, 512
DEPTHS = ((0.45, 1), (0.8, 2), (1.0, 3))  # to which share of the run drafts of which length are trained
DEPTH_WEIGHT = 0.6  # of each depth's loss relative to the one before: later drafts count only where the earlier ones were accepted
TEMPERATURE, TOP_P = 0.8, 0.95  # of the model's own sampling settings
OWN_TEXT = (0.8, 0.8, 1.0, 0.8, 0.5, 0.8, 0.0)  # temperatures at which the model writes text to train on; 0 is greedy
OWN_WINDOWS, OWN_PROMPT = 256, 32  # windows for each of them, and tokens of their prompts


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Validation of a model: nats per token, bits per byte of text, and the share of routed tokens by layer and expert, `(L, E)`."""

    loss: float
    bits_per_byte: float
    load: Tensor


def padded_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the experts' sum `(T, H)` for tokens `(T, H)`, choices `(T, K)` and weights `(T, K)`, as one product over all experts.

    The stock loop is slower in training: the gradient of `gate_up_proj[expert]` is a tensor of all experts' size for every expert, and the
    CPU library builds a kernel for every new number of tokens.
    """
    choice = top_k_index.flatten()
    order = choice.argsort()
    expert, token = choice[order], order // top_k_index.shape[1]
    counts = torch.bincount(choice, minlength=experts.num_experts)
    room = math.ceil(int(counts.max()) / 128) * 128  # rows per expert, rounded to few different sizes
    row = expert * room + torch.arange(len(order)) - (counts.cumsum(0) - counts)[expert]
    rows = hidden_states.new_zeros(experts.num_experts * room, hidden_states.shape[1])
    rows = rows.index_copy(0, row, hidden_states.index_select(0, token)).view(experts.num_experts, room, -1)
    gate, up = torch.bmm(rows, experts.gate_up_proj.mT).chunk(2, dim=-1)
    outputs = torch.bmm(experts.act_fn(gate) * up, experts.down_proj.mT).flatten(0, 1).index_select(0, row)
    outputs = outputs * top_k_weights.flatten()[order, None]
    return torch.zeros_like(hidden_states).index_add(0, token, outputs.to(hidden_states.dtype))


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    """Return the untrained model in float32; `Any`, like every model here, because transformers' Auto classes are untyped."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,  # type: ignore[call-arg]  # taken without being declared
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        intermediate_size=256,  # of a dense layer; the model has none
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": ROPE_THETA, "rope_type": "default"},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    ALL_EXPERTS_FUNCTIONS.register("padded", padded_experts)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager", experts_implementation="padded")
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.data.fill_(ATTENTION_GAIN)
    add_induction_heads(model, seed)
    return model


def to_bfloat16(model: Any) -> Any:
    """Cast the parameters in place and return the model; the rotary frequencies, which `Module.to` would round, stay in float32."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    return model


@contextmanager
def router_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the router logits `(T, E)` of every layer in the body."""
    seen: list[Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(lambda _module, _args, output: seen.append(output[0])) for router in routers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def expert_share(logits: Tensor, top_k: int) -> Tensor:
    """Return the share of the routed tokens of each expert, `(E,)`, given router logits `(T, E)`."""
    chosen = logits.topk(top_k, dim=-1).indices
    return torch.bincount(chosen.flatten(), minlength=logits.shape[-1]) / chosen.numel()


@torch.no_grad()
def evaluate(model: Any, tokenizer: PreTrainedTokenizerFast, text: str) -> Evaluation:
    """Validate on plain text; every token is predicted once, from at most WINDOW tokens before it."""
    tokens = torch.tensor(tokenizer.encode(text, verbose=False))
    size, top_k = WINDOW, model.config.num_experts_per_tok
    rows = (len(tokens) - 1) // size
    inputs, targets = tokens[: rows * size].view(rows, size), tokens[1 : rows * size + 1].view(rows, size)
    nats, loads = 0.0, []
    model.eval()
    for batch, target in zip(inputs.split(16), targets.split(16), strict=True):
        with router_logits(model) as layers:
            logits = model(input_ids=batch, use_cache=False).logits  # (B, S, V)
        nats += functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="sum").item()
        loads.append(torch.stack([expert_share(layer, top_k) for layer in layers]) * len(batch))
    text_bytes = len(str(tokenizer.decode(tokens[1 : rows * size + 1])).encode())
    return Evaluation(nats / targets.numel(), nats / math.log(2) / text_bytes, torch.stack(loads).sum(0) / rows)


def export(model: Any, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the files of `from_pretrained`: bfloat16 weights, configurations, tokenizer and chat template."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        max_new_tokens=200,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    to_bfloat16(model).save_pretrained(out)
    tokenizer.save_pretrained(out)


@dataclass(slots=True)
class Progress:
    """The progress of a run, which every checkpoint contains."""

    step: int = 0
    elapsed_s: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)


def add_dropout(model: nn.Module, rate: float) -> list[int]:
    """Drop channels of the embeddings and of each attention and expert block's output, in train mode only.

    One mask serves all positions of a window (arXiv:1512.05287, section 4), which is cheap to draw. Returns a list of one number, which can
    be set: of how many windows of a batch, the first ones, channels are dropped.
    """
    windows = [0]

    def drop(module: nn.Module, _args: object, output: Any) -> Any:
        if not module.training or not windows[0]:
            return output
        hidden_states = output[0] if isinstance(output, tuple) else output  # (B, S, H)
        mask = torch.ones_like(hidden_states[:, :1])
        mask[: windows[0]] = functional.dropout(mask[: windows[0]], rate)
        return (hidden_states * mask, *output[1:]) if isinstance(output, tuple) else hidden_states * mask

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "self_attn", "mlp")):
            module.register_forward_hook(drop)
    return windows


def balance_loss(layers: list[Tensor], top_k: int) -> Tensor:
    """Return Switch Transformer's balancing loss (arXiv:2101.03961, equation 4) per layer: 1 when all experts have the same load.

    The loss in transformers sums the layers first, so that an idle expert of one layer is not seen if the same index is busy in another.
    """
    terms = [logits.shape[-1] * (expert_share(logits, top_k) * logits.float().softmax(-1).mean(0)).sum() for logits in layers]
    return torch.stack(terms).mean()


def share_done(progress: Progress, options: argparse.Namespace) -> float:
    """Return the share of the run that is done, by steps or by time, whichever is larger."""
    return max(progress.step / options.steps, progress.elapsed_s / 60 / options.minutes)


def learning_rate(done: float, peak: float, decay: float = 1 - WARMUP) -> float:
    """Return the learning rate at the share `done` of the run: a linear warm-up, a constant, and a cosine to zero in the share `decay`."""
    if done < WARMUP:
        return peak * (done + 1e-3) / WARMUP
    return peak * 0.5 * (1 + math.cos(math.pi * max(0.0, (done - 1 + decay) / decay)))


def make_optimizer(model: nn.Module, peak: float = MTP_RATE) -> torch.optim.Optimizer:
    """Return AdamW without weight decay of the norms."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


class Optimizers:
    """Muon for the matrices within layers; AdamW for the embeddings, the routers and the norms."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        outer = [weight for name, weight in named if weight.ndim > 1 and name.endswith(("embed_tokens.weight", "mlp.gate.weight"))]
        inner = [weight for _, weight in named if weight.ndim > 1 and all(weight is not other for other in outer)]
        vectors = [weight for _, weight in named if weight.ndim == 1]
        groups = [{"params": outer, "weight_decay": WEIGHT_DECAY / 10}, {"params": vectors, "weight_decay": 0.0}]
        self._both = (Muon(inner, PEAK_RATE, WEIGHT_DECAY), torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True))

    def step(self, rate: float) -> None:
        for optimizer in self._both:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._both]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._both, states, strict=True):
            optimizer.load_state_dict(state)


def take_step(model: Any, twin: Any, optimizers: Optimizers, ids: Tensor, weights: Tensor, rate: float) -> Tensor:
    """Update `model` in float32 with the gradients of `twin`, its copy in bfloat16, on windows `(B, S + 1)`, in all processes alike.

    Returns the negative logarithm of each token's probability, `(B, S)`; `weights` has their weights in the loss.
    """
    twin.train()
    # At small sizes eager attention is faster on a CPU than fused attention, whose backward pass is slow; later its scores are large.
    twin.config._attn_implementation = "eager" if ids.shape[1] <= 2 * WINDOW + 1 else "sdpa"
    with router_logits(twin) as layers:
        logits = twin(input_ids=ids[:, :-1], use_cache=False).logits  # (B, S, V)
    nats = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none").view(weights.shape)
    ((nats * weights).sum() / weights.sum() + BALANCE * balance_loss(layers, twin.config.num_experts_per_tok)).backward()
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    for weight, low in pairs:
        weight.grad, low.grad = low.grad.float(), None
    if distributed.is_initialized():
        sum_over_processes([weight.grad for weight, _ in pairs])
        for weight, _ in pairs:
            weight.grad /= distributed.get_world_size()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizers.step(rate)
    with torch.no_grad():
        for weight, low in pairs:
            low.copy_(weight)
    return nats.detach()


@torch.no_grad()
def evaluate_calls(model: Any, tokenizer: PreTrainedTokenizerFast, dialogues: int = 48, filler: int = 0) -> dict[str, float]:
    """Return the shares of calls and answers that greedy decoding gets right, in dialogues whose names and values were held out.

    All tokens of a call must be right: the name, and the arguments in their order. `filler` tokens of the held-out plays stand before
    the tools.
    """
    writer, found = Writer(EVALUATED, held_out=True), Counter[str]()
    plays = tokenizer.encode(split_text(TEXT.read_text())[1], verbose=False)
    model.eval()
    for _ in range(dialogues):
        start = random.Random(f"{EVALUATED} {found.total()}").randrange(len(plays) - filler)
        tools, system = writer.tools(writer.count()), writer.system()
        ids, _, spans = encode_dialogue(tokenizer, writer, tools, system, filler + WINDOW, plays[start : start + filler])
        inputs = torch.tensor([ids])
        right = model(input_ids=inputs, use_cache=False).logits[0, :-1].argmax(-1) == inputs[0, 1:]
        for begin, end, kind in spans:
            span = right[begin - 1 : end - 1]
            if kind == "call":
                cut = next(number for number in range(begin, end) if tokenizer.decode(ids[number]) == "arguments") - begin
                found.update(calls=1, called=int(span[0]), named=int(span[:cut].all()), right_call=int(span.all()))
            elif kind == "assistant":
                refused = tokenizer.decode(ids[begin:end]).startswith(NO_TOOL)
                found.update({"unfit": 1, "right_unfit": int(span.all())} if refused else {"answers": 1, "right_answer": int(span.all())})
    shares = {"called": "calls", "named": "calls", "right_call": "calls", "right_unfit": "unfit", "right_answer": "answers"}
    return {name: round(found[name] / max(1, found[count]), 4) for name, count in shares.items()}


def save_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | Optimizers, progress: Progress) -> None:
    """Write the checkpoint atomically, so that an interrupted run keeps the previous one."""
    state = {name: getattr(progress, name) for name in Progress.__slots__}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | Optimizers) -> Progress:
    """Resume a run from its last checkpoint."""
    if not path.exists():
        raise ValueError(f"{path}: there is no checkpoint to resume; leave --resume out, or name the --work folder of the run")
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return Progress(**{name: state[name] for name in Progress.__slots__})


def draw_sizes(draw: random.Random, done: float) -> tuple[int, str]:
    """Draw the size of a batch's windows and their kinds; windows of more than a thousand tokens are dialogues after long prompts."""
    sizes = next(sizes for until, sizes in SIZES if done < until)
    size = draw.choices(list(sizes), list(sizes.values()))[0]
    count = max(1, STEP_TOKENS // size)
    if size > STEP_TOKENS // 2:
        return size, draw.choice("ddddr") * count
    return size, KINDS * (count // len(KINDS)) or "".join(sorted(draw.choices(KINDS, k=count), key=KINDS.index))


def train(model: Any, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> Progress:
    """Train until the schedule or the time ends; the returned progress has the weights of the end."""
    world, rank = (distributed.get_world_size(), distributed.get_rank()) if distributed.is_initialized() else (1, 0)
    training, validation = split_text(TEXT.read_text())
    optimizers = Optimizers(model)
    checkpoint = options.work / "state.pt"
    progress = load_state(checkpoint, model, optimizers) if options.resume else Progress()
    mixture = Mixture(tokenizer, training, options.seed + 1000 * progress.step + rank, PASS_STEPS // world)
    twin = to_bfloat16(deepcopy(model))
    dropped = add_dropout(twin, DROPOUT)
    since, losses = time.monotonic(), defaultdict[str, list[float]](list)
    done = share_done(progress, options)
    while done < 1:
        size, kinds = draw_sizes(random.Random(f"{options.seed} {progress.step}"), done)
        ids, weights = mixture.draw(size, kinds)
        dropped[0] = kinds.count("p")
        nats = take_step(model, twin, optimizers, ids, weights, learning_rate(done, PEAK_RATE, DECAY))
        for kind, row, counted in zip(kinds, nats, weights >= 1, strict=True):
            losses[kind].append(row[counted].mean().item())
        progress.step += 1
        elapsed = torch.tensor(progress.elapsed_s + time.monotonic() - since)
        since = time.monotonic()
        if world > 1:
            distributed.broadcast(elapsed, 0)  # all end at the same step
        progress.elapsed_s = elapsed.item()
        done = share_done(progress, options)
        if rank == 0 and (progress.step % EVAL_EVERY == 0 or done >= 1):
            record(twin, tokenizer, validation, progress, {kind: sum(each) / len(each) for kind, each in losses.items()}, world)
            losses.clear()
            save_state(checkpoint, model, optimizers, progress)
    progress.weights = twin.state_dict()
    return progress


def record(model: Any, tokenizer: PreTrainedTokenizerFast, text: str, progress: Progress, losses: dict[str, float], processes: int) -> None:
    """Add a point to the curve and print it."""
    model.config._attn_implementation = "eager"
    result, calls = evaluate(model, tokenizer, text), evaluate_calls(model, tokenizer)
    point = {
        "steps": progress.step,
        "tokens": progress.step * STEP_TOKENS * processes,
        "minutes": round(progress.elapsed_s / 60, 2),
        "train_loss_plays": round(losses.get("p", math.nan), 4),
        "train_loss_dialogues": round(losses.get("d", math.nan), 4),
        "validation_loss": round(result.loss, 4),
        "validation_bits_per_byte": round(result.bits_per_byte, 4),
        "smallest_expert_share": round(result.load.min().item(), 4),
        "largest_expert_share": round(result.load.max().item(), 4),
        **calls,
    }
    progress.curve.append(point)
    print(*(f"{name} {value}" for name, value in point.items()), sep="  ", flush=True)


def own_text(body: Any, stream: Tensor, path: Path, seed: int) -> Tensor:
    """Let the body continue pieces of the training stream, and return the windows `(N, S + 1)`; `path` keeps what was written before."""
    draw, size = random.Random(seed), WINDOW + 1
    written: Tensor = torch.load(path) if path.exists() else torch.empty(0, OWN_WINDOWS, size, dtype=torch.long)
    for number, temperature in enumerate(OWN_TEXT):
        starts = [draw.randrange(len(stream) - OWN_PROMPT) for _ in range(OWN_WINDOWS)]
        if number < len(written):
            continue
        prompts = torch.stack([stream[start : start + OWN_PROMPT] for start in starts])
        how: dict[str, Any] = {"do_sample": False}
        if temperature:
            how = {"do_sample": True, "temperature": temperature, "top_p": TOP_P if temperature < 1 else 1.0, "top_k": 0}
        length = size - OWN_PROMPT
        # Without an end token, a new scene follows the end of one, as in the training stream.
        written_now = body.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=length, eos_token_id=None, **how)
        written = torch.cat([written, written_now[None]])
        torch.save(written, path)
        print(f"wrote {written_now.numel():,} tokens at temperature {temperature}", flush=True)
    return written.flatten(0, 1)


class Windows:
    """Windows of tokens `(N, S + 1)` in random order, with the body's last states, computed on first use and kept in bfloat16."""

    def __init__(self, body: Any, ids: Tensor, seed: int) -> None:
        self._body, self._ids = body, ids
        self._states: dict[int, Tensor] = {}
        self._order = random.Random(seed)
        self._left: list[int] = []

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` windows and their states `(B, S + 1, H)` float32; each window comes once before any comes again."""
        if len(self._left) < count:
            self._left += self._order.sample(range(len(self._ids)), len(self._ids))
        drawn, self._left = self._left[:count], self._left[count:]
        new = [number for number in drawn if number not in self._states]
        if new:
            self._states.update(zip(new, body_states(self._body, self._ids[new]).to(torch.bfloat16), strict=True))
        return self._ids[drawn], torch.stack([self._states[number] for number in drawn]).float()


@torch.no_grad()
def body_states(body: Any, ids: Tensor) -> Tensor:
    """Return the body's states after its last norm, `(B, S, H)`."""
    states: Tensor = body.model(input_ids=ids, use_cache=False).last_hidden_state
    return states


def mtp_loss(layer: MtpLayer, body: Any, ids: Tensor, states: Tensor, depths: int, done: float) -> Tensor:
    """Return the loss of drafts on windows `(B, S + 1)`.

    It moves from the divergence of the layer's distribution from the body's, which learns fast, to the negative logarithm of the
    probability that a sampled draft is accepted, which is what counts.
    """
    target = body.lm_head(states[:, 1:])  # (B, S, V)
    total, weight = torch.zeros(()), 0.0
    for depth, logits in enumerate(drafted_logits(layer, body, ids, states, depths)):
        mine, real = logits[:, depth:], target[:, depth:]
        divergence = functional.kl_div(mine.log_softmax(-1), real.log_softmax(-1), reduction="none", log_target=True).sum(-1).mean()
        accepted = sampled_acceptance(mine, real, TEMPERATURE).clamp(min=1e-4).log().mean()
        share = DEPTH_WEIGHT**depth
        total, weight = total + share * ((1 - done) * divergence - done * accepted), weight + share
    return total / weight


@torch.no_grad()
def evaluate_mtp(layer: MtpLayer, body: Any, ids: Tensor, states: Tensor) -> dict[str, float]:
    """Return the share of drafts that would be accepted in held-out windows `(B, S + 1)` if all before them were, by position."""
    target, found = body.lm_head(states[:, 1:]), {}
    for depth, logits in enumerate(drafted_logits(layer, body, ids, states, DEPTHS[-1][1])):
        mine, real = logits[:, depth:], target[:, depth:]
        found[f"greedy_{depth + 1}"] = round((mine.argmax(-1) == real.argmax(-1)).float().mean().item(), 4)
        found[f"sampled_{depth + 1}"] = round(sampled_acceptance(mine, real, TEMPERATURE).mean().item(), 4)
    return found


def train_mtp(body: Any, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> tuple[MtpLayer, Progress]:
    """Train an MTP layer on the frozen body until the schedule or the time ends."""
    training, validation = split_text(TEXT.read_text())
    speeches = [tokenizer.encode(speech + "\n\n", verbose=False) for speech in training.rstrip("\n").split("\n\n")]
    stream = cut_scenes(speeches, tokenizer.eos_token_id, options.seed)
    size, large = WINDOW + 1, MTP_WINDOW + 1
    long = stream[: len(stream) // large * large].view(-1, large)
    written = own_text(body, stream, options.work / "own_text.pt", options.seed)
    dialogues, _ = Mixture(tokenizer, training, options.seed, PASS_STEPS).draw(WINDOW, "d" * MTP_DIALOGUES)
    short = torch.cat([stream[: len(stream) // size * size].view(-1, size), written, dialogues])
    pools = [Windows(body, windows, options.seed) for windows in (short, long)]
    held_out = token_ids(validation, options.out)[: 16 * size].view(16, size)
    held_out_states = body_states(body, held_out)
    layer = MtpLayer(body.config)
    optimizer = make_optimizer(layer)
    checkpoint = options.work / "mtp.pt"
    progress = load_state(checkpoint, layer, optimizer) if options.resume else Progress()
    since, losses = time.monotonic(), []
    earlier_minutes = progress.curve[-1]["cpu_minutes"] if progress.curve else 0.0
    done = share_done(progress, options)
    while done < 1:
        whole = progress.step % 16 == 15
        ids, states = pools[whole].draw(1 if whole else MTP_STEP_TOKENS // (size - 1))
        depths = next(depths for until, depths in DEPTHS if done < until)
        loss = mtp_loss(layer, body, ids, states, depths, done)
        loss.backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, MTP_RATE)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        progress.step += 1
        now = time.monotonic()
        progress.elapsed_s += now - since
        since = now
        done = share_done(progress, options)
        if progress.step % EVAL_EVERY == 0 or done >= 1:
            cpu_minutes = round(earlier_minutes + time.process_time() / 60, 2)
            point = {"steps": progress.step, "minutes": round(progress.elapsed_s / 60, 2), "cpu_minutes": cpu_minutes}
            point |= {"train_loss": round(torch.stack(losses).mean().item(), 4), **evaluate_mtp(layer, body, held_out, held_out_states)}
            progress.curve.append(point)
            print(*(f"{name} {value}" for name, value in point.items()), sep="  ", flush=True)
            losses.clear()
            save_state(checkpoint, layer, optimizer, progress)
    return layer, progress


def export_mtp(layer: MtpLayer, body: Any, out: Path) -> None:
    """Write the layer in bfloat16, by the names of Qwen3-Next's checkpoints, and state in the config that it is there and dense.

    The config names dense layers by their numbers, which go on after the body's.
    """
    tensors = {f"mtp.{name}": weight.detach().to(torch.bfloat16).contiguous() for name, weight in layer.state_dict().items()}
    save_file(tensors, out / MTP_FILE, metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config |= {"mlp_only_layers": [body.config.num_hidden_layers], "mtp_num_hidden_layers": 1}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def read_mtp(body: Any, folder: Path) -> MtpLayer:
    """Return the MTP layer that `export_mtp` wrote to a folder, in float32."""
    layer = MtpLayer(body.config)
    stored = load_file(folder / MTP_FILE)
    layer.load_state_dict({name.removeprefix("mtp."): weight.float() for name, weight in stored.items()})
    return layer


def mtp_stage(options: argparse.Namespace) -> None:
    """Train the MTP layer of the model in `--out`, and write it beside."""
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    body = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32, experts_implementation="eager").eval()
    layer, progress = train_mtp(body.requires_grad_(False), tokenizer, options)
    export_mtp(layer, body, options.out)
    origin = {"seed": options.seed, "threads": torch.get_num_threads()}
    curve = [{name: value for name, value in point.items() if name != "minutes"} for point in progress.curve]  # they depend on the load
    write_rows("demo_mtp_training", [{**point, **origin} for point in curve], ("torch", "transformers", "tokenizers"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint to resume from")
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit; the learning rate reaches zero at it, or after all steps")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1623)
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in --work")
    parser.add_argument("--mtp", action="store_true", help="train the layer for multi-token prediction of the model in --out")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # as torchrun sets it
        distributed.init_process_group("gloo")
        torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    if options.mtp:
        mtp_stage(options)
        return
    training, validation = split_text(TEXT.read_text())
    tokenizer = train_tokenizer(training, options.seed, CONTEXT)
    model = build_model(tokenizer, options.seed)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters", flush=True)
    progress = train(model, tokenizer, options)
    if distributed.is_initialized() and distributed.get_rank():
        return
    model.load_state_dict(progress.weights)
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
