"""Answers in the form of OpenAI's chat completions, text completions and responses."""

from __future__ import annotations

import json
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from moegraft.injection.cli.chat.answer import token_texts
from moegraft.injection.cli.serve.answer_form import AnswerParser, ParsedDelta
from moegraft.injection.cli.serve.job import Job, Piece, TokenScore
from moegraft.injection.cli.serve.protocol import Kind, Request, error_body


class Choice:
    """One answer to a request, as its pieces arrive: text, reasoning, calls of tools and scores of tokens.

    Args:
        parser: finds reasoning and calls of tools in the text; None if the model's templates mark none.
        before: text that the answer begins with.
    """

    def __init__(
        self, kind: Kind, index: int, job: Job, tokenizer: PreTrainedTokenizerBase, parser: AnswerParser | None, before: str
    ) -> None:
        self.kind = kind
        self.index = index
        self.job = job
        self.text = self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._parser = parser
        self._before = before
        self._scores: list[TokenScore] = []
        self._waiting = deque[tuple[TokenScore, str]]()  # scores of text to come, each with as much of its text as is content
        self._waited = self._received = 0  # characters of the job's text before the first of them, and so far
        self._offset = 0  # in the text, of the next token with a score
        self._started = False
        self.tokens = 0  # of the pieces so far

    @property
    def finish_reason(self) -> str | None:
        return "tool_calls" if self.tool_calls and self.job.ending == "stop" else self.job.ending

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._parser is None else self._parser.reasoning_tokens

    def add(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Take the next pieces, and return the parts of the answer that a stream sends for them."""
        parts: list[dict[str, Any]] = []
        self.tokens += sum(piece.tokens for piece in pieces)
        if not self._started:
            self._started = True
            self.text = self._before
            if self.kind != "text":
                parts.append(self._part({"delta": {"role": "assistant", "content": ""}}, []))
            elif self._before or self.job.prompt_scores:
                texts = token_texts(self._tokenizer, [score.token for score in self.job.prompt_scores])
                scores = [replace(score, text=text) for score, text in zip(self.job.prompt_scores, texts, strict=True)]
                parts.append(self._part({"text": self._before}, scores))
        for delta, scores in self._deltas(pieces):
            parts.append(self._part(self._shown(delta), scores))
        if pieces[-1].ending is not None:
            left = [replace(score, text=own) for score, own in self._waiting if own or not score.text]
            empty: dict[str, Any] = {"text": ""} if self.kind == "text" else {"delta": {}}
            parts.append({**self._part(empty, left), "finish_reason": self.finish_reason})
        return parts

    def _deltas(self, pieces: Sequence[Piece]) -> list[tuple[ParsedDelta, list[TokenScore]]]:
        """Return the parts of some pieces with their scores; of several parts which are alike, one."""
        found: list[tuple[ParsedDelta, list[TokenScore]]] = []
        for piece in pieces:  # each by itself, for the count of its tokens
            self._waiting += [(score, "") for score in piece.scores]
            last = piece.ending is not None
            if self._parser is not None:
                deltas = self._parser.feed(piece.text, last=last, cut=last and self.job.cut, tokens=piece.tokens)
            else:
                deltas = iter([ParsedDelta("content", piece.text, start=self._received)] if piece.text else [])
            self._received += len(piece.text)
            for delta in deltas:
                scores = self._scored(delta) if delta.kind == "content" else []
                if found and found[-1][0].kind == delta.kind != "tool_call":
                    before, earlier = found.pop()
                    delta, scores = replace(before, text=before.text + delta.text), earlier + scores
                found.append((delta, scores))
        return found

    def _scored(self, delta: ParsedDelta) -> list[TokenScore]:
        """Return the scores of the tokens that end in a part of the content, and forget those before it."""
        scored = []
        while self._waiting:
            score, own = self._waiting[0]
            begin, end = self._waited - delta.start, self._waited - delta.start + len(score.text)
            own += delta.text[max(0, begin) : max(0, end)]
            if end > len(delta.text):
                self._waiting[0] = score, own
                break
            self._waiting.popleft()
            self._waited += len(score.text)
            if own or begin == end >= 0:
                scored.append(replace(score, text=own))
        return scored

    def whole(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self.index, "logprobs": self._logprobs(self._scores, 0), "finish_reason": self.finish_reason}
        if self.kind == "text":
            return {**choice, "text": self.text}
        message: dict[str, Any] = {"role": "assistant", "content": self.text if self.text or not self.tool_calls else None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return {**choice, "message": message}

    def _part(self, content: Mapping[str, Any], scores: list[TokenScore]) -> dict[str, Any]:
        offset = self._offset
        self._offset += sum(len(score.text) for score in scores)
        self._scores += scores
        return {"index": self.index, **content, "logprobs": self._logprobs(scores, offset), "finish_reason": None}

    def _shown(self, delta: ParsedDelta) -> dict[str, Any]:
        if delta.kind == "content":
            self.text += delta.text
            return {"text": delta.text} if self.kind == "text" else {"delta": {"content": delta.text}}
        if delta.kind == "reasoning":
            self.reasoning += delta.text
            return {"delta": {"reasoning_content": delta.text}}
        function = {"name": delta.name, "arguments": delta.text}
        call = {"id": new_id("call"), "type": "function", "function": function}
        self.tool_calls.append(call)
        return {"delta": {"tool_calls": [{"index": len(self.tool_calls) - 1, **call}]}}

    def _logprobs(self, scores: list[TokenScore], offset: int) -> dict[str, Any] | None:
        if self.job.ask.logprobs is None or not scores:
            return None
        tops = [[(score.text if token == score.token else self._spell(token), value) for token, value in score.top] for score in scores]
        if self.kind == "text":
            texts = [score.text for score in scores]
            return {
                "tokens": texts,
                "token_logprobs": [score.logprob for score in scores],
                "top_logprobs": [
                    # Of several with one text, such as parts of characters, the likeliest, which comes first in `top`.
                    None if score.logprob is None else dict(top) | dict(reversed(top)) | {score.text: score.logprob}
                    for score, top in zip(scores, tops, strict=True)
                ],
                "text_offset": [offset + sum(map(len, texts[:place])) for place in range(len(texts))],
            }

        def entry(text: str, logprob: float | None) -> dict[str, Any]:
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {
            "content": [
                {**entry(score.text, score.logprob), "top_logprobs": [entry(*each) for each in top]}
                for score, top in zip(scores, tops, strict=True)
            ]
        }

    def _spell(self, token: int) -> str:
        """Return a token's text within a text: at the beginning, some tokenizers leave out its space."""
        first = self.job.ask.token_ids[-1]
        before, both = (str(self._tokenizer.decode(ids)) for ids in ([first], [first, token]))
        return both[len(before) :]


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


class Reply:
    """The answers to one request in the form of chat or text completions: whole, or as the events of a stream."""

    def __init__(self, request: Request, model: str, fingerprint: str, choices: Sequence[Choice]) -> None:
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        self._n = request.n
        self._choices = choices
        prefix, name = ("cmpl", "text_completion") if request.kind == "text" else ("chatcmpl", "chat.completion")
        same = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": name, **same}
        self._chunk_head = {**self._head, "object": "text_completion" if request.kind == "text" else "chat.completion.chunk"}

    def whole(self) -> dict[str, Any]:
        return {**self._head, "choices": [choice.whole() for choice in self._choices], **self._figures()}

    def start(self) -> Iterator[str]:
        yield from ()

    def part(self, part: Mapping[str, Any]) -> Iterator[str]:
        chunk = {**self._chunk_head, "choices": [part]}
        if self._continuous_usage:
            choice = self._choices[part["index"]]
            prompt = len(choice.job.ask.token_ids)
            chunk["usage"] = {"prompt_tokens": prompt, "completion_tokens": choice.tokens, "total_tokens": prompt + choice.tokens}
        yield event(chunk)

    def end(self) -> Iterator[str]:
        if self._include_usage:
            yield event({**self._chunk_head, "choices": [], **self._figures()})
        yield "data: [DONE]\n\n"

    def fail(self, message: str) -> Iterator[str]:
        yield event(error_body(500, message))

    def _figures(self) -> dict[str, Any]:
        return {"usage": usage(self._choices, self._n), "moegraft": figures(self._choices[0].job)}


class ResponseReply:
    """The answer to a request to `/v1/responses`, whole or as the events of a stream.

    An answer is a list of items: its reasoning, its message and its calls of tools. At most the last one grows.
    """

    def __init__(self, request: Request, model: str, choice: Choice) -> None:
        self._choice = choice
        self._request = request
        self._number = 0  # of the next event
        self._items: list[dict[str, Any]] = []
        self._open: str | None = None  # the type of the item that grows
        self._head = {"id": new_id("resp"), "object": "response", "created_at": int(time.time()), "model": model}

    def whole(self) -> dict[str, Any]:
        list(self._finish())
        job = self._choice.job
        cut = job.ending == "length"
        used = usage([self._choice])
        tokens = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used["completion_tokens_details"],
            "total_tokens": used["total_tokens"],
        }
        return {
            **self._response("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": tokens,
            "moegraft": figures(job),
        }

    def start(self) -> Iterator[str]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def part(self, part: Mapping[str, Any]) -> Iterator[str]:
        """Yield the events for a part of the answer, which is in the form of a chat's chunk."""
        delta = part["delta"]
        if text := delta.get("reasoning_content"):
            yield from self._grow("reasoning", text)
        if text := delta.get("content"):
            yield from self._grow("message", text)
        for call in delta.get("tool_calls", ()):
            yield from self._close()
            function = call["function"]
            item = {"type": "function_call", "id": new_id("fc"), "call_id": call["id"], "name": function["name"], "arguments": ""}
            place = {"item_id": item["id"], "output_index": len(self._items)}
            yield self._event("response.output_item.added", output_index=len(self._items), item={**item, "status": "in_progress"})
            yield self._event("response.function_call_arguments.delta", **place, delta=function["arguments"])
            yield self._event("response.function_call_arguments.done", **place, name=function["name"], arguments=function["arguments"])
            self._items.append({**item, "arguments": function["arguments"], "status": "completed"})
            yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def end(self) -> Iterator[str]:
        yield from self._finish()
        whole = self.whole()
        yield self._event(f"response.{whole['status']}", response=whole)

    def fail(self, message: str) -> Iterator[str]:
        yield from self._close("incomplete")
        failed = {**self._response("failed"), "error": {"code": "server_error", "message": message}}
        yield self._event("response.failed", response=failed)

    def _finish(self) -> Iterator[str]:
        """End the last item; an answer whose parts were not streamed gets its items first."""
        if not self._items:
            yield from self.part({"delta": self._choice.whole()["message"]})
        if not self._items:
            yield from self._grow("message", "")
        yield from self._close("incomplete" if self._choice.job.ending == "length" else "completed")

    def _grow(self, kind: str, text: str) -> Iterator[str]:
        """Add text to the item that grows, or to a new one if that is of another type."""
        part = "output_text" if kind == "message" else "reasoning_text"
        if self._open != kind:
            yield from self._close()
            self._open = kind
            item: dict[str, Any] = {"type": kind, "id": new_id("msg" if kind == "message" else "rs"), "status": "in_progress"}
            item["role" if kind == "message" else "summary"] = "assistant" if kind == "message" else []
            self._items.append({**item, "content": [_part(part, "")]})
            yield self._event("response.output_item.added", output_index=len(self._items) - 1, item={**item, "content": []})
            yield self._event("response.content_part.added", **self._place(), part=_part(part, ""))
        self._items[-1]["content"][0]["text"] += text
        if text:
            extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._event(f"response.{part}.delta", **self._place(), delta=text, **extra)

    def _close(self, status: str = "completed") -> Iterator[str]:
        """End the item that grows."""
        if self._open is None:
            return
        item, part = self._items[-1], self._items[-1]["content"][0]
        item["status"] = status
        extra: dict[str, Any] = {"logprobs": []} if self._open == "message" else {}
        self._open = None
        yield self._event(f"response.{part['type']}.done", **self._place(), text=part["text"], **extra)
        yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, name: str, /, **data: Any) -> str:
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **data}, name)

    def _response(self, status: str) -> dict[str, Any]:
        asked = self._request
        ask, forced = self._choice.job.ask, asked.forced_tools
        shown: dict[str, Any] = {"type": "text"}
        if asked.form_name:
            shown = {"type": "json_schema", "name": asked.form_name, "description": None, "schema": asked.form, "strict": True}
        elif isinstance(asked.form, dict):
            shown = {"type": "json_object"}
        return {
            **self._head,
            "completed_at": int(time.time()) if status in ("completed", "incomplete") else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "output": self._items,
            "parallel_tool_calls": not asked.single_tool_call,
            "tool_choice": "required" if forced else "auto" if asked.tools else "none",
            "tools": [
                {"type": "function", "strict": False, "description": None, "parameters": None, **tool["function"]} for tool in asked.tools
            ],
            "text": {"format": shown},
            "reasoning": {"effort": asked.reasoning_effort, "summary": None},
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "presence_penalty": ask.presence_penalty,
            "frequency_penalty": ask.frequency_penalty,
            "top_logprobs": 0,
            "max_output_tokens": asked.max_tokens,
            "truncation": "auto" if asked.truncate else "disabled",
            "usage": None,
            "metadata": {},
            **NOT_DONE,
        }


# What a response of OpenAI's has for what this server does not do: nothing is stored, run in the background, or billed.
NOT_DONE = {
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
}


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": [], "logprobs": []} if kind == "output_text" else {})}


def new_id(prefix: str) -> str:
    """Return the id of a new answer, item or call."""
    return f"{prefix}_{uuid.uuid4().hex}"


def usage(choices: Sequence[Choice], each: int = 1) -> dict[str, Any]:
    """Return the tokens of the answers and of their prompts, of which `each` answers have one."""
    jobs = [choice.job for choice in choices]
    prompt, completion = sum(len(job.ask.token_ids) for job in jobs[::each]), sum(job.completion_tokens for job in jobs)
    cached = sum(job.cached_tokens for job in jobs[::each])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }


def figures(job: Job) -> dict[str, Any]:
    """Return figures beyond OpenAI's interface: the server's times, and the model's work for the answer."""
    first_ms, rate = job.first_token_ms, job.tokens_per_s
    return {
        "first_token_ms": None if first_ms is None else round(first_ms, 2),
        "tokens_per_second": None if rate is None else round(rate, 2),
        "together": job.together,
        "work": job.work or {},
    }
