"""What others write into memory that is read here, fed with anything. A surface is called once a case; true: it accepted."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import zlib
from dataclasses import replace

import numpy as np

from afore.core.errors import TransportError, WireError
from afore.core.plan import Copy, CopyStart, EntryKind, PlanEntry, Share
from afore.core.target import Phase, Target
from afore.transport import records, shm_ring, snapshot
from afore.transport.entry import EntryCodec, Refusal
from afore.transport.exchange import ExchangeLayout, InputReader, InputSlots, Replies, pack_reply
from afore.transport.feedback import FeedbackLayout, FeedbackReader, FeedbackRecord, FeedbackWriter
from afore.transport.input_mirror import InputMirror, InputPacker, MirrorLayout, MirrorReader
from afore.transport.mailbox import Mailbox, MailboxLayout, pack_demand
from afore.transport.ring import RingReader, RingWriter
from afore.transport.ring_layout import RingLayout
from afore.transport.shm_segments import HEADER_BYTES, read_header, write_header
from tests.transport.mutations import INTERESTING, mutate_in_place

EPOCH = 3


class Headers:
    """Segments of shared memory, as tools and mappings read them."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(HEADER_BYTES))
        write_header(self._memory, region=3, nbytes=100, label="r", address="a")
        self._whole = bytes(self._memory)

    def __call__(self, chance: random.Random) -> bool:
        self._memory[:] = self._whole
        mutate_in_place(chance, self._memory[: 1100 if chance.random() < 0.5 else 64])
        header = read_header(self._memory[: chance.choice((HEADER_BYTES, HEADER_BYTES, 100))])
        if header is not None:
            assert len(header.label) <= 64
            assert len(header.address) <= 1024
        return header is not None


class Immediates:
    """The ring of immediates of a shm link: its reader, against a writer that stores anything."""

    slots = 8

    def __init__(self) -> None:
        self._fd = shm_ring.create_ring_fd(self.slots)

    def close(self) -> None:
        """Lets go of the ring."""
        os.close(self._fd)

    def __call__(self, chance: random.Random) -> bool:
        writer = shm_ring.RingWriter(self._fd, self.slots, "p")
        words = writer._words
        for word in (shm_ring.TAIL, shm_ring.CREDITED, shm_ring.WAITING):
            words[word] = 0
        reader = shm_ring.RingReader(self._fd, self.slots, "p")
        seen = 0
        try:
            for _ in range(4):
                if chance.random() < 0.5:
                    words[shm_ring.TAIL] = chance.choice((*INTERESTING, seen + chance.randrange(12)))
                entries = reader.drain()
                assert len(entries) <= self.slots
                seen += len(entries)
                reader.taken += len(entries)
                if reader.taken >= reader.due:
                    reader.give_credit()
        except WireError:
            return False
        finally:
            reader.close()
            writer.close()
        return True


class Vectors:
    """The demand mailbox."""

    layout = MailboxLayout(num_attention=2, num_microbatches=2, num_experts=8)
    target = Target(layer=4, microbatch=1, step=9)

    def __init__(self) -> None:
        self._counts = np.arange(8, dtype=np.int32)
        self._memory = memoryview(bytearray(self.layout.nbytes))
        self._mailbox = Mailbox(self._memory, self.layout, EPOCH)
        self._vector = pack_demand(EPOCH, self.target, 1, Phase.DECODE, self._counts)

    def __call__(self, chance: random.Random) -> bool:
        at = self.layout.offset(1, 1)
        slot = self._memory[at : at + len(self._vector)]
        slot[:] = self._vector
        mutate_in_place(chance, slot)
        if chance.random() < 0.3:
            # A liar who knows how to compute a CRC.
            struct.pack_into("<I", slot, 0, zlib.crc32(slot[records.DEMAND_CRC_FROM :]))
        taken = self._mailbox.take(1, 1, self.target)
        self._mailbox.peek(1, 1, self.target)
        snapshot.mailbox_snapshot(bytes(self._memory))
        if taken is None:
            return False
        head = dict(zip(records.DEMAND_HEADER.names, records.DEMAND_HEADER.unpack_from(slot), strict=True))
        assert (head["epoch"], head["target"], head["source"]) == (EPOCH, self.target.word(), 1)
        assert head["crc"] == zlib.crc32(slot[records.DEMAND_CRC_FROM :])
        return True


class Entries:
    """The plan ring, read in place and looked at by tools."""

    layout = RingLayout(
        num_readers=2, num_slots=4, num_attention=2, max_shares=4, max_copies=2, num_experts=16, num_redundant=2
    )

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(self.layout.nbytes))
        self._writer = RingWriter(self._memory, self.layout, EPOCH, pid=1)
        self._reader = RingReader(self._memory, self.layout, 0, EPOCH)
        self._codec = EntryCodec(self.layout.limits)
        self._entry = PlanEntry(
            kind=EntryKind.PLAN,
            epoch=EPOCH,
            sequence=0,
            target=Target(layer=1, microbatch=0, step=0),
            phase=Phase.DECODE,
            tokens_A=(5, 0),
            demand_crc=0xDEADBEEF,
            shares=(Share(3, 1, 0, 4, 0), Share(9, 0, 1, 7, -1)),
            copies=(Copy(1, 3, 1, 0),),
            start=CopyStart.ARRIVAL,
            cancels=-1,
        )
        self._writer.publish(self._entry, stamp_ns=0)
        self._whole = bytes(self._memory)

    def __call__(self, chance: random.Random) -> bool:
        memory = self._memory
        memory[:] = self._whole
        begin = self.layout.entry_offset(0)
        used = len(self._codec.encode(self._entry))
        if chance.random() < 0.7:
            mutate_in_place(chance, memory[begin : begin + used])
        else:
            mutate_in_place(chance, memory[self.layout.slot_offset(0) :])
        if chance.random() < 0.5:
            self._seal(memory[begin : begin + self.layout.entry_nbytes])
        with contextlib.suppress(TransportError):
            snapshot.ring_snapshot(bytes(memory))
        found = self._reader.peek()
        if found is None or isinstance(found, Refusal):
            return False
        # What a reader accepts is what a writer may publish.
        assert (found.epoch, found.sequence) == (EPOCH, 0)
        self._codec.encode(found)
        return True

    def _seal(self, raw: memoryview) -> None:
        """A liar who computes both CRCs."""
        codec = self._codec
        head = dict(zip(records.ENTRY_HEADER.names, records.ENTRY_HEADER.unpack_from(raw), strict=True))
        if head["num_copies"] <= self.layout.max_copies and head["num_shares"] <= self.layout.max_shares:
            body = codec._body_crc(raw, head["num_copies"], head["num_shares"])
            struct.pack_into("<I", raw, records.ENTRY_HEADER.offsets["body_crc"], body)
        codec._seal_header(raw)


class Reports:
    """Feedback."""

    layout = FeedbackLayout(num_workers=1)

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(self.layout.nbytes))
        writer = FeedbackWriter(self.layout, 0)
        report = FeedbackRecord(epoch=EPOCH, sequence=0, worker=0, target=Target(1, 0, 0), tile_us=1.5)
        for sequence in range(3):
            offset, data = writer.next(replace(report, sequence=sequence))
            self._memory[offset : offset + len(data)] = data
        self._whole = bytes(self._memory)

    def __call__(self, chance: random.Random) -> bool:
        self._memory[:] = self._whole
        for number in range(1, 4):
            at = self.layout.offset(0, number)
            record = self._memory[at : at + records.FEEDBACK.nbytes]
            if chance.random() < 0.7:
                mutate_in_place(chance, record)
            if chance.random() < 0.5:
                struct.pack_into("<I", record, 0, zlib.crc32(record[records.FEEDBACK_CRC_FROM :]))
        reader = FeedbackReader(self._memory, self.layout, EPOCH)
        taken = reader.take_all()
        assert len(taken) <= self.layout.depth
        assert all(one.epoch == EPOCH and one.worker == 0 for one in taken)
        return bool(taken)


class Exchanges:
    """Input and reply slots, which carry no CRC: what is read must stay inside them and be of the target that was asked for."""

    layout = ExchangeLayout(num_microbatches=2, num_ffn=2, max_tokens=3, hidden=4, top_k=2)
    target = Target(layer=4, microbatch=1, step=9)

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(self.layout.nbytes))
        rows = np.ones((2, 4), dtype=np.float32)
        slots = InputSlots(self._memory, self.layout, EPOCH)
        slots.write(self.target, rows, np.ones((2, 2), dtype=np.int32), np.ones((2, 2), dtype=np.float32))
        reply = pack_reply(self.layout, self.target, 1, EPOCH, rows)
        at = self.layout.reply_offset(1, 1)
        self._memory[at : at + len(reply)] = reply
        self._whole = bytes(self._memory)
        self._reader = InputReader(self._memory, self.layout, EPOCH)
        self._replies = Replies(self._memory, self.layout, EPOCH)

    def __call__(self, chance: random.Random) -> bool:
        self._memory[:] = self._whole
        for at, nbytes in ((self.layout.input_offset(1), 24), (self.layout.reply_offset(1, 1), 136)):
            if chance.random() < 0.7:
                mutate_in_place(chance, self._memory[at : at + nbytes])
        taken = 0
        with contextlib.suppress(WireError):
            self._reader.holds(1)
        with contextlib.suppress(WireError):
            inputs = self._reader.read(1, self.target)
            if inputs is not None:
                assert len({len(array) for array in inputs}) == 1
                assert len(inputs[0]) <= self.layout.max_tokens
                taken += 1
        with contextlib.suppress(WireError):
            reply = self._replies.take(1, 1, self.target, 2)
            if reply is not None:
                (first, count), rows = reply
                assert first + count <= 2
                assert rows.shape in ((count, 4), (0, 4))
                taken += 1
        return taken == 2


class Mirrors:
    """The input mirror of another node: what a writer put there, and the line of the lead."""

    layout = MirrorLayout(2, Exchanges.layout)
    target = Exchanges.target

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(self.layout.nbytes))
        self._lead = InputMirror(self._memory, self.layout, EPOCH)
        self._reader = MirrorReader(self._memory, self.layout, 1, EPOCH)
        rows = np.ones((2, 4), dtype=np.float32)
        packer = InputPacker(self.layout, EPOCH)
        packed = packer.pack(self.target, rows, np.ones((2, 2), np.int32), np.ones((2, 2), np.float32))
        at = self.layout.write_offset(1, 1)
        self._memory[at : at + len(packed)] = packed
        self._whole = bytes(self._memory)

    def __call__(self, chance: random.Random) -> bool:
        self._memory[:] = self._whole
        if chance.random() < 0.7:
            at = self.layout.write_offset(1, 1)
            mutate_in_place(chance, self._memory[at : at + 64])
        inputs = None
        with contextlib.suppress(WireError):
            self._lead.publish(chance.choice((1, 1, 0, 7, -1)), chance.choice((1, 1, 1, 9)))
            if chance.random() < 0.3:
                at = self.layout.offset(1, 1)
                mutate_in_place(chance, self._memory[at : at + 32])
            self._reader.holds(1)
            inputs = self._reader.read(1, self.target)
        if inputs is None:
            return False
        assert len({len(array) for array in inputs}) == 1
        assert len(inputs[0]) <= Exchanges.layout.max_tokens
        return True
