"""Recording and replay: what a scheduler is sent again makes it plan the same again, byte for byte; and bad files are refused."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import msgpack
import pytest

from afore.cluster import Cluster, Token
from afore.core.clock import WallClock
from afore.core.config import CostOptions, RunConfig
from afore.core.control import WIRE_VERSION
from afore.core.errors import ConfigError
from afore.core.topology import Topology
from afore.models.config import ModelSpec
from afore.serving.roles import RealWorld
from afore.serving.virtual import Ask, Emulation, run_emulated
from afore.tools.wire import main
from afore.tools.wire_recorded import Recorded, read_directory
from afore.tools.wire_replay import replay
from afore.transport.wire_file import WIRE_FILE_FORMAT, WireFile, WireWriter

EMULATION = Emulation()
ASKS = [Ask(prompt=tuple(range(1, 9)), max_new_tokens=5, at_us=50.0 * index) for index in range(5)]


class World:
    """The numbers of the emulated model."""

    def model_spec(self, config: RunConfig) -> ModelSpec:
        return EMULATION.spec


def record(directory: Path, policy: str, *, adapt: bool = True) -> list[list[int]]:
    config = RunConfig(
        policy=policy,
        topology=Topology(attention=2, ffn=3, redundant_slots=2),
        costs=CostOptions(adapt=adapt),
        record_wire=str(directory),
    )
    return run_emulated(config, ASKS, EMULATION).tokens


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["afore", "afore-reactive", "static", "harmoeny", "lina", "libra"])
def test_a_replayed_scheduler_plans_the_same(policy: str, tmp_path: Path) -> None:
    record(tmp_path / "run", policy)
    recorded = read_directory(tmp_path / "run")
    assert recorded.problems == []
    found = replay(recorded, World(), tmp_path / "again")
    assert found.recorded > 20
    assert found.same
    assert dict(found.entries) == recorded.entries
    again = WireFile(tmp_path / "again/scheduler-0.wire")
    assert sum(kind == "entry" for kind, *_ in again.records()) == found.recorded


@pytest.mark.slow
def test_a_run_of_real_time_is_played_back_in_its_scheduler_s_order(tmp_path: Path) -> None:
    """Costs that are learned make plans depend on which feedback had been heard, which is chance there."""
    config = RunConfig(policy="afore", record_wire=str(tmp_path / "run"))

    async def main() -> None:
        async with Cluster.start(Topology(attention=2, ffn=3), inproc=True, config=config) as cluster:
            streams = [cluster.generate([number] * 12, max_new_tokens=8, ignore_eos=True) for number in range(1, 6)]
            await asyncio.gather(*(_read(stream) for stream in streams))

    asyncio.run(main())
    found = replay(read_directory(tmp_path / "run"), RealWorld(), tmp_path / "again")
    assert found.recorded > 20
    assert found.first_difference is None
    assert found.same


async def _read(stream: AsyncIterator[Token]) -> None:
    async for _ in stream:
        pass


@pytest.mark.slow
def test_a_recording_that_lacks_something_is_never_the_same(tmp_path: Path) -> None:
    record(tmp_path / "run", "static")
    whole = read_directory(tmp_path / "run")
    own, worker = tmp_path / "run" / "scheduler-0.wire", tmp_path / "run" / "ffn-1.wire"
    kept, kept_worker = own.read_bytes(), worker.read_bytes()
    worker.unlink()
    assert read_directory(tmp_path / "run").problems == ["ffn-1 was a member, and has no file"]
    worker.write_bytes(kept_worker)
    (tmp_path / "run" / "again.wire").write_bytes(kept_worker)
    with pytest.raises(ConfigError, match=r"both of ffn-1"):
        read_directory(tmp_path / "run")
    (tmp_path / "run" / "again.wire").unlink()
    at, last = 0, 0
    while at < len(kept):
        at, last = at + 4 + struct.unpack_from("<I", kept, at)[0], at
    own.write_bytes(kept[:last])
    assert read_directory(tmp_path / "run").problems == ["scheduler-0.wire: has no end; what came last may be missing"]
    whole.entries.clear()
    assert not replay(whole, World(), tmp_path / "again").same
    for damaged in (["asked", 1], ["end", 1, 2], ["entry", 1, 2], ["message", 1]):
        body = msgpack.packb(damaged)
        own.write_bytes(kept[:last] + struct.pack("<I", len(body)) + body)
        with pytest.raises(ConfigError, match="damaged record"):
            read_directory(tmp_path / "run")


@pytest.mark.slow
def test_recording_changes_nothing_and_a_changed_vector_is_seen(tmp_path: Path) -> None:
    tokens = record(tmp_path / "run", "afore")
    plain = RunConfig(policy="afore", topology=Topology(attention=2, ffn=3, redundant_slots=2))
    assert run_emulated(plain, ASKS, EMULATION).tokens == tokens
    recorded = read_directory(tmp_path / "run")
    first = next(iter(recorded.vectors))
    recorded.vectors[first].pop()  # a vector that never came
    found = replay(recorded, World(), tmp_path / "again")
    assert not found.same
    assert found.first_difference is not None
    assert found.identical < found.recorded


@pytest.mark.slow
def test_the_command_shows_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, "static")
    assert main(["show", str(tmp_path / "scheduler-0.wire")]) == 0
    out = capsys.readouterr().out
    for word in ("receive  Welcome", "send     Regions", "region   mailbox", "entry    0", "write    demand", "end"):
        assert word in out
    assert main(["show", "--json", str(tmp_path / "attention-0.wire")]) == 0
    assert all(isinstance(json.loads(line), list) for line in capsys.readouterr().out.splitlines())
    assert (tmp_path / "scheduler-0.wire").stat().st_mode & 0o077 == 0


def test_a_recording_without_a_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="before the cluster served"):
        replay(Recorded("somewhere"), World(), tmp_path)


def test_a_file_is_bounded_and_says_what_it_lost(tmp_path: Path) -> None:
    writer = WireWriter(tmp_path / "x.wire", WallClock(), member="x-0", address="a", limit=4096)
    for number in range(100):
        writer.add("message", "out", 1, "peer", {"n": number, "pad": b"." * 100})
    writer.close()
    writer.close()
    writer.add("message", "late")
    records = list(WireFile(tmp_path / "x.wire").records())
    assert records[-1][0] == "end"
    assert records[-1][2:] == [len(records) - 1, 100 - (len(records) - 1)]
    assert (tmp_path / "x.wire").stat().st_size < 4096 + 512


def test_a_torn_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "x.wire"
    writer = WireWriter(path, WallClock(), member="x-0", address="a")
    for number in range(5):
        writer.add("entry", number, b"plan")
    writer.close()
    whole = path.read_bytes()
    borders, at = [], 0
    while at < len(whole):
        at += 4 + struct.unpack_from("<I", whole, at)[0]
        borders.append(at)
    for cut in range(borders[0], len(whole)):
        path.write_bytes(whole[:cut])
        file = WireFile(path)
        assert len(list(file.records())) == sum(border <= cut for border in borders) - 1
        assert file.torn == (cut not in borders)


DAMAGED = {
    "no kind": [1, 2],
    "no list": {"write": 1},
    "unknown kind": ["x\x1b[2J", 1],
    "message is a number": ["message", 1, "in", 1, "hub", 5],
    "message has bytes for a key": ["message", 1, "in", 1, "hub", {b"@": 1}],
    "message goes nowhere": ["message", 1, "up", 1, "hub", {}],
    "region without fields": ["region", 1, "mailbox", [{"fabric": "shm"}]],
    "region of one key": ["region", 1, "mailbox", [["shm"]]],
    "write on no lane": ["write", 1, "p", 9, "a", 1, 0, b"", 0, None],
    "write of text": ["write", 1, "p", 0, "a", 1, 0, "text", 4, None],
    "write before its region": ["write", 1, "p", 0, "a", 1, -1, b"", 0, None],
    "entry of a number": ["entry", 1, 2, 3],
    "no target": ["asked", 1, -1],
    "heard no list": ["heard", 1, 5],
    "short end": ["end", 1, 2],
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_is_one_line_whatever_is_asked(
    damaged: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scheduler-0.wire"
    writer = WireWriter(path, WallClock(), member="scheduler-0", address="a")
    writer.add("region", "mailbox", [["shm", "a", 1, 8, "t"]])
    writer.close()
    body = msgpack.packb(damaged, use_bin_type=True)
    path.write_bytes(path.read_bytes() + struct.pack("<I", len(body)) + body)
    for argv in (["show", str(path)], ["show", "--json", str(path)], ["replay", str(tmp_path)]):
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert "holds a damaged record, number 2: " in err
        assert err.rstrip("\n").isprintable()


def test_maps_with_keys_of_bytes_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = WireWriter(tmp_path / "x.wire", WallClock(), member="x", address="a")
    writer.add("message", "out", 1, "peer", {"@": "Odd", "inner": {b"\xff": [b"\x01"]}})
    writer.close()
    assert main(["show", "--json", str(tmp_path / "x.wire")]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first[5] == {"@": "Odd", "inner": {"ff": ["01"]}}


def test_names_in_a_file_cannot_lead_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        WireWriter(tmp_path / f"{name}.wire", WallClock(), member="x\x1b[2J\n", address="a").close()
    assert main(["replay", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "are both of x [2J" in err
    assert err.rstrip("\n").isprintable()


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "x.wire")
    assert main(["show", str(tmp_path / "x.wire")]) == 2
    assert main(["replay", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("cannot be read: is no regular file") == 2


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "no file of --record-wire"),
        (b"\x00\x00", "no file of --record-wire"),
        (struct.pack("<I", 1 << 31) + b"x" * 10, "no file of --record-wire"),
        (struct.pack("<I", 1) + b"\xc1", "no file of --record-wire"),
        ({"afore_wire": 9, "wire_version": WIRE_VERSION}, "format 9"),
        ({"afore_wire": WIRE_FILE_FORMAT, "wire_version": 0}, "wire version 0"),
        ({"afore_wire": WIRE_FILE_FORMAT, "wire_version": WIRE_VERSION}, "lacks 'member'"),
    ],
)
def test_what_is_no_recording_is_one_line_and_status_2(
    content: bytes | dict[str, int], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = msgpack.packb(content) if isinstance(content, dict) else b""
    path = tmp_path / "x.wire"
    path.write_bytes(content if isinstance(content, bytes) else struct.pack("<I", len(body)) + body)
    assert main(["show", str(path)]) == 2
    err = capsys.readouterr().err
    assert word in err
    assert err.count("\n") == 1
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "has no recording of scheduler-0" in capsys.readouterr().err
