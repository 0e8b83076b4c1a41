"""A loaded model with the engine that serves it, and the conversion of requests to jobs."""

from __future__ import annotations

import bisect
import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from moegraft.injection.cli.chat.answer import end_tokens, pad_token
from moegraft.injection.cli.chat.conversation import Conversation, Message, Prompt, PromptRefusedError, TemplatedChat
from moegraft.injection.cli.chat.conversation import fingerprint as model_fingerprint
from moegraft.injection.cli.images import MOST_IMAGES, MOST_PIXELS, ImageError, ImageInputs, read_url, sample_picture
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.options import NEUTRAL, Limits, OptionsError
from moegraft.injection.cli.serve.answer_form import (
    REASONING,
    AnswerGrammar,
    AnswerParser,
    Constraint,
    Grammars,
    Reasoning,
    from_gbnf,
    grammars,
    response_template,
)
from moegraft.injection.cli.serve.answers import Choice
from moegraft.injection.cli.serve.engine import Decoder, Engine, Metrics, work_counts
from moegraft.injection.cli.serve.job import Ask, Job, Piece
from moegraft.injection.cli.serve.open_pool import UnbatchableError, default_limit, open_pool
from moegraft.injection.cli.serve.openai import DetokenizeBody, TokenizeBody
from moegraft.injection.cli.serve.pages import SequencePool
from moegraft.injection.cli.serve.prefix_files import PrefixFiles
from moegraft.injection.cli.serve.protocol import Request, RequestError
from moegraft.injection.cli.serve.scheduler import Scheduler, batching_obstacle, stores_codes
from moegraft.injection.cli.serve.sequential import SequentialDecoder
from moegraft.injection.injected import injection_of
from moegraft.operators.cache_form import kv_cache
from moegraft.operators.errors import human_bytes
from moegraft.operators.machine import version_of
from moegraft.operators.structure import rotary_limit

logger = logging.getLogger(__name__)
MOST_SEED = (1 << 63) - 1
MOST_BODY = 1 << 20  # bytes of a request
MOST_IMAGE_BODY = 1 << 24  # where it may have images


MAX_BATCH = 32
TRIED_TOKENS = 24  # in which `decode: auto` times both ways
CAPTURED = "decode steps are captured for the GPU, of one text each; --max-batch N answers N at once, whose steps run layer by layer"
ANY_MODEL = "*"  # among the names of a model: requests may name any


class Service:
    """One loaded model and its engine, whose thread starts with the constructor and ends with `close`.

    Attributes:
        names: of the model in requests; the first is that of the answers.
        adapter_names: of adapters in requests, which answer instead of the model itself.
        images: the reader of images, or the reason why there is none.
        max_body: bytes of one request.
        created: when the model was loaded, in Unix seconds.
        fingerprint: is the same where the version, the model and the placement of its operators are.
        prefix_files: prefixes on disk.

    Args:
        names: the model's own name if there are none.

    Raises:
        OptionsError: answers of this model depend on time, against `limits.batch_invariant`, or an adapter has a name of the model.
    """

    def __init__(self, loaded: LoadedModel, limits: Limits, names: Sequence[str] = ()) -> None:
        self.loaded = loaded
        self.limits = limits
        own = Path(loaded.name).resolve().name if Path(loaded.name).expanduser().is_dir() else loaded.name.replace(" ", "-")
        self.names = tuple(name for name in names if name != ANY_MODEL) or (own,)
        self._any_name = ANY_MODEL in names
        self.model_id = self.names[0]
        self.adapter_names = () if loaded.adapters is None else loaded.adapters.names
        taken = next((name for name in self.adapter_names if name in (*self.names, ANY_MODEL)), None)
        if taken is not None:
            raise OptionsError(f"--adapter {taken}: the model itself has this name in requests; give the adapter another")
        self._reported: set[str] = set()  # parameters that are ignored
        self.created = int(time.time())
        self.placement = loaded.placement()  # before any request; the work of operators is in their statistics
        described = f"{own} {self.placement} {limits.batch_invariant}".encode()
        self.fingerprint = f"moegraft-{version_of('moegraft')}-{hashlib.sha256(described).hexdigest()[:8]}"
        self.ends = end_tokens(loaded)
        embeddings: Any = loaded.model.get_input_embeddings()
        self._vocabulary: int = embeddings.weight.shape[0]
        self._grammars = Grammars(loaded.tokenizer, self._vocabulary, self.ends)
        self._response_template = response_template(loaded.model, loaded.tokenizer)
        self.images = loaded.images
        default_body = MOST_BODY if isinstance(self.images, str) else MOST_IMAGE_BODY
        self.max_body = default_body if limits.max_body is None else limits.max_body
        obstacle = batching_obstacle(loaded.model)
        self._captured = obstacle is None and self._one_is_faster()
        self.alone_because = CAPTURED if self._captured else obstacle
        self.prefix_files: PrefixFiles | None = None
        self.metrics = Metrics(self)
        with ExitStack() as changed:
            decoder = self._decoder(changed)
            self._require_memory(decoder)
            self.engine = Engine(
                decoder,
                max_queue=limits.max_queue,
                max_client=limits.max_client or max(1, limits.max_queue - max(1, limits.max_queue // 8)),
                counts=partial(work_counts, loaded.model),
                metrics=self.metrics,
                use_adapter=None if loaded.adapters is None else loaded.adapters.use,
            )
            self._changed = changed.pop_all()

    def _decoder(self, changed: ExitStack) -> Decoder:
        """Return what answers requests; `changed` gets what restores the model when the server has ended."""
        loaded, limits, most = self.loaded, self.limits, self.limits.max_batch or MAX_BATCH
        injection = injection_of(loaded.model)
        operator = None if injection is None else injection.model_operator
        shared_tokens = rotary_limit(loaded.model)
        coded = stores_codes(loaded.model)
        own_passes = limits.batch_invariant or shared_tokens == 0
        drafts = None if operator is None or own_passes else operator.batch_drafts()
        if shared_tokens == 0:
            if limits.batch_invariant:
                raise OptionsError("--batch-invariant: rotary embeddings of the kind 'dynamic' depend on earlier, longer texts")
            logger.info("serve: each sequence has passes of its own, as this model's rotary embeddings depend on the longest of a pass")
        if limits.batch_invariant and injection is not None:
            if injection.device_counts():
                raise OptionsError("--batch-invariant: which device computes an expert depends on time; keep all experts on the CPU")
            # The first steps of a kind are computed layer by layer, which rounds elsewhere.
            changed.callback(setattr, injection.context, "replay", injection.context.replay)
            injection.context.replay = None
        if self.alone_because is None:
            try:
                padding = 0 if drafts is None else drafts.longest
                opening = partial(
                    open_pool,
                    loaded.model,
                    limit=limits.kv_memory,
                    prefix_bytes=limits.prefix_cache,
                    most=max(most, 2),  # as many are compared with answers alone
                    context=None if loaded.context_tokens is None else loaded.context_tokens + padding,
                    coded=coded,
                    drafts=drafts,
                )
                images = self._probe()
                try:
                    pool = opening(images=images)
                except UnbatchableError as error:
                    if images is None:
                        raise
                    pool = opening()
                    self.images = f"prompts with images cannot be computed beside others ({error})"
                    logger.warning("serve: images are refused: %s", self.images)
                if drafts is not None and pool.most_drafted is not None and pool.most_drafted < most:
                    logger.info("serve: at most %d answers draft: the memory has no room for the states of more", pool.most_drafted)
                if limits.prefix_cache_dir is not None:
                    self.prefix_files = pool.files = self._prefix_files(pool, limits.prefix_cache_dir)
                    changed.callback(pool.files.close)
                return Scheduler(
                    loaded.model,
                    pool,
                    most=most,
                    prefill_chunk=limits.prefill_chunk,
                    drafts=drafts,
                    own_passes=own_passes,
                    shared_tokens=shared_tokens,
                )
            except UnbatchableError as error:
                self.alone_because = str(error)
        if coded and operator is not None:
            raise OptionsError(f"keys and values are stored as codes in pages, which this model cannot use: {self.alone_because}")
        if limits.batch_invariant and operator is not None:
            raise OptionsError(f"--batch-invariant: {operator.name} drafts at times that depend on its speed, and {self.alone_because}")
        level = logging.INFO if self._captured else logging.WARNING
        logger.log(level, "serve: requests are answered one at a time: %s", self.alone_because)
        if limits.prefix_cache_dir is not None:
            logger.warning("serve: --prefix-cache-dir has no effect where requests are answered one at a time")
        limit = default_limit(loaded.model) if limits.kv_memory is None else limits.kv_memory
        return SequentialDecoder(
            loaded.model,
            pad_token=pad_token(loaded),
            prefill_chunk=limits.prefill_chunk,
            cache=kv_cache(loaded.model),
            memory_limit=limit,
            prefix_bytes=0 if limits.batch_invariant else limit // 2 if limits.prefix_cache is None else limits.prefix_cache,
            captured=self._captured,
        )

    def _require_memory(self, decoder: Decoder) -> None:
        """
        Raises:
            OptionsError: the memory of keys and values has no room for any request.
        """
        limit, needed = decoder.memory.limit, decoder.needed_bytes(Job(Ask([0], 1), self.loaded.tokenizer))
        if needed > limit:
            given = "half of what is left of memory, " if self.limits.kv_memory is None else ""
            raise OptionsError(
                f"--kv-memory {given}{human_bytes(limit)}: the shortest request needs {human_bytes(needed)}; give a size such as 8GiB"
            )

    def _one_is_faster(self) -> bool:
        """Whether captured decode steps, of one text, are to be used instead of a batch, which is computed layer by layer.

        A short text shows whether they are captured, and with `decode: auto` whether that is faster.
        Layer by layer, a token of Qwen3-30B-A3B's shapes took an H100 about 13 times as long: a batch of fewer texts makes fewer tokens.
        """
        from moegraft.operators.decode.cuda_graph import CudaGraphs

        limits, injection = self.limits, injection_of(self.loaded.model)
        replay = None if injection is None or injection.model_operator is not None else injection.context.replay
        wanted = limits.max_batch in (None, 1) and limits.prefix_cache_dir is None and not limits.batch_invariant
        model: Any = self.loaded.model
        if not (wanted and isinstance(replay, CudaGraphs) and replay.captures(model)):
            return False
        before, ids = replay.replayed, torch.ones(1, 2, dtype=torch.int64, device=model.device)
        lengths = {"max_new_tokens": TRIED_TOKENS, "min_new_tokens": TRIED_TOKENS}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=pad_token(self.loaded), **NEUTRAL, **lengths)
        return replay.captures(model) and replay.replayed > before

    def _prefix_files(self, pool: SequencePool, folder: Path) -> PrefixFiles:
        limits = self.limits
        chunk = limits.prefill_chunk if limits.batch_invariant else None  # of which every bit depends there
        key = f"{model_fingerprint(self.loaded.model)} {pool.layout} {limits.batch_invariant} {chunk}"
        try:
            files = PrefixFiles(folder, key, limits.prefix_cache_disk)
        except OSError as error:
            raise OptionsError(f"--prefix-cache-dir {folder}: {error.strerror}; give a folder that can be written") from error
        logger.info("serve: %s has %s of prefixes, of at most %s", folder, human_bytes(files.size), human_bytes(files.limit))
        return files

    def _probe(self) -> ImageInputs | None:
        """Return a prompt with an image; None where the model reads none."""
        if isinstance(self.images, str):
            return None
        try:
            content = [{"type": "image", "image": sample_picture()}, {"type": "text", "text": "1 2 3"}]
            return TemplatedChat(self.loaded.tokenizer, [{"role": "user", "content": content}]).prompt(self.images).images
        except (PromptRefusedError, ImageError, ValueError) as error:
            self.images = f"a prompt with an image cannot be made ({error})"
            logger.warning("serve: images are refused: %s", self.images)
            return None

    def close(self) -> None:
        self.engine.close()
        self._changed.close()

    def choices(self, request: Request, listener: Callable[[int, Piece], None], *, client: str = "", scope: str = "") -> list[Choice]:
        """Return the answers to a request, whose jobs are not submitted; `listener` gets the number of an answer and its next piece.

        Args:
            client: who asks; clients take turns.
            scope: requests of one scope share the caches of their conversations.

        Raises:
            RequestError: the request names another model, exceeds a limit, or asks for what this model cannot do.
        """
        model, ignored = request.options.model, request.options.ignored
        adapter = None if model is None else self.adapter_of(model)
        # Keys and values belong to the adapter that has computed them. No header has a newline.
        scope = scope if adapter is None else f"{adapter}\n{scope}"
        if ignored and self.limits.strict:
            raise RequestError(400, f"{', '.join(ignored)}: no effect on this server", code="unsupported_parameter", param=ignored[0])
        for name in set(ignored) - self._reported:
            self._reported.add(name)
            logger.warning("serve: the parameter %s is ignored: it has no effect here", name)
        if request.logprobs is not None and self.alone_because and (request.echo or not self._captured):
            raise RequestError(400, f"logprobs are not available for this model: {self.alone_because}", param="logprobs")
        tokenizer = self.loaded.tokenizer
        request, prompts = self._prompts(request)
        asks = [self._ask(request, prompt) for prompt in prompts]
        template = None if request.kind == "text" else self._response_template
        reasons = template is not None and any(name in template["fields"] for name in REASONING)
        opening = "" if template is None or tokenizer.chat_template is None else self._templated(request).opening()
        made: list[Choice] = []
        form: Constraint | None = None
        for index, ask in enumerate(ask for ask in asks for _ in range(request.n)):
            parser = parts = None
            if template is not None:
                parser = AnswerParser(template, opening, request.tools, single_tool_call=request.single_tool_call)
                parts = AnswerParser(template, opening, ()) if ask.stop and reasons else None
            own = ask if ask.seed is None else replace(ask, seed=(ask.seed + index % request.n) & MOST_SEED)
            if not index:
                form = self._constraint(request, "none" if parser is None else parser.reasoning)
            job = Job(
                own,
                tokenizer,
                partial(listener, index),
                raw=template is not None,
                parts=parts,
                constraint=None if form is None else form.copy() if index else form,
                client=client,
                scope=scope,
                adapter=adapter,
            )
            before = ""
            if request.echo:
                prompt = request.prompts[index // request.n]
                before = prompt if isinstance(prompt, str) else str(tokenizer.decode(prompt))
            made.append(Choice(request.kind, index, job, tokenizer, parser, before))
        return made

    def adapter_of(self, name: str) -> str | None:
        """Return the adapter that a request for the model `name` asks for, None for the model itself.

        Raises:
            RequestError: neither the model nor an adapter has this name.
        """
        if name in self.adapter_names:
            return name
        if name not in self.names and not self._any_name:
            known = " and ".join(map(repr, (*self.names, *self.adapter_names)))
            raise RequestError(404, f"unknown model {name[:80]!r}; this server has {known}", code="model_not_found")
        return None

    def _constraint(self, request: Request, reasoning: Reasoning) -> Constraint | None:
        """Return the form that an answer has to follow, after its reasoning."""
        form = request.form
        name = "grammar" if isinstance(form, str) else "text.format" if request.kind == "response" else "response_format"
        try:
            if request.continue_final_message and (request.forced_tools or form is not None):
                raise ValueError("an answer that continues the last message has no form of its own")
            if request.forced_tools:
                name = "tool_choice"
                tools = [tool for tool in request.tools if tool["function"]["name"] in request.forced_tools]
                grammar = self._answer_grammar().calls(tools, single=request.single_tool_call, reasoning=reasoning)
            elif form is None:
                return None
            else:
                form = from_gbnf(form) if isinstance(form, str) else form
                chat = request.kind != "text" and self._response_template is not None
                calls = bool(request.tools) and not isinstance(form, str)  # a client's grammar is that of the whole answer
                grammar = self._answer_grammar().form(form, reasoning=reasoning, calls=calls) if chat else grammars(form)
            return self._grammars.constraint(grammar)
        except ValueError as error:
            raise RequestError(400, f"{name}: {error}", param=name) from error

    def _answer_grammar(self) -> AnswerGrammar:
        assert self._response_template is not None, "tools are refused without it"
        tokenizer = self.loaded.tokenizer
        added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
        return AnswerGrammar(self._response_template, added, str(tokenizer.chat_template or ""))

    def prompt_tokens(self, request: Request) -> int:
        """Return the length of a request's prompt.

        Raises:
            RequestError: as `choices` does.
        """
        if request.options.model is not None:
            self.adapter_of(request.options.model)
        return sum(len(prompt.token_ids) for prompt in self._prompts(request)[1])

    def tokenize(self, asked: TokenizeBody) -> dict[str, Any]:
        """Return the tokens of a text, or of messages by the chat template.

        Raises:
            RequestError: the model cannot take the messages.
        """
        if asked.text is None:
            _, [prompt] = self._prompts(asked.request())
            token_ids = prompt.token_ids
        else:
            token_ids = list(self.loaded.tokenizer(asked.text, add_special_tokens=asked.special)["input_ids"])
        tokens: list[Any] = token_ids
        if asked.with_pieces:
            tokens = [{"id": token, "piece": str(self.loaded.tokenizer.decode([token]))} for token in token_ids]
        return {"tokens": tokens, "count": len(token_ids), "max_model_len": self.loaded.context_tokens}

    def detokenize(self, asked: DetokenizeBody) -> dict[str, Any]:
        """
        Raises:
            RequestError: the tokens are not this model's.
        """
        if not all(token < self._vocabulary for token in asked.tokens):
            raise RequestError(400, f"tokens: there are tokens above {self._vocabulary - 1}", param="tokens")
        text = str(self.loaded.tokenizer.decode(asked.tokens))
        return {"prompt": text, "content": text}

    def _prompts(self, request: Request) -> tuple[Request, list[Prompt]]:
        """Return the request with its images, without its oldest messages if they have to be left out, and its prompts."""
        if request.kind == "text":
            return request, [Prompt(self._text_tokens(prompt)) for prompt in request.prompts]
        try:
            request = self._with_pictures(request)
            request = self._truncated(request) if request.truncate else request
            return request, [self._chat_prompt(request)]
        except (PromptRefusedError, ImageError) as error:
            raise RequestError(400, str(error), param=request.asked_by) from error

    def _with_pictures(self, request: Request) -> Request:
        """Return the request with a picture in the place of each image's URL."""
        parts = [part for message in request.messages if isinstance(message["content"], list) for part in message["content"]]
        urls = [part["url"] for part in parts if part["type"] == "image"]
        if not urls:
            return request
        if isinstance(self.images, str):
            raise ImageError(f"images: {self.images}")
        if len(urls) > MOST_IMAGES:
            raise ImageError(f"images: the conversation has {len(urls)}, of at most {MOST_IMAGES}")
        pictures, left = iter(urls), MOST_PIXELS
        messages = []
        for message in request.messages:
            content = message["content"]
            if isinstance(content, list):
                content = list(content)
                for place, part in enumerate(content):
                    if part["type"] == "image":
                        picture = read_url(next(pictures), self.limits.image_folder, left)
                        left -= picture.pixels
                        content[place] = {"type": "image", "image": picture}
            messages.append({**message, "content": content})
        return replace(request, messages=messages)

    def _text_tokens(self, prompt: str | list[int]) -> list[int]:
        size = self._vocabulary
        token_ids = prompt if isinstance(prompt, list) else list(self.loaded.tokenizer(prompt)["input_ids"])
        if not all(0 <= token < size for token in token_ids):
            raise RequestError(400, f"prompt has tokens outside of the range from 0 to {size - 1}", param="prompt")
        if not token_ids:
            raise RequestError(400, "prompt has no tokens", param="prompt")
        return token_ids

    def _truncated(self, request: Request) -> Request:
        """Return the request without its oldest messages, as few as leave room for the answer, or for half the context."""
        context = self.loaded.context_tokens
        if context is None:
            return request
        answer = min(self.limits.max_tokens if request.max_tokens is None else request.max_tokens, context // 2)
        messages = request.messages
        head = next((index for index, message in enumerate(messages) if message["role"] != "system"), 0)
        turns = [index for index, message in enumerate(messages) if message["role"] == "user" and index > head]
        kept = [request, *(replace(request, messages=[*messages[:head], *messages[turn:]]) for turn in turns)]
        fits = bisect.bisect_left(kept, True, key=lambda shorter: len(self._chat_prompt(shorter).token_ids) + answer <= context)
        return kept[min(fits, len(kept) - 1)]

    def _chat_prompt(self, request: Request) -> Prompt:
        tokenizer = self.loaded.tokenizer
        if tokenizer.chat_template is None:
            if request.template_variables:
                raise RequestError(400, "chat_template_kwargs: this model has no chat template", param="chat_template_kwargs")
            if request.tools or any(message["role"] == "tool" for message in request.messages):
                raise RequestError(400, "this model has no chat template, which tools need", param="tools")
            if any(isinstance(message["content"], list) for message in request.messages):
                raise RequestError(400, "this model has no chat template, which images need", param=request.asked_by)
            conversation = Conversation(tokenizer)
            conversation.restore([Message(message["role"], message["content"]) for message in request.messages])
            return conversation.prompt(0)
        if request.continue_final_message and (request.messages[-1]["role"] != "assistant" or "tool_calls" in request.messages[-1]):
            message = "only text of the assistant can be continued, and the last message is not that alone"
            raise RequestError(400, f"{request.asked_by}: {message}", param=request.asked_by)
        chat = self._templated(request)
        prompt = chat.prompt(self.images)
        if not prompt.token_ids:
            raise PromptRefusedError("the prompt has no tokens in this model's vocabulary; give another one")
        if request.tools and prompt.token_ids == replace(chat, tools=None).prompt(self.images).token_ids:
            raise RequestError(400, "this model's chat template has no place for tools", param="tools")
        if request.tools and self._response_template is None:
            raise RequestError(
                400, "calls of tools cannot be recognised in this model's answers: it has no response template", param="tools"
            )
        return prompt

    def _templated(self, request: Request) -> TemplatedChat:
        variables = dict(request.template_variables)
        if request.reasoning_effort is not None:
            off = {"enable_thinking": False, "thinking": False} if request.reasoning_effort == "none" else {}
            variables = {"reasoning_effort": request.reasoning_effort, **off, **variables}
        continued, prompted = request.continue_final_message, request.add_generation_prompt
        return TemplatedChat(self.loaded.tokenizer, request.messages, request.tools, variables, continued, prompted)

    def _ask(self, request: Request, prompt: Prompt) -> Ask:
        token_ids, context, limit = prompt.token_ids, self.loaded.context_tokens, self.limits.max_tokens
        room = limit if context is None else context - len(token_ids)
        if room < 1:
            # In OpenAI's words, by which clients recognise it.
            message = f"This model's maximum context length is {context} tokens, including the answer; the prompt has {len(token_ids)}"
            raise RequestError(400, message, code="context_length_exceeded", param=request.asked_by)
        options, size = request.options, self._vocabulary
        biases, min_tokens = {int(token): bias for token, bias in (options.logit_bias or {}).items()}, options.min_tokens or 0
        if not all(token < size for token in biases):
            raise RequestError(400, f"logit_bias has tokens outside of the range from 0 to {size - 1}", param="logit_bias")
        if request.max_tokens is not None and min_tokens > request.max_tokens:
            raise RequestError(400, f"min_tokens: {min_tokens} are more than max_tokens", param="min_tokens")
        unending = dict.fromkeys(self.ends, -math.inf) if options.ignore_eos else {}
        defaults: Any = self.loaded.model.generation_config
        own = defaults.stop_strings or ()
        temperature = options.temperature
        if temperature is None:
            temperature = _own(defaults, "temperature", 1.0) if defaults.do_sample else 0.0
        return Ask(
            token_ids=token_ids,
            max_tokens=min(defaults.max_new_tokens or limit if request.max_tokens is None else request.max_tokens, limit, room),
            min_tokens=min_tokens,
            end_tokens=self.ends,
            temperature=float(temperature),  # `generate` requires a float
            top_p=float(options.top_p if options.top_p is not None else _own(defaults, "top_p", 1.0)),
            top_k=max(0, options.top_k) if options.top_k is not None else _own(defaults, "top_k", 0),
            seed=None if options.seed is None else options.seed & MOST_SEED,
            stop=(*options.stop_texts, *((own,) if isinstance(own, str) else own)),
            min_p=float(options.min_p if options.min_p is not None else _own(defaults, "min_p", 0.0)),
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty or 0.0,
            frequency_penalty=options.frequency_penalty or 0.0,
            logit_bias={**biases, **unending},
            logprobs=request.logprobs,
            echo=request.echo,
            images=prompt.images,
        )


def _own(config: GenerationConfig, name: str, neutral: Any) -> Any:
    """Return the model's own value of a sampling option, which has no effect if the model does not sample."""
    value = getattr(config, name, None)
    return value if config.do_sample and value is not None else neutral
