"""``inspect`` on real segments: what it shows is what was written, and whatever is wrong is one line."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from afore.core.plan import Copy, CopyStart, EntryKind, PlanEntry, Share, Verdict
from afore.core.target import Phase, Target
from afore.tools.inspect import main
from afore.tools.inspect_regions import region_lines
from afore.tools.segments import regions
from afore.transport.exchange import ExchangeLayout
from afore.transport.input_mirror import InputMirror, InputPacker, MirrorLayout
from afore.transport.mailbox import Mailbox, MailboxLayout, pack_demand
from afore.transport.private_segment import PrivateSegment
from afore.transport.ring import RingReader, RingWriter
from afore.transport.ring_layout import RingLayout
from afore.transport.ring_mirror import RingMirror
from afore.transport.shm_segments import HEADER_BYTES, Segment

RING = RingLayout(num_readers=2, num_slots=4, num_attention=2, max_shares=4, max_copies=2)
MAILBOX = MailboxLayout(num_attention=2, num_microbatches=2, num_experts=5)
EPOCH = 11
NOW_NS = 5_000_000_000


def make_entry(sequence: int, kind: EntryKind = EntryKind.PLAN) -> PlanEntry:
    plain = kind is not EntryKind.PLAN
    return PlanEntry(
        kind=kind,
        epoch=EPOCH,
        sequence=sequence,
        target=Target(layer=2, microbatch=1, step=sequence),
        phase=Phase.DECODE,
        tokens_A=(3, 4),
        demand_crc=77,
        shares=() if plain else (Share(9, 1, 0, 5, sequence), Share(8, 0, 1, 2, -1)),
        copies=() if plain else (Copy(2, 9, 1, 0),),
        start=CopyStart.NOW,
        cancels=0 if kind is EntryKind.ABORT else -1,
    )


class Running:
    """Ring and mailbox of one scheduler, in segments as a cluster has them."""

    def __init__(self, root: Path, run: str) -> None:
        self.segments = [
            Segment(str(root), run, label=label, region=number, nbytes=nbytes, address="somewhere")
            for number, (label, nbytes) in enumerate(
                (("scheduler-0-ring", RING.nbytes), ("scheduler-0-mailbox", MAILBOX.nbytes))
            )
        ]
        self.ring_path, self.mailbox_path = (str(root / segment.name) for segment in self.segments)
        ring, mailbox = (segment.view for segment in self.segments)
        self.writer = RingWriter(ring, RING, EPOCH, pid=os.getpid())
        self.readers = [RingReader(ring, RING, rank, EPOCH) for rank in range(2)]
        self.writer.publish(make_entry(0), stamp_ns=NOW_NS - 3_000_000)
        self.writer.publish(make_entry(1, EntryKind.ABORT), stamp_ns=NOW_NS - 1_000_000)
        self.readers[0].store_verdict(0, Verdict.ACCEPTED)
        self.readers[0].advance(NOW_NS - 2_000_000_000)
        self.readers[1].store_verdict(0, Verdict.BINDING_DISAGREES)
        self.mailbox_memory = mailbox
        self.mailbox = Mailbox(mailbox, MAILBOX, EPOCH)
        self.put(0, 1, np.array([1, 2, 3, 0, 4], dtype=np.int32))

    def put(self, attention: int, microbatch: int, demand_E: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
        data = pack_demand(EPOCH, Target(2, microbatch, 6), attention, Phase.DECODE, demand_E)
        offset = MAILBOX.offset(attention, microbatch)
        self.mailbox_memory[offset : offset + len(data)] = data
        return offset

    def close(self) -> None:
        self.writer.release()
        for reader in self.readers:
            reader.release()
        self.mailbox.release()
        self.mailbox_memory.release()
        for segment in self.segments:
            segment.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    cluster = Running(tmp_path, "one")
    yield cluster
    cluster.close()


def run(root: Path, *argv: str) -> int:
    return main(argv, root=str(root), now_ns=NOW_NS)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("python -m afore.tools.inspect: ")
    return err


def test_the_ring_is_shown(running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "ring") == 0
    out = capsys.readouterr().out
    assert running.ring_path in out
    assert f"epoch 11, writer pid {os.getpid()} (alive), last sequence 1 (ABORT of l2/m1/s1, 1.0 ms ago)" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["ffn-0", "1", "1", "2.0", "s", "ago"] in rows
    assert ["ffn-1", "0", "2", "never"] in rows
    assert ["0", "0", "PLAN", "l2/m1/s0", "2", "1", "3.0", "ms", "ACCEPTED", "BINDING_DISAGREES"] in rows
    assert ["1", "1", "ABORT", "l2/m1/s1", "0", "0", "1.0", "ms", "NONE", "NONE", "cancels", "0"] in rows
    assert ["2", "-"] in rows


def test_the_ring_for_programs(running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "ring", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == running.ring_path
    assert (document["epoch"], document["last_sequence"]) == (EPOCH, 1)
    assert document["layout"]["num_readers"] == 2
    assert document["readers"][0] == {"rank": 0, "cursor": 1, "behind": 1, "lease_age_ns": 2_000_000_000}
    first = document["slots"][0]
    assert first["entry"]["shares"][0] == {"expert": 9, "worker": 1, "slot": 0, "count": 5, "generation": 0}
    assert first["entry"]["target"] == "l2/m1/s0"
    assert first["verdicts"] == ["ACCEPTED", "BINDING_DISAGREES"]
    assert document["slots"][3] == {
        "slot": 3,
        "sequence": None,
        "problem": "",
        "published_ns": 0,
        "verdicts": [],
        "entry": None,
    }


def test_the_mailbox_is_shown(running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torn = running.put(1, 0, np.array([9, 9, 9, 9, 9], dtype=np.int32))
    running.mailbox_memory[torn + 40] ^= 1
    assert run(tmp_path, "mailbox") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["attention-0", "1", "l2/m1/s6", "DECODE", "10", "ok"] in rows
    assert ["attention-0", "0", "-", "-", "-", "empty"] in rows
    assert ["attention-1", "0", "-", "-", "-", "torn"] in rows
    assert run(tmp_path, "mailbox", "--json") == 0
    slots = json.loads(capsys.readouterr().out)["slots"]
    assert [slot["state"] for slot in slots] == ["empty", "ok", "torn", "empty"]
    assert (slots[1]["target"], slots[1]["total"]) == ("l2/m1/s6", 10)


def test_a_torn_slot_is_shown_as_such(running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = running.segments[0].view
    entry = RING.entry_offset(0)
    ring[entry + 80] ^= 1
    assert run(tmp_path, "ring") == 0
    assert "has copies and shares that do not match their CRC" in capsys.readouterr().out
    ring[entry + 32] ^= 1
    assert run(tmp_path, "ring", "--json") == 0
    slot = json.loads(capsys.readouterr().out)["slots"][0]
    assert slot["entry"] is None
    assert "does not match its CRC" in slot["problem"]


def test_looking_changes_nothing(running: Running, tmp_path: Path) -> None:
    before = [bytes(segment.view) for segment in running.segments]
    for argv in (["ring"], ["ring", "--json"], ["ring", "--hexdump"], ["mailbox"], ["mailbox", "--hexdump"]):
        assert run(tmp_path, *argv) == 0
    assert [bytes(segment.view) for segment in running.segments] == before


def test_every_named_byte_of_the_hexdump_is_where_it_says(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for what, segment, expected in (
        (
            "ring",
            running.segments[0],
            [
                "magic = 'AFORERNG'",
                "(l2/m1/s0)",
                "slot 2: never written",
                "cursor",
                "demand_crc = 77",
                "expert = 9",
                "tokens_A",
            ],
        ),
        (
            "mailbox",
            running.segments[1],
            [
                "num_experts = 5",
                "slot attention-1 microbatch 0: never written",
                "counts_E[0:4] = 1 2 3 0",
                "counts_E[4:5] = 4",
            ],
        ),
    ):
        assert run(tmp_path, what, "--hexdump") == 0
        out = capsys.readouterr().out
        for text in expected:
            assert text in out
        dumped = 0
        for line in out.splitlines():
            parts = line.split()
            if line.startswith("  0") and len(parts[0]) == 8:
                data = bytes.fromhex(line[12:59])
                assert bytes(segment.view[int(parts[0], 16) :][: len(data)]) == data
                dumped += len(data)
        assert dumped > 80


def test_a_file_by_path_may_be_the_bare_region(running: Running, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_bytes(bytes(running.segments[0].view))
    assert run(tmp_path, "ring", "--path", str(bare)) == 0
    assert run(tmp_path, "ring", "--path", running.ring_path) == 0


def test_without_a_cluster_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "ring") == 2
    assert f"no ring in {tmp_path}; start a cluster" in one_line(capsys)
    assert run(tmp_path / "nowhere", "mailbox", "--run", "x") == 2
    assert "no mailbox of run x in" in one_line(capsys)


def test_with_two_clusters_it_asks_which(running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Running(tmp_path, "two")
    try:
        assert run(tmp_path, "ring") == 2
        message = one_line(capsys)
        assert "2 ring segments" in message
        assert "(run one)" in message
        assert "(run two)" in message
        assert run(tmp_path, "ring", "--run", "two") == 0
        assert other.ring_path in capsys.readouterr().out
    finally:
        other.close()


def test_bad_input_is_one_line_and_status_2(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "ring", "--path", str(tmp_path / "missing")) == 2
    assert "No such file" in one_line(capsys)
    assert run(tmp_path, "ring", "--path", str(tmp_path)) == 2
    assert "is no regular file" in one_line(capsys)
    assert run(tmp_path, "mailbox", "--path", running.ring_path) == 2
    assert "holds no mailbox" in one_line(capsys)
    noise = tmp_path / "noise"
    noise.write_bytes(os.urandom(3 * HEADER_BYTES))
    assert run(tmp_path, "ring", "--path", str(noise)) == 2
    assert "holds no ring" in one_line(capsys)
    for argv in (["nonsense"], [], ["ring", "--nonsense"]):
        with pytest.raises(SystemExit, match="2"):
            run(tmp_path, *argv)
        one_line(capsys)


def test_a_ring_of_another_version_or_cut_short_is_refused(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = bytearray(running.segments[0].view)
    short = tmp_path / "short"
    short.write_bytes(raw[: len(raw) // 2])
    assert run(tmp_path, "ring", "--path", str(short)) == 2
    assert "asks for" in one_line(capsys)
    struct.pack_into("<I", raw, 8, 99)
    newer = tmp_path / "newer"
    newer.write_bytes(raw)
    assert run(tmp_path, "ring", "--path", str(newer)) == 2
    assert "version 99" in one_line(capsys)


def test_regions_are_listed_with_their_owners(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nameless = PrivateSegment(label="attention-0-exchange", region=7, nbytes=4096, address="127.0.0.1:9")
    try:
        assert run(tmp_path, "regions", "--json") == 0
        found = {
            one["label"]: one for one in json.loads(capsys.readouterr().out)["regions"] if one["pid"] == os.getpid()
        }
        assert run(tmp_path, "regions") == 0
        out = capsys.readouterr().out
    finally:
        nameless.close()
    ring, private = found["scheduler-0-ring"], found["attention-0-exchange"]
    assert (ring["run"], ring["fabric"], ring["alive"], ring["nbytes"]) == ("one", "shm", True, RING.nbytes)
    assert "ffn workers: verdicts" in ring["writers"]
    assert (private["fabric"], private["region"], private["address"]) == ("private", 7, "127.0.0.1:9")
    assert "attention workers: demand vectors" in out
    assert run(tmp_path, "regions", "--run", "other") == 2
    assert "none of run other" in one_line(capsys)


def test_a_region_of_a_dead_process_is_told(running: Running, tmp_path: Path) -> None:
    (before,) = [one for one in regions(str(tmp_path), "one") if one.header.label.endswith("ring")]
    assert before.alive
    with open(running.ring_path, "r+b") as file:
        file.seek(24)
        file.write(struct.pack("<Q", before.header.start_ticks + 1))  # a recycled pid
    (after,) = [one for one in regions(str(tmp_path), "one") if one.header.label.endswith("ring")]
    assert not after.alive
    assert any("1 of dead processes" in line for line in region_lines([after]))


def test_what_is_no_regular_file_is_never_waited_for(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fifo = tmp_path / "afore-x-1-ring-1"
    os.mkfifo(fifo, 0o666)
    (tmp_path / "afore-x-1-ring-2").symlink_to("/dev/zero")
    (tmp_path / "afore-x-1-ring-3").mkdir()
    assert len(list(regions(str(tmp_path), "one"))) == 2
    assert run(tmp_path, "regions") == 0
    assert "afore-x" not in capsys.readouterr().out
    assert run(tmp_path, "ring") == 0
    assert running.ring_path in capsys.readouterr().out
    for argv in (["--path", str(fifo)], ["--run", "x"]):
        assert run(tmp_path, "ring", *argv) == 2
        assert "is no regular file" in one_line(capsys)


def test_a_label_cannot_lead_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = Segment(str(tmp_path), "one", label="x\x1b]0;gone\x07\n", region=1, nbytes=8, address="/tmp/\x1b[2J-1-1")
    try:
        assert run(tmp_path, "regions", "--run", "one") == 0
    finally:
        segment.close()
    out = capsys.readouterr().out
    assert "x ]0;gone" in out
    assert all(line.isprintable() for line in out.splitlines())


EXCHANGE = ExchangeLayout(num_microbatches=2, num_ffn=2, max_tokens=4, hidden=8, top_k=2)


def test_copies_of_a_node_are_found_and_shown(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = MirrorLayout(2, EXCHANGE)
    ring = Segment(str(tmp_path), "one", label="ffn-0-ring", region=5, nbytes=RING.nbytes, address="a")
    inputs = Segment(str(tmp_path), "one", label="ffn-0-inputs", region=6, nbytes=layout.nbytes, address="a")
    copy = RingMirror(ring.view, RING, EPOCH, pid=os.getpid())
    mirror = InputMirror(inputs.view, layout, EPOCH)
    packer = InputPacker(layout, EPOCH)
    rows = np.zeros((3, 8), np.float32), np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)
    for attention, microbatch in ((0, 1), (1, 0)):
        data = packer.pack(Target(1, microbatch, 4), *rows)
        at = layout.write_offset(attention, microbatch)
        inputs.view[at : at + len(data)] = data
    mirror.publish(0, 1)
    try:
        assert run(tmp_path, "ring") == 0  # still the scheduler's
        assert running.ring_path in capsys.readouterr().out
        assert run(tmp_path, "ring", "--of", "ffn-0") == 0
        assert "nothing published" in capsys.readouterr().out
        assert run(tmp_path, "inputs", "--hexdump") == 0
        out = capsys.readouterr().out
        lines = [line.split() for line in out.splitlines()]
        assert ["attention-0", "1", "l1/m1/s4", "l1/m1/s4", "11", "3", "ok"] in lines
        assert ["attention-1", "0", "-", "l1/m0/s4", "11", "3", "landing"] in lines
        assert ["attention-0", "0", "-", "-", "0", "0", "empty"] in lines
        assert "(l1/m1/s4)" in out
        assert run(tmp_path, "inputs", "--json", "--of", "ffn-0") == 0
        assert sum(slot["landing"] for slot in json.loads(capsys.readouterr().out)["slots"]) == 1
        assert run(tmp_path, "inputs", "--attention", "5") == 2
        assert "are not 5 × 2 slots" in one_line(capsys)
        assert run(tmp_path, "inputs", "--of", "ffn-1") == 2
        assert "0 copies of inputs" in one_line(capsys)
    finally:
        del copy, mirror
        for segment in (ring, inputs):
            segment.close()


def test_inputs_are_shown_where_their_node_has_the_ring_itself(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = MirrorLayout(2, EXCHANGE)
    inputs = Segment(str(tmp_path), "one", label="ffn-0-inputs", region=6, nbytes=layout.nbytes, address="a")
    try:
        assert run(tmp_path, "inputs", "--of", "ffn-0") == 0
    finally:
        inputs.close()
    assert capsys.readouterr().out.count("empty") == 4
    assert run(tmp_path, "ring", "--of", "ffn-0") == 2
    assert "leave out --of for the scheduler's" in one_line(capsys)


@pytest.mark.parametrize(
    "argv",
    [("regions", "--of", "ffn-0"), ("regions", "--hexdump"), ("mailbox", "--of", "x"), ("ring", "--attention", "2")],
)
def test_options_without_a_use_are_refused(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, *argv)
    assert f"{argv[1]}: {argv[0]} has no use for it" in one_line(capsys)


def test_a_reader_of_another_node_is_not_called_dead(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = running.segments[0].view
    ring[RING.reader_offset(1) :][:8] = (2).to_bytes(8, "little")  # as it writes from there
    ring[RING.slot_offset(1) :][8:16] = bytes(8)  # as in a copy
    assert run(tmp_path, "ring") == 0
    out = capsys.readouterr().out
    assert "last sequence 1 (ABORT of l2/m1/s1)" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["1", "1", "ABORT", "l2/m1/s1", "0", "0", "-", "NONE", "NONE", "cancels", "0"] in rows
    assert ["ffn-1", "2", "0", "on", "its", "own", "node;", "it", "reads"] in rows


def test_watching_looks_again(running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "ring", "--watch", "0", "--frames", "3", "--json") == 0
    frames = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [frame["last_sequence"] for frame in frames] == [1, 1, 1]
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "ring", "--watch", "-1")
    assert "--watch" in one_line(capsys)
