"""The request engine: validates requests at the door, drives the batcher, watches that steps come to an end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from afore.core import control
from afore.core.config import RunConfig
from afore.core.errors import PromptTooLong, QueueFull, RequestError, RoleLost
from afore.core.topology import ATTENTION, PREFILL, SCHEDULER, member_name
from afore.serving.admission import Limits, check_request
from afore.serving.batching import Batcher
from afore.serving.hub import Hub
from afore.serving.observer import Observer
from afore.serving.pace import Pace
from afore.serving.requests import Request, State
from afore.serving.spelling import Speller, Spelling
from afore.serving.spoken import CLIENT
from afore.serving.spread import Spread
from afore.serving.texts import QUICK_CHARACTERS, Reader, most_characters

log = logging.getLogger(__name__)


Owed = tuple[str, int, str]
"""(role, rank, what it owes the engine)."""
BLOCKS, BLOCKS_BACK = "the blocks of a request", "word of the blocks of a released request"
PREFILL_END = "the next chunk of a prompt"


class Text(Protocol):
    """A tokenizer, as the engine and the door need it."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def longest_token(self) -> int:
        """Characters of the longest token: no text of n tokens is longer than n times this."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str: ...

    def encode_rendered(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def detokenizer(self) -> Speller: ...


class Engine:
    """Between the hub and the batcher."""

    def __init__(self, hub: Hub, config: RunConfig, limits: Limits, text: Text | None) -> None:
        """``text`` tokenizes prompts and spells tokens; none for a model that has no tokenizer (token ids still work)."""
        self._hub = hub
        self._text = text
        self.reader = Reader()
        """Tokenizes long texts, one at a time."""
        self._reading: dict[asyncio.Task[None], tuple[int, str]] = {}
        """Requests whose long texts are being tokenized: of which client, and their names."""
        self.observer = Observer()
        """Who hears of requests."""
        self._config = config
        self._limits = limits
        self._batcher = Batcher(
            config.topology,
            max_tokens_per_worker=config.max_tokens_per_worker,
            kv_blocks=limits.kv_tokens // config.batch.block_tokens,
            block_tokens=config.batch.block_tokens,
            eos_ids=limits.eos_ids,
            least_microbatches=config.batch.least_microbatches,
            hold=self._hold if config.batch.spread else None,
        )
        self._spread = Spread(config.topology.microbatches)
        self._held: dict[int, asyncio.TimerHandle] = {}
        """Microbatches whose next step is held back, until then."""
        most, least = config.topology.microbatches, config.batch.least_microbatches
        self._pace = Pace(most=most, least=least) if 0 < least < most else None
        """How many microbatches run, where that is not given."""
        self.ids_lost = 0
        """Attention workers whose record of their tokens' experts a disk ended."""
        self._lost: RoleLost | None = None
        self._step_timers: dict[tuple[int, int], asyncio.TimerHandle] = {}
        self._owed: Counter[Owed] = Counter()
        """Answers that are due, by who owes what."""
        self._owed_timers: dict[Owed, asyncio.TimerHandle] = {}
        """Until its debtor must have given the next one."""
        hub.on_member = self.from_member
        hub.on_client = self.from_client
        hub.on_client_gone = self.client_gone
        hub.on_lost = self.lost

    @property
    def live_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._batcher.live)

    @property
    def limits(self) -> Limits:
        """What a request may ask for."""
        return self._limits

    @property
    def num_waiting(self) -> int:
        """Requests that have no seat yet."""
        return self._batcher.num_waiting + len(self._reading)

    @property
    def num_running(self) -> int:
        """Requests that have a seat: reserving, in prefill, or decoding."""
        return len(self._batcher.live) - self._batcher.num_waiting

    @property
    def num_microbatches(self) -> int:
        """How many of the M microbatches take requests."""
        return self._batcher.num_microbatches

    @property
    def num_preemptions(self) -> int:
        """How often a request gave its KV blocks to an older one, since the start."""
        return self._batcher.num_preemptions

    @property
    def kv_usage(self) -> float:
        """Share (0…1) of all attention workers' KV blocks that requests hold."""
        blocks = self._limits.kv_tokens // self._config.batch.block_tokens * self._config.topology.attention
        return self._batcher.blocks_held / blocks

    def from_client(self, client: int, message: control.Message) -> None:
        """A request, or the end of the interest in one. A request that cannot be served is refused at once, typed."""
        if isinstance(message, control.Submit):
            self._submitted(client, message)
        elif isinstance(message, control.Cancel):
            self._forget(client, message.request)
            self._abort([request for request in self._of(client) if request.name == message.request], "abort")
        self._send()

    def client_gone(self, client: int) -> None:
        """Its requests end."""
        self._forget(client, None)
        self._abort(self._of(client), "abort")
        self._send()

    def from_member(self, role: str, rank: int, message: control.Message) -> None:
        """What roles report."""
        if isinstance(message, control.StepDone) and role == ATTENTION:
            self._step_done(rank, message)
        elif isinstance(message, control.Reserved) and role == ATTENTION:
            self._paid((role, rank, BLOCKS))
            self._batcher.reserved(rank, message)
        elif isinstance(message, control.Freed) and role == ATTENTION:
            self._paid((role, rank, BLOCKS_BACK))
            self._batcher.freed(rank, message)
        elif isinstance(message, control.KvReady) and role == ATTENTION:
            self._batcher.kv_ready(message)
        elif isinstance(message, control.IdsLost) and role == ATTENTION:
            self.ids_lost += 1
        elif isinstance(message, control.PrefillDone) and role == PREFILL:
            self._paid((role, rank, PREFILL_END))
            self._batcher.prefill_done(message)
        elif isinstance(message, control.PrefillStopped) and role == PREFILL:
            self._paid((role, rank, PREFILL_END))
        elif isinstance(message, control.PrefillProgress) and role == PREFILL:
            self._given_time((role, rank, PREFILL_END))
        elif isinstance(message, control.StepAborted) and role == SCHEDULER:
            log.warning(
                "step %d of microbatch %d was aborted at layer %d", message.step, message.microbatch, message.layer
            )
            self._batcher.step_aborted(message)
        else:
            log.warning("%s sent %s, which is not its to send", member_name(role, rank), type(message).__name__)
        self._send()

    def _step_done(self, attention: int, done: control.StepDone) -> None:
        if self._batcher.waiting_for(done.microbatch, done.step) == (attention,):
            self._spread.ended(done.microbatch, _now_ns())
        rows = self._batcher.step_done(attention, done)
        if self._pace is None or not rows:
            return
        now_ns = _now_ns()
        wanted = self._pace.step_ended(done.microbatch, rows, now_ns)
        if wanted != self._batcher.num_microbatches:
            log.info("%d microbatches run, of %d", wanted, self._config.topology.microbatches)
            self._batcher.run_with(wanted)

    def _hold(self, microbatch: int) -> bool:
        """Whether the next step of the microbatch is held back; it is released in time. None is once a role is lost."""
        if self._lost is not None:
            return False
        hold_ns = self._spread.hold_ns(microbatch, _now_ns())
        if hold_ns:
            self._held[microbatch] = asyncio.get_running_loop().call_later(hold_ns / 1e9, self._release, microbatch)
        return hold_ns > 0

    def _release(self, microbatch: int) -> None:
        del self._held[microbatch]
        self._batcher.release(microbatch)
        self._send()

    def lost(self, name: str, reason: str) -> None:
        """A role is gone: every request ends with an error that names it, and so does every later one."""
        if self._lost is None:
            self._lost = RoleLost(name, reason)
        for timer in (*self._step_timers.values(), *self._owed_timers.values(), *self._held.values()):
            timer.cancel()
        self._held.clear()
        self._step_timers.clear()
        self._owed_timers.clear()
        self._owed.clear()
        for request in self._batcher.live:
            if request.state is not State.ENDED:
                self._fail(request.client, request.name, self._lost)
                self._abort([request], "error")
        self._batcher.drain()

    def _submitted(self, client: int, submit: control.Submit) -> None:
        try:
            if len(submit.text) <= QUICK_CHARACTERS:
                encode = self._encoder(submit) if submit.text else None
                self._enter(client, submit if encode is None else _with_ids(submit, encode(submit.text)))
                return
            encode = self._encoder(submit)
            self._check_queue(submit)
        except (RequestError, RoleLost) as error:
            self._fail(client, submit.request, error)
            return
        reading = asyncio.get_running_loop().create_task(self._read(client, submit, encode), name="tokenize")
        self._reading[reading] = (client, submit.request)
        reading.add_done_callback(lambda done: self._reading.pop(done, None))

    async def _read(self, client: int, submit: control.Submit, encode: Callable[[str], list[int]]) -> None:
        """Tokenizes a long text beside the loop, which goes on serving everybody else."""
        try:
            ids = await self.reader.read(encode, submit.text)
            del self._reading[asyncio.current_task()]  # type: ignore[arg-type]  # this is one
            self._enter(client, _with_ids(submit, ids))
        except (RequestError, RoleLost) as error:
            self._fail(client, submit.request, error)
        except Exception as error:
            log.exception("a text of %d characters cannot be tokenized", len(submit.text))
            self._fail(
                client,
                submit.request,
                RequestError(submit.request, f"its text cannot be tokenized ({type(error).__name__})"),
            )
        self._send()

    def _forget(self, client: int, name: str | None) -> None:
        """Texts that are still being tokenized, of one request of a client, or of all, are of no use any more."""
        for reading, of in list(self._reading.items()):
            if of == (client, name if name is not None else of[1]):
                reading.cancel()

    def _enter(self, client: int, request: control.Submit) -> None:
        self._check(request)
        spelling = None if self._text is None else Spelling(self._text.detokenizer(), request.stop)
        self.observer.submitted(self._batcher.submit(client, request, spelling))

    def _encoder(self, submit: control.Submit) -> Callable[[str], list[int]]:
        """What tokenizes its text. Raises ``RequestError`` without a tokenizer, ``PromptTooLong`` before time is spent on it."""
        if self._text is None:
            raise RequestError(submit.request, "this model has no tokenizer", "send token ids")
        most = self._limits.max_model_len
        if len(submit.text) > most_characters(most, self._text.longest_token):
            raise PromptTooLong(
                submit.request, f"its {len(submit.text):,} characters are more than {most} tokens can be", "shorten it"
            )
        return self._text.encode

    def _check(self, submit: control.Submit) -> None:
        if self._lost is not None:
            raise self._lost
        check_request(submit, self._limits, has_text=self._text is not None)
        self._check_queue(submit)

    def _check_queue(self, submit: control.Submit) -> None:
        if self.num_waiting >= self._config.batch.max_waiting:
            raise QueueFull(
                submit.request,
                f"{self.num_waiting} requests wait already",
                "come back later, or raise batch.max_waiting",
            )

    def _of(self, client: int) -> list[Request]:
        return [r for r in self._batcher.live if r.client == client and r.state is not State.ENDED]

    def _abort(self, requests: list[Request], reason: str) -> None:
        for request in requests:
            self._batcher.end(request)
            self.observer.ended(request.client, request.name, reason)

    def _fail(self, client: int, name: str, error: RequestError | RoleLost) -> None:
        if isinstance(error, RoleLost):
            failed = control.Failed(name, "RoleLost", f"{error.role}: {error.reason}", error.hint)
        else:
            failed = control.Failed(name, type(error).__name__, error.problem, error.remedy)
        self._hub.to_client(client, failed)

    def _send(self) -> None:
        for (role, rank), message in self._batcher.drain():
            if role == CLIENT:
                if isinstance(message, control.TokensOut):
                    self.observer.tokens(rank, message)
                elif isinstance(message, control.TokenOut):
                    self.observer.token(rank, message.request, message.index)
                elif isinstance(message, control.Finished):
                    self.observer.ended(rank, message.request, message.reason)
                self._hub.to_client(rank, message)
                continue
            if isinstance(message, control.PrefillWork):
                request = self._batcher.find(message.request)
                if request is not None:
                    self.observer.scheduled(request)
            if isinstance(message, control.Announce):
                self._watch_step(message)
            elif isinstance(message, control.Reserve):
                self._owes((role, rank, BLOCKS))
            elif isinstance(message, control.PrefillWork):
                self._owes((role, rank, PREFILL_END))
            elif isinstance(message, control.Release) and message.late:
                self._owes((role, rank, BLOCKS_BACK))
            self._hub.to_member(role, rank, message)

    def _owes(self, owed: Owed) -> None:
        """One more answer is due. The debtor works them off one by one, so each has its time from the one before it."""
        self._owed[owed] += 1
        if self._owed[owed] == 1:
            self._given_time(owed)

    def _given_time(self, owed: Owed) -> None:
        """Its debtor has just been heard of; nothing, where nothing is owed."""
        timer = self._owed_timers.pop(owed, None)
        if timer is not None:
            timer.cancel()
        if self._owed[owed] > 0:
            self._owed_timers[owed] = asyncio.get_running_loop().call_later(
                self._config.times.step_s, self._overdue, owed
            )

    def _paid(self, owed: Owed) -> None:
        self._owed[owed] = max(self._owed[owed] - 1, 0)
        self._given_time(owed)

    def _overdue(self, owed: Owed) -> None:
        role, rank, what = owed
        self._hub.lose(role, rank, f"{what} has not come for {self._config.times.step_s:g} s")

    def _watch_step(self, announced: control.Announce) -> None:
        """One deadline a microbatch: the next announcement of it (or the end of its work) takes it off."""
        for key in [key for key in self._step_timers if key[0] == announced.microbatch]:
            self._step_timers.pop(key).cancel()
        key = (announced.microbatch, announced.step)
        self._step_timers[key] = asyncio.get_running_loop().call_later(
            self._config.times.step_s, self._step_overdue, announced
        )

    def _step_overdue(self, announced: control.Announce) -> None:
        self._step_timers.pop((announced.microbatch, announced.step), None)
        late = self._batcher.waiting_for(announced.microbatch, announced.step)
        if late:
            others = ", ".join(member_name(ATTENTION, rank) for rank in late[1:])
            self._hub.lose(
                ATTENTION,
                late[0],
                f"step {announced.step} of microbatch {announced.microbatch} has no report after "
                f"{self._config.times.step_s:g} s" + (f", nor from {others}" if others else ""),
            )


def _now_ns() -> int:
    return round(asyncio.get_running_loop().time() * 1e9)


def _with_ids(submit: control.Submit, ids: Sequence[int]) -> control.Submit:
    return dataclasses.replace(submit, text="", prompt=tuple(ids))
