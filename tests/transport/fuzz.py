"""Random and mutated bytes at every place where AFORE reads what others wrote. Seeded: a case can be run again.

    python -m tests.transport.fuzz --cases 1000000

Control messages, handshakes, keys, segment headers, frames, the rings of immediates, mailbox, plan ring, feedback. What must hold
of each: no other exception than the typed ones; what is accepted is what a writer could have written; no more memory than a limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import resource
import socket
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgpack
import numpy as np

from afore.core import control
from afore.core.config import RunConfig
from afore.core.errors import AforeError, TransportError, WireError
from afore.core.messages import from_wire, to_wire
from afore.core.plan import Copy, CopyStart, EntryKind, PlanEntry, Share
from afore.core.target import Phase, Target
from afore.transport import records, shm_ring, snapshot
from afore.transport.api import RegionKey
from afore.transport.codec import decode_message, encode_message
from afore.transport.entry import EntryCodec, Refusal
from afore.transport.feedback import FeedbackLayout, FeedbackReader, FeedbackRecord, FeedbackWriter
from afore.transport.handshake import MAGIC, Identity, Purpose, parse_preamble, receive_hello
from afore.transport.mailbox import Mailbox, MailboxLayout, pack_demand
from afore.transport.ring import RingReader, RingWriter
from afore.transport.ring_layout import RingLayout
from afore.transport.shm_segments import HEADER_BYTES, read_header, write_header
from afore.transport.tcp_frames import FrameReader, NewsReader
from afore.transport.tcp_keys import new_key, require_genuine

EPOCH = 3
LIMIT = 1 << 16
"""Bytes of a message."""
MEMORY_LIMIT = 1 << 30
"""Bytes that the whole loop may take beyond what it began with."""
INTERESTING = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


def mutate(chance: random.Random, raw: bytes) -> bytes:
    """``raw`` changed a little: bits, bytes, words, pieces cut out, doubled or put in; or all of it random."""
    data = bytearray(raw)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        kind = chance.randrange(7)
        at = chance.randrange(len(data)) if data else 0
        if not data or kind == 0:
            data[at:at] = chance.randbytes(chance.randrange(1, 20))
        elif kind == 1:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            data[at] = chance.randrange(256)
        elif kind == 3:
            size = chance.choice((1, 2, 4, 8))
            value = chance.choice(INTERESTING) & ((1 << 8 * size) - 1)
            data[at : at + size] = value.to_bytes(size, chance.choice(("little", "big")))
        elif kind == 4:
            del data[at : at + chance.randrange(1, 20)]
        elif kind == 5:
            data[at:at] = data[at : at + chance.randrange(1, 40)]
        else:
            end = min(len(data), at + chance.randrange(1, 40))
            data[at:end] = chance.randbytes(end - at)
    return bytes(data)


def mutate_in_place(chance: random.Random, memory: memoryview) -> None:
    """As ``mutate``, in memory of a fixed size: where a region lies, nothing moves."""
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(memory))
        kind = chance.randrange(4)
        if kind == 0:
            memory[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            raw = (chance.choice(INTERESTING)).to_bytes(8, "little")[: len(memory) - at]
            memory[at : at + len(raw)] = raw
        elif kind == 2:
            size = min(chance.randrange(1, 64), len(memory) - at)
            memory[at : at + size] = chance.randbytes(size)
        else:
            size = min(chance.randrange(1, 64), len(memory) - at)
            memory[at : at + size] = bytes(size)


class Messages:
    """Control messages: bytes to maps to messages."""

    def __init__(self) -> None:
        config = RunConfig(model="m")
        self._corpus = [
            encode_message(to_wire(message), limit=LIMIT, peer="p")
            for message in (
                control.Join("ffn", 3, 17, "tcp:1"),
                control.Loading(1, 2),
                control.Loaded(123),
                control.Regions(1, (control.LabelledKey("ring", "shm", "a", 1, 64, "t"),)),
                control.Linked(4),
                control.Welcome("ffn", 1, config),
                control.Refused("no", "go away"),
                control.Watch(plans=True, spans=False),
                control.Stop("over"),
            )
        ]

    def __call__(self, chance: random.Random) -> bool:
        body = mutate(chance, chance.choice(self._corpus)) if chance.random() < 0.9 else chance.randbytes(40)
        try:
            data = decode_message(body, limit=LIMIT, peer="p")
        except WireError:
            return False
        again = decode_message(encode_message(data, limit=2 * LIMIT, peer="p"), limit=2 * LIMIT, peer="p")
        assert msgpack.packb(again) == msgpack.packb(data)
        try:
            message = from_wire(data)
        except (WireError, AforeError):
            return False
        assert to_wire(from_wire(to_wire(message))) == to_wire(message) or "nan" in repr(message)
        return True


class Preambles:
    """The first bytes of a connection."""

    def __call__(self, chance: random.Random) -> bool:
        raw = mutate(chance, MAGIC + struct.pack("<HBBHH", 4, 1, 2, 0, 64))[:16].ljust(16, b"\0")
        try:
            said = parse_preamble(raw, "p")
        except WireError:
            assert not raw.startswith(MAGIC)
            return False
        assert raw.startswith(MAGIC)
        assert 0 <= said.nbytes < 1 << 16
        return True


class Hellos:
    """Clients that do not know the secret, at a door: none is let in, whatever it says."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._me = Identity(address="door", secret=b"what no client knows here")
        body = bytes(32) + b"client"
        self._said = MAGIC + struct.pack("<HBBHH", self._me.version, 2, 2, 0, len(body)) + body
        self._proof = MAGIC + struct.pack("<HBBHH", self._me.version, 2, 2, 0, 32) + bytes(32)

    def __call__(self, chance: random.Random) -> bool:
        said = mutate(chance, self._said) if chance.random() < 0.5 else self._said
        said += mutate(chance, self._proof) if chance.random() < 0.5 else self._proof
        near, far = socket.socketpair()
        with near, far:
            far.setblocking(False)
            near.sendall(said)
            near.shutdown(socket.SHUT_WR)
            try:
                self._loop.run_until_complete(receive_hello(far, self._me, frozenset(Purpose), peer="client"))
            except TransportError:
                return False
        raise AssertionError("a client without the secret was let in")

    def close(self) -> None:
        """Ends its event loop."""
        self._loop.close()


class Keys:
    """Keys of regions, as they come in control messages."""

    def __init__(self) -> None:
        self._genuine = new_key(b"secret", "a:1", 7, 4096)[0]

    def __call__(self, chance: random.Random) -> bool:
        key = self._genuine
        forged = RegionKey(
            chance.choice(("tcp", "tcp", "shm")),
            chance.choice(("a:1", "a:1", "b:1")),
            chance.choice((7, 7, 8, -1, 1 << 40)),
            chance.choice((4096, 4096, 4097, 1 << 60, -1)),
            mutate(chance, key.token.encode()).decode("latin-1") if chance.random() < 0.5 else key.token,
        )
        try:
            require_genuine(b"secret", forged, "a:1")
        except TransportError:
            return False
        assert forged == key, "a forged key was taken for genuine"
        return True


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


class _Ground:
    """Regions between guards, for frames to land in."""

    nbytes = 300

    def __init__(self) -> None:
        self.storage = bytearray(b"\xa5" * 900)
        self.target = memoryview(self.storage)[300:600]
        self.told_regions: list[int] = []

    def find(self, region: int, token: int) -> memoryview | None:
        return self.target if (region, token) == (1, 77) else None

    def told(self, region: int, immediate: int) -> None:
        self.told_regions.append(region)
        assert 0 <= immediate < 1 << 32

    def dropped(self) -> None:
        pass

    def asked(self, memory: memoryview | None, request: int) -> None:
        assert memory is None or len(memory) <= self.nbytes
        assert 0 <= request < 1 << 32


class Frames:
    """What a writer sends, in pieces."""

    def __call__(self, chance: random.Random) -> bool:
        stream = b""
        for _ in range(chance.randrange(1, 4)):
            payload = chance.randbytes(chance.choice((0, 8, 100)))
            stream += records.FRAME.pack(records.FRAME_MAGIC, chance.randrange(3), 1, 5, 77, 10, len(payload)) + payload
        stream = mutate(chance, stream)
        ground = _Ground()
        reader = FrameReader("p", ground)
        try:
            while stream:
                room = reader.room()
                assert 0 < len(room) <= 1 << 16
                size = min(len(room), len(stream), chance.choice((1, 7, 40, 1000)))
                room[:size] = stream[:size]
                reader.received(size)
                stream = stream[size:]
        except WireError:
            return False
        finally:
            assert ground.storage[:300] == ground.storage[600:] == b"\xa5" * 300, "a write left its region"
            assert set(ground.told_regions) <= {1}
        return True


class _Ear:
    def __init__(self) -> None:
        self.room = bytearray(20)

    def credit(self, count: int) -> None:
        assert 0 <= count < 1 << 64

    def revoked(self, token: int) -> None:
        assert 0 <= token < 1 << 64

    def answered(self, request: int) -> memoryview | None:
        return memoryview(self.room) if request == 5 else None

    def wanted(self) -> int:
        return len(self.room)

    def filled(self) -> None:
        pass

    def unread(self, request: int) -> None:
        assert 0 <= request < 1 << 64


class News:
    """What an owner tells."""

    def __call__(self, chance: random.Random) -> bool:
        stream = mutate(chance, records.NEWS.pack(records.NEWS_MAGIC, chance.randrange(1, 5), 5) * 2)
        reader = NewsReader("p", _Ear())
        try:
            for at in range(0, len(stream), 7):
                reader.received(stream[at : at + 7])
        except WireError:
            return False
        return True


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
                reader.give_credit(len(entries))
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


SURFACES: dict[str, Callable[[], Callable[[random.Random], bool]]] = {
    "messages": Messages,
    "preambles": Preambles,
    "hellos": Hellos,
    "keys": Keys,
    "headers": Headers,
    "frames": Frames,
    "news": News,
    "immediates": Immediates,
    "mailbox": Vectors,
    "ring": Entries,
    "feedback": Reports,
}


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    cases: Counter[str]
    accepted: Counter[str]
    seconds: float
    grown_bytes: int


def run(cases: int, seed: int, only: str | None = None) -> Outcome:
    """Runs ``cases`` cases, the surfaces in turn. Raises what a case raises, which names its surface, seed and number."""
    with contextlib.ExitStack() as stack:
        surfaces = {name: make() for name, make in SURFACES.items() if only in (None, name)}
        for surface in surfaces.values():
            if isinstance(surface, Hellos | Immediates):
                stack.callback(surface.close)
        return _run(surfaces, cases, seed)


def _run(surfaces: dict[str, Callable[[random.Random], bool]], cases: int, seed: int) -> Outcome:
    names = list(surfaces)
    done: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    before = _resident_bytes()
    start = time.perf_counter()
    for number in range(cases):
        name = names[number % len(names)]
        chance = random.Random(f"{seed}/{number}")
        try:
            accepted[name] += surfaces[name](chance)
        except BaseException as error:
            error.add_note(f"surface {name!r}, seed {seed}, case {number}")
            raise
        done[name] += 1
    grown = _resident_bytes() - before
    assert grown < MEMORY_LIMIT, f"memory grew by {grown:,} bytes"
    return Outcome(done, accepted, time.perf_counter() - start, grown)


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Feed random and mutated bytes to everything that reads them.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=SURFACES)
    options = parser.parse_args()
    # A length that is believed before it is checked ends in a MemoryError here, and not in a slow machine.
    size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_LIMIT, resource.RLIM_INFINITY))
    outcome = run(options.cases, options.seed, options.only)
    rate = options.cases / outcome.seconds
    sys.stdout.write(
        f"{options.cases:,} cases in {outcome.seconds:.1f} s ({rate:,.0f}/s); peak memory grew by "
        f"{outcome.grown_bytes / 1e6:.1f} MB\n"
    )
    for name, count in outcome.cases.items():
        sys.stdout.write(f"  {name:<11} {count:>9,} cases, {outcome.accepted[name]:>9,} accepted and right\n")


if __name__ == "__main__":
    main()
