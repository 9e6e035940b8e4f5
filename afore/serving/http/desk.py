"""From a checked body to requests of the engine, and from their events to an answer: what both generating endpoints do."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from afore.core import control
from afore.core.config import RunConfig
from afore.core.errors import RequestError, RoleLost
from afore.serving.engine import Engine, Text
from afore.serving.http.answers import DONE, ChatForm, Choice, CompletionForm, Form, Writer, event, usage
from afore.serving.http.errors import ApiError, bad_field, of_failure, unavailable
from afore.serving.http.schemas import ChatRequest, CompletionRequest, Generation, Message
from afore.serving.hub import Hub
from afore.serving.local import Ask, LocalClient
from afore.serving.spec import model_name
from afore.serving.texts import most_characters

DEFAULT_MAX_TOKENS = 16
"""Of /v1/completions, as OpenAI has it; a chat answers as long as there is room."""
MOST_OUTPUTS = 1024
"""Prompts times choices of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request, ready for the engine."""

    submits: tuple[control.Submit, ...]
    """One for each choice, prompt by prompt."""
    choices: tuple[Choice, ...]
    prompt_tokens: int
    writer: Writer
    include_usage: bool
    prompt_field: str


class Desk:
    """Takes requests in and writes their answers."""

    def __init__(self, hub: Hub, engine: Engine, config: RunConfig, text: Text | None, client: LocalClient) -> None:
        self._hub = hub
        self._limits = engine.limits
        self._text = text
        self._reader = engine.reader
        self._client = client
        self._seeds = random.Random(config.seed)
        self.model = model_name(config)
        """What clients call the model."""
        self.created_s = int(time.time())  # a date for people, not a time to reckon with: clients expect one

    # Before anything runs

    def check_serving(self) -> None:
        """Raises ``ApiError`` (503) while roles are missing or lost, naming them."""
        status = self._hub.status()
        if status.lost:
            raise unavailable(f"role lost: {status.lost}", code="role_lost", missing=status.missing, lost=status.lost)
        if not status.serving:
            raise unavailable(
                f"not serving yet: waiting for {', '.join(status.missing)}", code="not_serving", missing=status.missing
            )

    def check_model(self, model: str | None) -> None:
        """Raises ``ApiError`` (404) for another model than the served one."""
        if model is not None and model != self.model:
            raise ApiError(
                404,
                f"model: there is no {model!r:.200}; this server has {self.model!r}",
                param="model",
                code="model_not_found",
            )

    async def completion(self, body: CompletionRequest) -> Job:
        """The job of a completion. Raises ``ApiError``."""
        self.check_model(body.model)
        prompts = await self._prompts(body)
        prefixes = [self._echoed(body.prompt, ids, number) if body.echo else "" for number, ids in enumerate(prompts)]
        most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        logprobs = -1 if body.logprobs is None else body.logprobs
        form = CompletionForm(self._text, logprobs=logprobs >= 0)
        return self._job(body, prompts, prefixes, most, "max_tokens", logprobs, form, "prompt")

    async def chat(self, body: ChatRequest) -> Job:
        """The job of a chat completion. Raises ``ApiError``."""
        self.check_model(body.model)
        ids = await self.encode_chat(body.messages)
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        most = body.max_completion_tokens or body.max_tokens
        if most is None:
            most = max(1, min(self._limits.max_model_len, self._limits.kv_tokens) - len(ids))
        logprobs = (body.top_logprobs or 0) if body.logprobs else -1
        form = ChatForm(self._text, logprobs=body.logprobs)
        return self._job(body, [ids], [""], most, name, logprobs, form, "messages")

    async def encode(self, text: str, field: str) -> list[int]:
        """Tokens of a plain text. Raises ``ApiError``."""
        return await self._reader.read(self._tokenizer(field, text).encode, text)

    async def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation as the model sees it. Raises ``ApiError``."""
        plain = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.text}
            for message in messages
        ]
        text = self._tokenizer("messages", *(message["content"] for message in plain))
        try:
            rendered = text.render_chat(plain)
        except ValueError as error:
            raise bad_field("messages", str(error)) from None
        return await self._reader.read(text.encode_rendered, rendered)

    def decode(self, token_ids: Sequence[int], field: str) -> str:
        """Text of tokens. Raises ``ApiError`` for tokens that the model does not have."""
        self._check_tokens(token_ids, field)
        return self._tokenizer(field).decode(token_ids, skip_special_tokens=False)

    # Answers

    async def answer(self, job: Job) -> dict[str, Any]:
        """The whole answer. Raises ``ApiError``."""
        try:
            with self._client.ask(job.submits) as ask:
                async for choice, token in _tokens(ask, len(job.submits)):
                    job.choices[choice].take(token)
        except (RequestError, RoleLost) as error:
            raise of_failure(error, job.prompt_field) from None
        return job.writer.whole(job.choices, _usage(job))

    async def stream(self, job: Job) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. Raises ``ApiError`` at the first step; later failures are an event."""
        with contextlib.ExitStack() as stack:
            try:
                ask = stack.enter_context(self._client.ask(job.submits))
            except (RequestError, RoleLost) as error:
                raise of_failure(error, job.prompt_field) from None
            yield b""  # taken in: from here on the status is 200
            try:
                async for choice, token in _tokens(ask, len(job.submits)):
                    yield job.writer.chunk(job.choices[choice], token)
            except (RequestError, RoleLost) as error:
                yield event(of_failure(error, job.prompt_field).body())
            else:
                if job.include_usage:
                    yield job.writer.counts(_usage(job))
            yield DONE

    # Helpers

    def _job(
        self,
        body: Generation,
        prompts: Sequence[Sequence[int]],
        prefixes: Sequence[str],
        max_tokens: int,
        max_tokens_field: str,
        logprobs: int,
        form: Form,
        prompt_field: str,
    ) -> Job:
        if body.stops and self._text is None:
            raise bad_field("stop", "this model has no tokenizer, so no text to stop at")
        for ids in prompts:
            self._check_room(len(ids), max_tokens, max_tokens_field, prompt_field)
        seed = self._seeds.getrandbits(63) if body.seed is None else body.seed % 2**64
        submits = tuple(
            control.Submit(
                request="",
                text="",
                prompt=tuple(ids),
                max_new_tokens=max_tokens,
                ignore_eos=body.ignore_eos,
                sampling=control.Sampling(
                    temperature=body.temperature,
                    top_p=body.top_p,
                    top_k=max(body.top_k, 0),
                    seed=seed,
                    choice=choice,
                    repetition_penalty=body.repetition_penalty,
                    logprobs=logprobs,
                ),
                stop=body.stops,
            )
            for ids in prompts
            for choice in range(body.n)
        )
        choices = tuple(
            Choice(number, prefix=prefix, spelled=len(prefix))
            for number, prefix in enumerate(prefix for prefix in prefixes for _ in range(body.n))
        )
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        writer = Writer(
            form,
            name=secrets.token_hex(12),
            model=self.model,
            created_s=int(time.time()),
            include_usage=include_usage,
        )
        return Job(
            submits=submits,
            choices=choices,
            prompt_tokens=sum(map(len, prompts)),
            writer=writer,
            include_usage=include_usage,
            prompt_field=prompt_field,
        )

    async def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        prompt = body.prompt
        if isinstance(prompt, str):
            prompts = [await self.encode(prompt, "prompt")]
        elif prompt and isinstance(prompt[0], str):
            prompts = [await self.encode(str(text), "prompt") for text in prompt]
        elif prompt and isinstance(prompt[0], list):
            prompts = [ids for ids in prompt if isinstance(ids, list)]
        else:
            prompts = [[token for token in prompt if isinstance(token, int)]]
        for ids in prompts:
            if not ids:
                raise bad_field("prompt", "it is empty; send at least one token")
            self._check_tokens(ids, "prompt")
        if len(prompts) * body.n > MOST_OUTPUTS:
            raise bad_field("n", f"{len(prompts)} prompts with {body.n} choices each are too many for one request")
        return prompts

    def _echoed(self, prompt: str | Sequence[object], ids: Sequence[int], number: int) -> str:
        if isinstance(prompt, str):
            return prompt
        given = prompt[number] if number < len(prompt) else None
        return given if isinstance(given, str) else self._tokenizer("echo").decode(ids)

    def _tokenizer(self, field: str, *texts: str) -> Text:
        """The tokenizer. Raises ``ApiError`` without one, and for texts that cannot fit before time is spent on them."""
        if self._text is None:
            raise bad_field(field, "this model has no tokenizer; send token ids as prompt of /v1/completions")
        most = most_characters(self._limits.max_model_len, self._text.longest_token)
        if sum(map(len, texts)) > most:
            raise bad_field(
                field, f"longer than {self._limits.max_model_len} tokens can be; shorten it", "context_length_exceeded"
            )
        return self._text

    def _check_tokens(self, token_ids: Sequence[int], field: str) -> None:
        bad = next((token for token in token_ids if not 0 <= token < self._limits.vocab_size), None)
        if bad is not None:
            raise bad_field(field, f"token {bad} is not in the vocabulary of {self._limits.vocab_size}")

    def _check_room(self, prompt: int, max_tokens: int, max_tokens_field: str, prompt_field: str) -> None:
        limits = self._limits
        for most, what, remedy in (
            (limits.max_model_len, "this model's context", "shorten the prompt or ask for fewer tokens"),
            (limits.kv_tokens, "the KV cache", "start the server with more --kv-blocks"),
        ):
            if prompt + max_tokens > most:
                field = prompt_field if prompt >= most else max_tokens_field
                raise bad_field(
                    field,
                    f"{prompt} prompt tokens and {max_tokens} new ones exceed the {most} tokens of {what}; {remedy}",
                    "context_length_exceeded",
                )


async def _tokens(ask: Ask, count: int) -> AsyncGenerator[tuple[int, control.TokenOut], None]:
    """(choice, token) of all choices as they come, until each has ended."""
    while count:
        choice, what = await ask.next()
        if isinstance(what, control.Finished):
            count -= 1
        else:
            yield choice, what


def _usage(job: Job) -> dict[str, Any]:
    return usage(job.prompt_tokens, sum(len(choice.tokens) for choice in job.choices))
