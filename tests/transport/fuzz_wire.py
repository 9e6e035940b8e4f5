"""What comes over sockets and in control messages, fed with anything. A surface is called once a case; true: it accepted."""

from __future__ import annotations

import asyncio
import random
import socket
import struct

import msgpack

from afore.core import control
from afore.core.config import RunConfig
from afore.core.errors import AforeError, TransportError, WireError
from afore.core.messages import from_wire, to_wire
from afore.transport import records
from afore.transport.api import RegionKey
from afore.transport.codec import decode_message, encode_message
from afore.transport.handshake import MAGIC, Identity, Purpose, parse_preamble, receive_hello
from afore.transport.tcp_frames import FrameReader, NewsReader
from afore.transport.tcp_keys import new_key, require_genuine
from tests.transport.mutations import mutate

LIMIT = 1 << 16
"""Bytes of a message."""


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
