"""``top``'s links: found in real segments, counted between two looks, and shown in 80 columns with every number whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from afore.core.plan import CopyStart, EntryKind, PlanEntry, Verdict
from afore.core.target import Phase, Target
from afore.tools.exchange_slots import find_shape
from afore.tools.top_link_view import link_figures, link_table
from afore.tools.top_links import Link, LinkReader, Seen
from afore.tools.top_sample import Sample
from afore.transport.exchange import ExchangeLayout, InputSlots, pack_reply
from afore.transport.input_mirror import InputMirror, InputPacker, MirrorLayout
from afore.transport.mailbox import Mailbox, MailboxLayout, pack_demand
from afore.transport.ring import RingReader, RingWriter
from afore.transport.ring_layout import RingLayout
from afore.transport.shm_segments import HEADER_BYTES, Segment

RING = RingLayout(num_readers=2, num_slots=4, num_attention=2, max_shares=4, max_copies=2)
MAILBOX = MailboxLayout(num_attention=2, num_microbatches=2, num_experts=5)
EXCHANGE = ExchangeLayout(num_microbatches=2, num_ffn=2, max_tokens=4, hidden=24, top_k=2)
MIRROR = MirrorLayout(2, EXCHANGE)
EPOCH = 11
HERE = ("scheduler-0", "attention-0", "ffn-0", "ffn-1")


class Running:
    """The memory of a scheduler, of attention-0 and of the lead of the FFN workers; attention-1 is on another node."""

    def __init__(self, root: Path) -> None:
        def segment(label: str, nbytes: int) -> Segment:
            return Segment(str(root), "one", label=label, region=len(label), nbytes=nbytes, address="somewhere")

        self.segments = {
            "ring": segment("ring", RING.nbytes),
            "mailbox": segment("mailbox", MAILBOX.nbytes),
            "exchange": segment("attention-0-exchange", EXCHANGE.nbytes),
            "inputs": segment("ffn-0-inputs", MIRROR.nbytes),
        }
        self.ring = RingWriter(self.segments["ring"].view, RING, EPOCH)
        self.readers = [RingReader(self.segments["ring"].view, RING, rank, EPOCH) for rank in range(2)]
        self.mailbox = Mailbox(self.segments["mailbox"].view, MAILBOX, EPOCH)
        self.inputs = InputSlots(self.segments["exchange"].view, EXCHANGE, EPOCH)

    def put(self, region: str, offset: int, data: bytes | memoryview) -> None:
        self.segments[region].view[offset : offset + len(data)] = data

    def demand(self, attention: int, target: Target) -> None:
        vector = pack_demand(EPOCH, target, attention, Phase.DECODE, np.ones(5, np.int32))
        self.put("mailbox", MAILBOX.offset(attention, target.microbatch), vector)

    def plan(self, sequence: int, target: Target) -> None:
        self.ring.publish(
            PlanEntry(
                kind=EntryKind.PLAN, epoch=EPOCH, sequence=sequence, target=target, phase=Phase.DECODE, tokens_A=(3, 4),
                demand_crc=7, shares=(), copies=(), start=CopyStart.NOW, cancels=-1,
            )
        )  # fmt: skip

    def reply(self, worker: int, target: Target) -> None:
        reply = pack_reply(EXCHANGE, target, worker, EPOCH, np.ones((3, 24), np.float32))
        self.put("exchange", EXCHANGE.reply_offset(target.microbatch, worker), reply)

    def close(self) -> None:
        del self.ring, self.readers, self.mailbox, self.inputs
        for segment in self.segments.values():
            segment.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    cluster = Running(tmp_path)
    yield cluster
    cluster.close()


def look(root: Path, reader: LinkReader | None = None) -> dict[str, Link]:
    seen = (reader or LinkReader(root / "afore-one")).look(serving=True, here=HERE)
    return {f"{link.source} {link.sink}": link for link in seen.links}


def test_what_waits_is_what_nobody_has_answered(running: Running, tmp_path: Path) -> None:
    first, second = Target(0, 0, 5), Target(1, 0, 5)
    reader = LinkReader(tmp_path / "afore-one")
    running.demand(0, first)
    found = look(tmp_path, reader)
    assert (found["attention-0 scheduler"].waiting, found["attention-0 scheduler"].waits) == ((first,), 1)
    assert (found["attention-1 scheduler"].targets, found["attention-1 scheduler"].waits) == ((None, None), 0)
    running.plan(0, first)
    running.inputs.publish(first, 3)
    found = look(tmp_path, reader)
    assert found["attention-0 scheduler"].waits == 0, "planned, so taken"
    assert [found[f"scheduler ffn-{w}"].waits for w in range(2)] == [1, 1]
    assert found["attention-0 ffn"].targets is None, "no shape is known before replies are there"
    running.readers[1].store_verdict(0, Verdict.ACCEPTED)
    running.readers[1].advance(77)
    for worker in range(2):
        running.reply(worker, first)
    found = look(tmp_path, reader)
    assert [found[f"scheduler ffn-{w}"].waits for w in range(2)] == [1, 0]
    assert (found["scheduler ffn-1"].seen_ns, found["scheduler ffn-1"].written) == (77, 1)
    assert (found["attention-0 ffn"].targets, found["attention-0 ffn"].waits) == ((first, None), 0)
    running.inputs.publish(second, 3)
    running.reply(1, second)
    found = look(tmp_path, reader)
    assert (found["attention-0 ffn"].waiting, found["attention-0 ffn"].waits) == ((second,), 1)
    assert [found[f"ffn-{w} attention-0"].waits for w in range(2)] == [1, 0]
    assert [found[f"ffn-{w} attention-0"].targets for w in range(2)] == [(first, None), (second, None)]


def test_what_is_on_another_node_is_said(running: Running, tmp_path: Path) -> None:
    found = look(tmp_path)
    assert found["attention-1 ffn"].elsewhere == found["ffn-1 attention-1"].elsewhere == "attention-1"
    assert found["attention-0 ffn"].elsewhere == "", "it is here, and has not written yet"
    coming = LinkReader(tmp_path / "afore-one").look(serving=False, here=HERE)
    assert not any(link.elsewhere for link in coming.links), "it may yet come up here"
    target = Target(2, 1, 9)
    row = (np.ones((1, 24), np.float32), np.ones((1, 2), np.int32), np.ones((1, 2), np.float32))
    running.put("inputs", MIRROR.write_offset(1, 1), InputPacker(MIRROR, EPOCH).pack(target, *row))
    InputMirror(running.segments["inputs"].view, MIRROR, EPOCH).publish(1, 1)
    link = look(tmp_path)["attention-1 ffn"]
    assert (link.targets, link.waits, link.elsewhere) == ((None, target), None, "")


def test_what_cannot_be_read_is_unknown_and_nothing_waits_for_it(running: Running, tmp_path: Path) -> None:
    for name in ("mailbox", "exchange"):
        path = tmp_path / running.segments[name].name
        path.unlink()
        os.mkfifo(path)  # opening it would wait for ever
    found = look(tmp_path)
    assert [found[f"attention-0 {sink}"].targets for sink in ("scheduler", "ffn")] == [None, None]
    assert found["scheduler ffn-0"].waits == 0
    shown = link_figures(sample(0), sample(1, found.values()))
    assert [link["last"] for link in shown] == [None] * len(found)
    (tmp_path / running.segments["ring"].name).write_bytes(b"nothing of the kind")
    assert look(tmp_path) == {}


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(1, 4), st.integers(1, 40), st.integers(0, 3)
)  # fmt: skip
def test_the_shape_of_an_exchange_is_found_from_its_replies(
    num_microbatches: int, num_ffn: int, max_tokens: int, top_k: int, times: int, more: int
) -> None:
    layout = ExchangeLayout(num_microbatches, num_ffn, max_tokens, 4 * top_k * times + more, top_k)
    target = Target(1, 0, 3)
    with tempfile.TemporaryFile() as file:
        file.truncate(HEADER_BYTES + layout.nbytes)
        region = memoryview(bytearray(layout.nbytes))
        InputSlots(region, layout, EPOCH).publish(target, 1)
        for worker in range(num_ffn):
            reply = pack_reply(layout, target, worker, EPOCH, np.ones((1, layout.hidden), np.float32))
            at = layout.reply_offset(0, worker)
            region[at : at + len(reply)] = reply
        file.seek(HEADER_BYTES)
        file.write(region)
        file.flush()
        shape = find_shape(file, layout.nbytes, num_microbatches, num_ffn, EPOCH)
        foreign = find_shape(file, layout.nbytes, num_microbatches, num_ffn, EPOCH + 1)
    assert shape is not None
    assert (shape.input_nbytes, shape.reply_nbytes) == (layout.input_nbytes, layout.reply_nbytes)
    assert foreign is None


def sample(at_ns: int, links: Any = (), ring: Any = None) -> Sample:
    return Sample(
        at_ns=at_ns, looked_ns=at_ns, serving=True, missing=(), lost="", url="", stats={"layers": [{}] * 3}, requests={},
        seen=Seen(ring, tuple(links)), processes=(),
    )  # fmt: skip


@given(st.integers(0, 1000), st.integers(0, 2), st.integers(0, 300))
def test_writes_are_the_targets_between_two_looks(step: int, layer: int, more: int) -> None:
    def link(count: int) -> Link:
        return Link(
            carries="inputs", source="attention-0", sink="ffn", targets=(Target(count % 3, 0, count // 3), None)
        )

    with tempfile.TemporaryDirectory() as root:
        running = Running(Path(root))
        ring = LinkReader(Path(root) / "afore-one").look(serving=True, here=HERE).ring
        running.close()
    begun = 3 * step + layer
    before, after = sample(0, [link(begun)], ring), sample(2 * 10**9, [link(begun + more)], ring)
    assert link_figures(before, after)[0]["writes_per_second"] == more / 2
    assert link_figures(sample(0), after)[0]["writes_per_second"] is None


def test_eighty_columns_show_every_number_whole() -> None:
    late = Target(60, 31, 123_456)
    links = [
        Link(carries="demand", source="attention-15", sink="scheduler", targets=(late,), waiting=(late,), waits=31),
        Link(carries="plans", source="scheduler", sink="ffn-127", targets=(late,), waits=12_345, seen_ns=1),
        *(
            Link(carries="replies", source=f"ffn-{w}", sink=f"attention-{a}", targets=(late,), waiting=(late,), waits=7)
            for w in range(127, 129)
            for a in range(9)
        ),
        Link(carries="inputs", source="attention-7", sink="ffn", elsewhere="attention-7"),
    ]
    figures = [{**one, "writes_per_second": 12_345.6} for one in link_figures(sample(0), sample(999_900_001, links))]
    console = Console(record=True, width=80, highlight=False)
    console.print(link_table(figures))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    assert "on another node" in text
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert [row for row in rows if row[1:] == [str(late), "waiting", "31", "12,345.6"]]
    assert [row for row in rows if row[1:] == [str(late), "999.9 ms ago", "12,345", "12,345.6"]]
    assert len([row for row in rows if row[1:] == [str(late), "missing", "63", "111,110.4"]]) == 2, "a row a worker"
