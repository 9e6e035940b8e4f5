"""``inspect regions`` and ``inspect inputs``: what is registered and who may write there; what a node's copy of inputs holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.tools.hexdump import fields
from afore.tools.printable import printable
from afore.tools.segments import MIRROR, Listed
from afore.transport.records import CACHE_LINE, INPUT_HEADER, MIRROR_HEADER

WRITERS = {
    "mailbox": "attention workers: demand vectors",
    "predictions": "attention workers: predicted demand vectors",
    "feedback": "ffn workers: what targets cost",
    "bells": "scheduler, attention and ffn workers: notifications alone",
    "exchange": "its owner: inputs; ffn workers: replies",
    "inputs": "attention workers of other nodes",
    "kv": "prefill workers: blocks of prompts",
    "experts": "its owner; ffn workers read",
}
"""By the last word of a label."""


def writers(listed: Listed) -> str:
    """Who writes into a region, by its label; empty where nothing says it."""
    label = listed.header.label
    if label.rpartition("-")[2] == "ring":
        mirror = MIRROR.fullmatch(label) is not None
        return "scheduler: entries; ffn workers: verdicts" if mirror else "its owner: entries; ffn workers: verdicts"
    return WRITERS.get(label.rpartition("-")[2], "")


def region_lines(listed: Sequence[Listed]) -> Iterator[str]:
    """A line for each region, by run and owner."""
    yield f"{'run':<14}{'fabric':<9}{'owner':<14}{'pid':>8}  {'state':<8}{'region':>6}{'bytes':>14}  {'label':<22}written by"
    for one in listed:
        header = one.header
        yield (
            f"{one.run or '-':<14}{one.fabric:<9}{printable(one.member):<14}{header.pid:>8}  {_state(one):<8}"
            f"{header.region:>6}{header.nbytes:>14,}  {printable(header.label):<22}{writers(one)}"
        )
    dead = sum(not one.alive for one in listed)
    total = sum(one.header.nbytes for one in listed)
    yield f"{len(listed)} regions, {total:,} bytes" + (f"; {dead} of dead processes" if dead else "")


def _state(listed: Listed) -> str:
    return "gone" if not listed.alive else "revoked" if listed.revoked else "alive"


def region_json(listed: Sequence[Listed]) -> dict[str, object]:
    """The same for programs."""
    return {
        "regions": [
            {
                "path": one.path,
                "run": one.run,
                "fabric": one.fabric,
                "owner": one.member,
                "pid": one.header.pid,
                "alive": one.alive,
                "revoked": one.revoked,
                "region": one.header.region,
                "nbytes": one.header.nbytes,
                "label": one.header.label,
                "address": one.header.address,
                "writers": writers(one),
            }
            for one in listed
        ]
    }


@dataclass(frozen=True, slots=True)
class InputSlot:
    """One slot of a node's copy of the inputs: what its readers see, and what was written last."""

    attention: int
    microbatch: int
    at: int
    published: Target | None
    written: Target | None
    epoch: int
    tokens: int

    @property
    def landing(self) -> bool:
        """Whether something was written that the lead has not published: its notification is under way, or lost."""
        return self.written != self.published


def input_slots(region: bytes, num_attention: int, num_microbatches: int) -> list[InputSlot]:
    """Reads a copy of an ``inputs`` region. Raises ``ConfigError`` where A and M do not divide it."""
    count = num_attention * num_microbatches
    if count < 1 or len(region) % count or (len(region) // count) % CACHE_LINE:
        problem = f"{len(region):,} bytes are not {num_attention} × {num_microbatches} slots"
        raise ConfigError("inputs", problem, "give the cluster's --attention and --microbatches")
    size = len(region) // count
    slots = []
    for index in range(count):
        at = index * size
        published, _, _ = INPUT_HEADER.unpack_from(region, at)
        _, written, epoch, tokens, _ = MIRROR_HEADER.unpack_from(region, at + CACHE_LINE)
        slots.append(
            InputSlot(
                *divmod(index, num_microbatches), at, _target(published), _target(written), epoch, tokens
            )
        )  # fmt: skip
    return slots


def _target(word: int) -> Target | None:
    try:
        return Target.from_word(word) if word else None
    except ValueError:
        return None


def input_lines(slots: Sequence[InputSlot]) -> Iterator[str]:
    """A line for each slot."""
    yield f"{'source':<14}{'microbatch':>10}  {'published':<16}{'written':<16}{'epoch':>6}{'rows':>6}  state"
    for slot in slots:
        state = "empty" if slot.written is None else "landing" if slot.landing else "ok"
        yield (
            f"{f'attention-{slot.attention}':<14}{slot.microbatch:>10}  {slot.published or '-'!s:<16}"
            f"{slot.written or '-'!s:<16}{slot.epoch:>6}{slot.tokens:>6}  {state}"
        )


def input_json(slots: Sequence[InputSlot]) -> dict[str, object]:
    """The same for programs."""
    return {
        "slots": [
            {
                "attention": slot.attention,
                "microbatch": slot.microbatch,
                "published": None if slot.published is None else str(slot.published),
                "written": None if slot.written is None else str(slot.written),
                "epoch": slot.epoch,
                "tokens": slot.tokens,
                "landing": slot.landing,
            }
            for slot in slots
        ]
    }


def input_dump(region: bytes, slots: Sequence[InputSlot]) -> Iterator[str]:
    """Both lines of each slot, with every field named."""
    for slot in slots:
        yield f"slot attention-{slot.attention} microbatch {slot.microbatch}: published"
        yield from fields(region, slot.at, INPUT_HEADER)
        yield f"slot attention-{slot.attention} microbatch {slot.microbatch}: written"
        yield from fields(region, slot.at + CACHE_LINE, MIRROR_HEADER)
