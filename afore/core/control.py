"""Every control message that crosses processes. The codec is ``afore.core.messages``; nothing hot travels this way.

Direction stands beside each group. A star: every role and every client talks to the hub, which lives beside the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from afore.core.config import RunConfig
from afore.core.record import record

WIRE_VERSION = 7
"""Raised with every change of a record or message; peers of different versions refuse each other."""

# Membership: role -> hub


@record
class Join:
    """A role (or a ``client``) asks to take part. ``rank`` -1 takes the next free one."""

    role: str
    rank: int
    pid: int
    endpoint: str
    """Address of its fabric endpoint."""


@record
class Loading:
    """Progress of loading weights."""

    done: int
    total: int


@record
class Loaded:
    """The role has its weights and can open an epoch."""

    weights_bytes: int


@record
class LabelledKey:
    """A region that peers may write into or map: fields of ``RegionKey`` and what it is."""

    label: str
    fabric: str
    address: str
    region: int
    nbytes: int
    token: str


@record
class Regions:
    """The regions that this role registered for an epoch."""

    epoch: int
    keys: tuple[LabelledKey, ...]


@record
class Linked:
    """All links of this role for the epoch stand."""

    epoch: int


@record
class Failure:
    """The role is about to end because of ``error``."""

    kind: str
    error: str


# Membership: hub -> role


@record
class Welcome:
    """The role's rank and the run's configuration."""

    role: str
    rank: int
    config: RunConfig


@record
class Refused:
    """The role cannot take part; it ends."""

    problem: str
    remedy: str


@record
class Member:
    """One process of the cluster in one role."""

    role: str
    rank: int
    pid: int
    endpoint: str


@record
class OpenEpoch:
    """Register new regions for this epoch and answer with ``Regions``."""

    epoch: int
    members: tuple[Member, ...]


@record
class MemberKeys:
    """The regions of one member."""

    role: str
    rank: int
    keys: tuple[LabelledKey, ...]


@record
class DirectoryMessage:
    """Everybody's regions: connect, and answer with ``Linked``."""

    epoch: int
    members: tuple[MemberKeys, ...]


@record
class Serve:
    """Everybody is linked: work may come."""

    epoch: int


@record
class Stop:
    """The cluster ends."""

    reason: str


# Engine <-> scheduler


@record
class Announce:
    """Engine -> scheduler: step of a microbatch, with T_a of every attention worker."""

    microbatch: int
    step: int
    tokens_A: tuple[int, ...]


@record
class StepAborted:
    """Scheduler -> engine: a target of this step was aborted and every FFN worker has passed it."""

    microbatch: int
    step: int
    layer: int


# Engine <-> attention


@record
class Row:
    """One token of a step: feed ``token`` at ``position`` of the request and sample the next.

    A position that begins a KV block takes one of the worker's free blocks: the engine has counted that there is one.
    """

    request: int
    token: int
    position: int


@record
class StepWork:
    """Engine -> attention: its rows of a step, column by column. Only to workers that have rows."""

    microbatch: int
    step: int
    requests: tuple[int, ...]
    """Of each row, as the next two."""
    tokens: tuple[int, ...]
    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.requests) == len(self.tokens) == len(self.positions):
            raise ValueError(
                f"{len(self.requests)} requests, {len(self.tokens)} tokens and {len(self.positions)} positions are no rows"
            )

    @classmethod
    def of(cls, microbatch: int, step: int, rows: Iterable[Row]) -> StepWork:
        """The work of these rows."""
        rows = tuple(rows)
        return cls(
            microbatch,
            step,
            tuple(row.request for row in rows),
            tuple(row.token for row in rows),
            tuple(row.position for row in rows),
        )

    @property
    def rows(self) -> tuple[Row, ...]:
        """Row by row."""
        return tuple(map(Row, self.requests, self.tokens, self.positions))


@record
class TokenLogprobs:
    """Natural logarithms of probabilities under the model's own distribution (before temperature, penalties and filters)."""

    logprob: float
    """Of the token itself."""
    top: tuple[tuple[int, float], ...]
    """(token, log-probability) of the most probable ones, best first; as many as were asked for."""


@record
class StepDone:
    """Attention -> engine: the sampled tokens, in the order of the rows."""

    microbatch: int
    step: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Of each row that asked for them; empty where no row did."""


@record
class CancelStep:
    """Engine -> attention: give up this step; the rows come again under another step number."""

    microbatch: int
    step: int


@record
class Sampling:
    """How a request's tokens are chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the sequence has already, multiplies the negative ones; 1 is off."""
    logprobs: int = -1
    """How many of the most probable tokens to report beside the chosen one's log-probability; -1 reports nothing."""


@record
class Reserve:
    """Engine -> attention: allocate KV blocks for the first ``tokens`` tokens of a request; the engine has counted them as free.

    ``request`` is new with each admission here and in every message of the engine with attention and prefill workers: a request
    that was preempted and comes again is another one to them.
    """

    request: int
    tokens: int
    sampling: Sampling
    seen: tuple[int, ...] = ()
    """Distinct tokens of the sequence so far; only where the sampling penalises repetition."""


@record
class Reserved:
    """Attention -> engine: the blocks."""

    request: int
    blocks: tuple[int, ...]


@record
class Release:
    """Engine -> attention: the request has ended or is preempted."""

    request: int
    quarantine: bool
    """Keep its blocks until prefill's bell."""
    late: bool
    """Somebody may still write into its blocks (prefill, or a cancelled step): say ``Freed`` when they are free."""


@record
class Freed:
    """Attention -> engine: the blocks of a late release are free."""

    request: int


@record
class KvReady:
    """Attention -> engine: prefill's blocks of this request have arrived."""

    request: int


@record
class IdsLost:
    """Attention -> engine: a disk ended what this worker records of its tokens' experts."""


# Engine <-> prefill


@record
class PrefillWork:
    """Engine -> prefill: run the sequence, write its KV into these blocks of that attention worker, sample the next token."""

    request: int
    prompt: tuple[int, ...]
    """Of a preempted request with the tokens that it has produced."""
    attention: int
    blocks: tuple[int, ...]
    sampling: Sampling


@record
class CancelPrefill:
    """Engine -> prefill: nobody wants this sequence any more. One that is done already is no mistake."""

    request: int


@record
class PrefillProgress:
    """Prefill -> engine: ``tokens`` of the sequence are done, and there are more."""

    request: int
    tokens: int


@record
class PrefillDone:
    """Prefill -> engine: the next token; nothing more will be written for this request."""

    request: int
    token: int
    logprobs: TokenLogprobs | None = None


@record
class PrefillStopped:
    """Prefill -> engine: cancelled before its end; its bell has been rung, and nothing more will be written for this request."""

    request: int


# Client <-> engine


@record
class Submit:
    """Client -> engine: a request. ``request`` is the client's own name for it."""

    request: str
    text: str
    """The prompt as text; the engine tokenizes it. Empty where ``prompt`` has the tokens."""
    prompt: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool
    sampling: Sampling
    stop: tuple[str, ...] = ()
    """The request ends before the first of these in its text."""


@record
class Cancel:
    """Client -> engine: nobody waits for this request any more."""

    request: str


@record
class TokenOut:
    """Engine -> client: the ``index``-th generated token; ``finish`` is ``stop`` or ``length`` with the last, else empty."""

    request: str
    index: int
    token: int
    finish: str
    text: str
    """What it adds to the text; empty within a character or a possible stop string, and for a model without a tokenizer."""
    logprobs: TokenLogprobs | None = None
    """Where the request asked for them."""

    @property
    def plain(self) -> bool:
        """Whether it can travel with others (``TokensOut``)."""
        return not self.finish and self.logprobs is None


@record
class TokensOut:
    """Engine -> client: tokens of many requests, as ``TokenOut`` without end and log-probabilities, in the order of the columns."""

    requests: tuple[str, ...]
    indices: tuple[int, ...]
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    """None at all where all are empty."""

    def __post_init__(self) -> None:
        count = len(self.requests)
        if not count == len(self.indices) == len(self.tokens) or len(self.texts) not in (0, count):
            raise ValueError(f"{count} requests have {len(self.indices)} indices, {len(self.tokens)} tokens")

    @classmethod
    def of(cls, tokens: Sequence[TokenOut]) -> TokensOut:
        """These tokens together; each must be ``plain``."""
        texts = tuple([token.text for token in tokens])
        return cls(
            tuple([token.request for token in tokens]),
            tuple([token.index for token in tokens]),
            tuple([token.token for token in tokens]),
            texts if any(texts) else (),
        )

    def each(self) -> Iterator[TokenOut]:
        """One by one."""
        texts = self.texts or ("",) * len(self.requests)
        for request, index, token, text in zip(self.requests, self.indices, self.tokens, texts, strict=True):
            yield TokenOut(request, index, token, "", text)


@record
class Finished:
    """Engine -> client: the request has ended well. ``reason`` is ``stop`` or ``length``."""

    request: str
    reason: str
    prompt_tokens: int
    generated_tokens: int


@record
class Failed:
    """Engine -> client: the request ended without all of its tokens. ``kind`` is the error's class name."""

    request: str
    kind: str
    problem: str
    remedy: str


@record
class Status:
    """Hub -> client: what is up and what is missing; sent on every change."""

    serving: bool
    missing: tuple[str, ...]
    lost: str
    """``role-rank: reason`` of the role whose death ended the epoch; empty while all is well."""
    tensors_loaded: int
    tensors_total: int
    url: str = ""
    """Where the door listens for HTTP; empty where it does not."""
    absent: tuple[str, ...] = ()
    """Those of the missing that have not even joined."""


@record
class StatsRequest:
    """Client -> hub -> scheduler and engine: send your statistics."""

    ticket: int


@record
class Stats:
    """The answer: JSON, the keys of ``--json``."""

    ticket: int
    payload: str


@record
class Watch:
    """Client -> hub -> roles: send plans and spans as they happen (or stop)."""

    plans: bool
    spans: bool


@record
class PlanSeen:
    """Scheduler -> hub -> watching clients: one published target."""

    sequence: int
    layer: int
    microbatch: int
    step: int
    tokens: int
    copies: tuple[tuple[int, int, int], ...]
    """(expert, worker, slot)"""
    replicas: int
    """Redundant replicas with work."""
    max_tiles_before: int
    """Load of the most loaded worker: tiles where all are equally fast, else 1/load_unit of a tile of the fastest."""
    max_tiles_after: int
    bound_tiles: int
    load_unit: int
    token_imbalance_before: float
    token_imbalance_after: float
    skipped: str
    """Why there are no copies; empty when there are."""


@record
class SpansSeen:
    """Role -> hub -> watching clients: a batch of spans, one JSON document each."""

    process: str
    spans: tuple[str, ...]


Message = (
    Join
    | Loading
    | Loaded
    | Regions
    | Linked
    | Failure
    | Welcome
    | Refused
    | OpenEpoch
    | DirectoryMessage
    | Serve
    | Stop
    | Announce
    | StepAborted
    | StepWork
    | StepDone
    | CancelStep
    | Reserve
    | Reserved
    | Release
    | Freed
    | KvReady
    | IdsLost
    | PrefillWork
    | CancelPrefill
    | PrefillProgress
    | PrefillDone
    | PrefillStopped
    | Submit
    | Cancel
    | TokenOut
    | TokensOut
    | Finished
    | Failed
    | Status
    | StatsRequest
    | Stats
    | Watch
    | PlanSeen
    | SpansSeen
)
"""Everything a channel may carry."""
