"""The decoding loop of `generate` for one sequence, greedy or sampled, with or without drafts.

The loop gives what transformers' own loop gives, token for token, in less time: on the CPU, tokens that follow each other in one native
program are computed without the rest of a forward pass (`NativePasses`), and with drafts, several tokens are verified in one pass.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils.generic import ModelOutput

from moegraft.operators.base import CACHE, call_arguments
from moegraft.operators.decode.mtp_layers import asked_states, read_states
from moegraft.operators.decode.rollback import passes_over
from moegraft.operators.decode.sampling import AcceptanceRule, DraftToken, Greedy, Sampling, Scores, shorten, shortening
from moegraft.operators.structure import rotary_limit

if TYPE_CHECKING:
    from moegraft.operators.decode.drafts import Drafting
    from moegraft.operators.decode.replay import StepReplay

FIXED_CACHES = ("paged", "quantized", "offloaded", "offloaded_static")  # tokens cannot be removed from them
SERVED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_ROOM = 256  # tokens
# Processors that are the same for any tokens before the scores; those with a function do nothing from that length of a text on.
_ROWWISE: Mapping[type, Callable[[Any], int] | None] = {
    TemperatureLogitsWarper: None,
    TopKLogitsWarper: None,
    TopPLogitsWarper: None,
    MinPLogitsWarper: None,
    MinLengthLogitsProcessor: lambda processor: processor.min_length,
    MinNewTokensLengthLogitsProcessor: lambda processor: processor.prompt_length_to_skip + processor.min_new_tokens,
}
_NO_OUTPUT = ModelOutput()  # for updates that only count tokens


def generate(
    replay: StepReplay | None,
    model: PreTrainedModel,
    stock: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    drafting: Drafting | None = None,
) -> Any:
    """Return what `stock(*args, **kwargs)`, the model's `generate`, returns, by `Decoding` where it serves the call."""
    if torch.compiler.is_compiling():
        return stock(*args, **kwargs)
    arguments = call_arguments(stock, args, dict(kwargs))
    config = effective_config(model, arguments)
    reason = why_stock_loop(model, arguments, config)
    if reason is not None and drafting is not None:
        drafting.warn_once(reason)
    own_inputs = _prepares_inputs(model)
    if reason is not None or (drafting is None and (own_inputs or (config.stop_strings and arguments.get("tokenizer") is None))):
        return stock(*args, **kwargs)
    decoding = Decoding(None if own_inputs else replay, drafting, arguments.get("streamer"))
    return stock(**with_stop_strings(arguments, config) | {"custom_generate": decoding})


@dataclass(frozen=True, slots=True)
class Decoding:
    """The loop, as a callable for `generate(custom_generate=...)`."""

    replay: StepReplay | None
    drafting: Drafting | None
    streamer: BaseStreamer | None = None

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        sequence = DecodedSequence(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, self.streamer, self.replay
        )
        rule: AcceptanceRule = Sampling() if generation_config.do_sample else Greedy()
        greedy, drafting = type(rule) is Greedy, self.drafting
        sequence.keeps_hidden_states = drafting is not None and drafting.drafter.reads_hidden_states
        with sequence, ExitStack() as ending:
            choose(sequence, rule, sequence.prefill())
            if drafting is not None:
                rule = drafting.begin(sequence, rule, logits_processor)
                ending.callback(drafting.end, sequence)
            while not sequence.finished:
                if drafting is not None:
                    drafting.round(sequence, rule)
                elif not (greedy and sequence.extend()):
                    choose(sequence, rule, sequence.forward([], feed=1)[0])
            ending.close()  # first: where a stream ends, another thread may go on with the cache
            return sequence.result()


def accept(sequence: DecodedSequence, rule: AcceptanceRule, drafts: Sequence[DraftToken], logits: torch.Tensor) -> tuple[int, int]:
    """Append the tokens that follow from the full model's logits (drafts + 1, V): accepted drafts, and then a token of its own.

    The last token replaces the first rejected draft, or follows the last one where all were accepted, unless that ends the sequence.

    Returns:
        The numbers of compared and of accepted drafts.
    """
    rows = zip(logits, sequence.process_rows(logits), strict=True)
    for position, (draft, (row, scores)) in enumerate(zip(drafts, rows, strict=False)):
        if not rule.accepts(draft, scores):
            token = rule.replacement(draft, scores)
            rule.note(token, row, scores, None)
            sequence.append(token, scores, row)
            return position + 1, position
        rule.note(draft.token, row, scores, draft)
        sequence.append(draft.token, scores, row)
        if sequence.finished:
            return position + 1, position + 1
    row, scores = next(rows)
    token = rule.pick(scores)
    rule.note(token, row, scores, None)
    sequence.append(token, scores, row)
    return len(drafts), len(drafts)


def choose(sequence: DecodedSequence, rule: AcceptanceRule, logits: torch.Tensor) -> None:
    """Append the full model's own token by its logits (V,)."""
    scores = sequence.process([], logits)
    sequence.append(rule.pick(scores), scores, logits)


def effective_config(model: PreTrainedModel, arguments: Mapping[str, Any]) -> GenerationConfig:
    """Return the generation config of a call: its arguments override its `generation_config`, which overrides the model's."""
    own = model.generation_config
    config = copy.deepcopy(own) if isinstance(own, GenerationConfig) else GenerationConfig()
    given = arguments.get("generation_config")
    if isinstance(given, GenerationConfig):
        config.update(**{name: value for name, value in given.to_dict().items() if value is not None})
    config.update(**arguments)
    return config


def why_stock_loop(model: PreTrainedModel, arguments: Mapping[str, Any], config: GenerationConfig) -> str | None:
    """Return why transformers' own loop must decode a call of `generate`; None where `Decoding` can."""
    if arguments.get("custom_generate") is not None:
        return "the call has a decoding loop of its own (custom_generate)"
    if getattr(config, "is_assistant", False):
        return "the model drafts for another one"
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    inputs = arguments.get("inputs")
    ids = inputs if inputs is not None else arguments.get("input_ids")
    if mode not in SERVED_MODES:
        return f"{mode.value.replace('_', ' ')} is neither greedy nor sampled decoding"
    if arguments.get("inputs_embeds") is not None:
        return "the prompt is given as embeddings"
    if isinstance(ids, torch.Tensor) and ids.shape[0] > 1:
        return f"the call has a batch of {ids.shape[0]} sequences"
    if (config.num_return_sequences or 1) > 1:
        return f"num_return_sequences={config.num_return_sequences} makes a batch"
    if config.use_cache is False:
        return "use_cache=False leaves no cache to go on with"
    if config.cache_implementation in FIXED_CACHES:
        return f"a cache of kind {config.cache_implementation} cannot be rolled back"
    if arguments.get("negative_prompt_ids") is not None or (config.guidance_scale or 1) != 1:
        return "classifier-free guidance runs the model inside a logits processor"
    if config.output_attentions or config.output_hidden_states:
        return "the call returns attentions or hidden states of each step"
    if config.compile_config is not None:
        return "compile_config asks for steps that torch.compile has compiled"
    if config.prefill_chunk_size is not None or config.token_healing or arguments.get("synced_gpus"):
        return "prefill_chunk_size, token_healing and synced_gpus need transformers' own loop"
    if getattr(model.generation_config, "stop_strings", None):
        return "the model's own generation config has stop strings, which a custom decoding loop does not receive"
    if getattr(type(model), "_sample", None) is not GenerationMixin._sample or model.config.is_encoder_decoder:
        return "the model decodes in a way of its own"
    return None


def _prepares_inputs(model: PreTrainedModel) -> bool:
    """Return whether a model prepares the pass for the next token in a way of its own, as with a new cache; a continued step does not."""
    names = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
    return any(name in vars(model) or getattr(type(model), name, None) is not getattr(GenerationMixin, name) for name in names)


def with_stop_strings(arguments: dict[str, Any], config: GenerationConfig) -> dict[str, Any]:
    """Return the call's arguments with its stop strings as a stopping criterion: `generate` gives decoding loops no tokenizer.

    Raises:
        ValueError: the call has stop strings but no tokenizer.
    """
    if not config.stop_strings:
        return arguments
    tokenizer = arguments.get("tokenizer")
    if tokenizer is None:
        raise ValueError("stop_strings are text: pass the model's tokenizer to generate as well")
    given = arguments.get("generation_config")
    if isinstance(given, GenerationConfig):
        given = copy.deepcopy(given)
        given.stop_strings = None
    criteria = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, config.stop_strings)])
    rest = {name: value for name, value in arguments.items() if name != "stop_strings"}
    return {**rest, "generation_config": given, "stopping_criteria": criteria}


class DecodedSequence:
    """The sequence that a call of `generate` extends. Between forward passes, the cache holds all its tokens but the last.

    A context manager: while steps of one token follow each other in a native program, the cache receives them at the end (`flush`).

    Attributes:
        rotary_limit: `rotary_limit` of the model.
        passes: those over the sequence's cache.
        keeps_hidden_states: whether `hidden_states` has those of the latest pass, (1, T, H) after the last norm or what a head reads.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,  # (1, prompt) int64
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        streamer: BaseStreamer | None,
        replay: StepReplay | None,
    ) -> None:
        self._model: Any = model  # torch types every attribute of a module as a tensor
        self.length = int(input_ids.shape[1])
        self.rotary_limit = rotary_limit(model)
        self._ids = input_ids  # (1, at least `length`)
        self._numbers: NDArray[np.int64] | None = None  # the same memory, where it has room and is the CPU's
        # Typed for CPU tensors of one class. A list inspects the signature of each of its processors in every call, which takes as long as
        # the processors themselves, so those that need nothing else are called directly.
        self._processors: Any = logits_processor
        direct = type(logits_processor) is LogitsProcessorList and all(
            len(inspect.signature(processor.__call__).parameters) == 2 for processor in logits_processor
        )
        self._direct: tuple[Any, ...] | None = tuple(logits_processor) if direct else None
        self._criteria = stopping_criteria
        self._config: Any = generation_config
        self._kwargs = model_kwargs
        self._streamer = streamer
        self._with_scores = bool(generation_config.return_dict_in_generate and generation_config.output_scores)
        self._with_logits = bool(generation_config.return_dict_in_generate and generation_config.output_logits)
        # The processors from this one on leave few tokens; scores that are returned are those of all.
        self._shortening = len(logits_processor) if self._with_scores else shortening(logits_processor)
        self._scores: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] = []
        self.finished = False
        self.keeps_hidden_states = False
        self.hidden_states: torch.Tensor | None = None
        ends = [criterion.eos_token_id for criterion in stopping_criteria if type(criterion) is EosTokenCriteria]
        self.end_tokens: frozenset[int] = frozenset(token for tokens in ends for token in tokens.tolist())
        self._ends = sorted(self.end_tokens)
        # Criteria take 30 us as tensors: they are called where they may end the text, which is known in advance of the two usual ones.
        self._always = any(type(each) not in (MaxLengthCriteria, EosTokenCriteria) for each in stopping_criteria)
        limits = [
            min(each.max_length, 1 + (each.max_position_embeddings or sys.maxsize))
            for each in stopping_criteria
            if type(each) is MaxLengthCriteria
        ]
        self._open_length = min(limits, default=sys.maxsize)  # below which no length ends the text
        self._replay = replay
        self.passes = passes_over(None, None)
        self._counted = self.length  # tokens that masks and positions have

    @property
    def input_ids(self) -> torch.Tensor:
        """The tokens, (1, length) int64."""
        return self._ids[:, : self.length]

    @property
    def _last(self) -> int:
        """The last token, which a criterion or processor may have replaced in `input_ids`."""
        return int(self._ids[0, self.length - 1] if self._numbers is None else self._numbers[self.length - 1])

    @property
    def remaining(self) -> int:
        """Tokens left until the sequence reaches its maximum length."""
        return int(self._config.max_length) - self.length

    @property
    def draftable(self) -> int:
        """The most tokens of a draft: the last is left to the model, and no pass of a draft crosses a `rotary_limit` above 0."""
        limit, most = self.rotary_limit, self.remaining - 1
        return most if limit is None or limit + 1 < self.length else min(most, max(0, limit - self.length))

    @property
    def cache(self) -> Cache | None:
        self.flush()
        return self._kwargs.get(CACHE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.flush()

    def flush(self) -> None:
        """Let the cache, masks and positions have all tokens but the last."""
        self.passes.close()
        self._count()

    def _count(self) -> None:
        """Let masks and positions have all tokens but the last."""
        new, self._counted = self.length - self._counted, self.length
        if new:
            self._kwargs = self._model._update_model_kwargs_for_generation(_NO_OUTPUT, self._kwargs, num_new_tokens=new)

    @property
    def _asked(self) -> dict[str, Any]:
        """The arguments of a pass whose hidden states are kept."""
        return {"output_hidden_states": asked_states(self._model)} if self.keeps_hidden_states else {}

    def _note(self, outputs: Any) -> None:
        if self.keeps_hidden_states:
            self.hidden_states = read_states(self._model, outputs)

    def prefill(self) -> torch.Tensor:
        """Feed the tokens of the prompt that the cache lacks; return the logits of the last one, (V,) float32."""
        outputs = self._model._prefill(self.input_ids, self._config, self._kwargs | self._asked)
        self._note(outputs)
        # Adopts the cache that the model created; `flush` counts the tokens.
        self._kwargs = self._model._update_model_kwargs_for_generation(outputs, self._kwargs, num_new_tokens=0)
        self.passes = passes_over(self._kwargs.get(CACHE), self._replay)
        logits: torch.Tensor = outputs.logits[0, -1]
        return logits.to(torch.float32)

    def extend(self, most: int = sys.maxsize) -> Sequence[int]:
        """Append tokens of greedy decoding that native programs compute without anything else in between, at most `most`.

        Returns:
            The ns that each took; none where no token can be computed so.
        """
        if self._direct != () or self._with_scores or self._with_logits:
            return ()
        single = self._always or self._streamer is not None or self.length >= self._open_length
        most = 1 if single else min(most, self._open_length - self.length)
        tokens = self.passes.greedy(self._last, most, self._ends, hidden=self.keeps_hidden_states)
        if not tokens:
            return ()
        self.hidden_states = self.passes.hidden_states
        for token in tokens:
            self.append(token)
        return self.passes.step_ns

    def forward(self, tokens: Sequence[int], feed: int) -> torch.Tensor:
        """Feed the last `feed` tokens of the sequence followed by `tokens`; return their logits, (feed, V) float32 until the next call."""
        logits = self.passes.follow(self.latest(tokens, feed))
        if logits is not None:
            self.hidden_states = self.passes.hidden_states
            return logits
        self.passes.leave()
        self._count()
        kwargs, ids = self._kwargs, self.followed_by(tokens)
        if tokens:
            kwargs = self._model._update_model_kwargs_for_generation(_NO_OUTPUT, dict(kwargs), num_new_tokens=len(tokens))
        inputs = self._model.prepare_inputs_for_generation(ids, next_sequence_length=feed, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = feed
        outputs = self._model(**inputs | self._asked, return_dict=True)
        if self.rotary_limit and inputs.get(CACHE) is None and self._kwargs.get(CACHE) is not None:  # begun again, as Phi-MoE's beyond it
            self._kwargs = self._model._update_model_kwargs_for_generation(outputs, self._kwargs, num_new_tokens=0)
            self.passes = passes_over(self._kwargs.get(CACHE), self._replay)
        self.passes.note()
        self._note(outputs)
        computed: torch.Tensor = outputs.logits[0, -feed:]
        return computed.to(torch.float32)

    def latest(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the last `count` tokens of the sequence followed by `tokens`."""
        own = count - len(tokens)
        if own <= 0:
            return list(tokens[-count:])
        known = self._ids[0] if self._numbers is None else self._numbers
        return [*known[self.length - own : self.length].tolist(), *tokens]

    def followed_by(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the sequence with `tokens` after it, (1, length + tokens) int64; these until the next call that writes others."""
        if tokens:
            self._write(self.length, tokens)
        return self._ids[:, : self.length + len(tokens)]

    def _write(self, start: int, tokens: Sequence[int]) -> None:
        """Write tokens to the memory of the sequence from one of its places on."""
        end = start + len(tokens)
        if end > self._ids.shape[1]:
            room = self._ids.new_empty((1, max(self.length, _ROOM)), dtype=torch.int64)  # whatever the type of the prompt
            self._ids = torch.cat([self.input_ids, room], dim=-1)
            self._numbers = self._ids[0].numpy() if self._ids.is_cpu else None
        if self._numbers is None:
            self._ids[0, start:end] = self._ids.new_tensor(tokens)
        else:
            self._numbers[start:end] = tokens

    def process(self, tokens: Sequence[int], logits: torch.Tensor) -> Scores:
        """Return the scores of the token after the sequence and `tokens`, by its logits (V,) and every logits processor.

        Processors, which may write in place, have a copy of the logits. Without any, the scores are the logits themselves.
        """
        if self._direct == ():
            return Scores.of_all(logits)
        scores, input_ids = logits[None].clone(), self.followed_by(tokens)
        if self._direct is None:
            return Scores.of_all(self._processors(input_ids, scores)[0])
        for processor in self._direct[: self._shortening]:
            scores = processor(input_ids, scores)
        return self._shortened(scores[0])

    def _shortened(self, scores: torch.Tensor) -> Scores:
        """Return what the last processors leave of the scores (V,) that those before them made."""
        last: tuple[Any, ...] = self._direct[self._shortening :] if self._direct else ()
        if last and scores.is_cpu and scores.dtype == torch.float32:
            return shorten(scores, last)
        for processor in last:
            scores = processor(self.input_ids, scores[None])[0]
        return Scores.of_all(scores)

    def process_rows(self, logits: torch.Tensor) -> Iterator[Scores]:
        """Yield the scores by each row of logits (T, V): of the token after the sequence, and after each token that it has by then."""
        if not self._direct or any(type(processor) not in _ROWWISE for processor in self._direct):
            for row in logits:
                yield self.process([], row)
            return
        scores = logits.clone()
        for processor in self._direct[: self._shortening]:
            end = _ROWWISE[type(processor)]
            rows = len(scores) if end is None else max(0, min(end(processor) - self.length, len(scores)))
            if rows:
                processed = processor(self.input_ids, scores[:rows])
                scores = processed if rows == len(scores) else torch.cat([processed, scores[rows:]])
        for row in scores:
            yield self._shortened(row)

    def append(self, token: int, scores: Scores | None = None, logits: torch.Tensor | None = None) -> None:
        """Append one token, and check whether it ends the sequence.

        Args:
            scores, logits: of the token, which the call may want; logits (V,) before the processors, scores after them.
        """
        self._write(self.length, (token,))
        self.length += 1
        if self._with_scores and scores is not None:
            self._scores.append(scores.values[None].clone())
        if self._with_logits and logits is not None:
            self._logits.append(logits[None].clone())
        if self._always or token in self.end_tokens or self.length >= self._open_length:
            self.finished = bool(self._criteria(self.input_ids, tuple(self._scores) if self._with_scores else None).all())
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))

    def result(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Return what `generate` returns."""
        self.flush()  # first: where a stream ends, another thread may go on with the cache
        if self._streamer is not None:
            self._streamer.end()
        if not self._config.return_dict_in_generate:
            return self.input_ids.clone()
        return GenerateDecoderOnlyOutput(
            sequences=self.input_ids.clone(),  # type: ignore[arg-type]
            scores=tuple(self._scores) if self._with_scores else None,  # type: ignore[arg-type]
            logits=tuple(self._logits) if self._with_logits else None,  # type: ignore[arg-type]
            **{CACHE: self._kwargs.get(CACHE)},
        )
