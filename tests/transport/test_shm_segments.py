"""Segments: refused at the door where there is no room, private, and let go of whatever still looks at them."""

from __future__ import annotations

import dataclasses
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from afore.core.errors import AccessRefused, HostError, RegionRevoked
from afore.transport.api import RegionKey
from afore.transport.shm_segments import HEADER_BYTES, ROOT, Mapping, Segment, clean_label, read_header, start_ticks


def segment(root: Path | str, nbytes: int = 4096, label: str = "kv cache", region: int = 3) -> Segment:
    return Segment(str(root), "run", label=label, region=region, nbytes=nbytes, address="/somewhere/owner")


def key(made: Segment, nbytes: int = 4096, region: int = 3) -> RegionKey:
    return RegionKey("shm", "/somewhere/owner", region, nbytes, made.name)


def test_name_mode_and_header_tell_who_made_it(tmp_path: Path) -> None:
    made = segment(tmp_path)
    assert made.name == f"afore-run-{os.getpid()}-kv_cache-3"
    status = (tmp_path / made.name).stat()
    assert (status.st_mode & 0o777, status.st_size) == (0o600, HEADER_BYTES + 4096)
    header = read_header(memoryview((tmp_path / made.name).read_bytes()))
    assert header is not None
    assert dataclasses.astuple(header) == (
        os.getpid(), start_ticks(os.getpid()), 3, 4096, "kv cache", "/somewhere/owner"
    )  # fmt: skip
    made.close()
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_stepped_over(tmp_path: Path) -> None:
    first, second = segment(tmp_path), segment(tmp_path)
    assert second.name.endswith("-4")
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("label", "cleaned"),
    [("ffn-2", "ffn-2"), ("a/b c☃", "a_b_c_"), ("", "region"), ("x" * 99, "x" * 40), ("..", "region")],
)
def test_labels_become_parts_of_names(label: str, cleaned: str) -> None:
    assert clean_label(label) == cleaned


def test_no_room_is_a_host_error_with_figures_and_remedy() -> None:
    status = os.statvfs(ROOT)
    free = status.f_bavail * status.f_frsize
    with pytest.raises(
        HostError, match=r"/dev/shm: region 'kv cache' needs [0-9,]+ bytes, [0-9,]+ are free; .*remount"
    ) as error:
        segment(ROOT, free + (1 << 30))
    assert error.value.resource == "/dev/shm"
    assert f"{free + (1 << 30) + HEADER_BYTES:,}" in str(error.value)
    assert not any(name.startswith("afore-run-") for name in os.listdir(ROOT))


@contextmanager
def no_files_over_a_page() -> Iterator[None]:
    """No longer than it takes: pytest's own output may be a file, and longer than that."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_what_the_kernel_refuses_while_room_is_taken_is_a_host_error(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="File too large"), no_files_over_a_page():
        segment(tmp_path, 1 << 20)
    assert list(tmp_path.iterdir()) == []
    with no_files_over_a_page():
        segment(tmp_path, 4096).close()


@pytest.mark.parametrize("root", ["/proc", "/nowhere"])
def test_no_permission_or_no_place_is_a_host_error(root: str) -> None:
    with pytest.raises(HostError, match=r"cannot create a segment for region 'kv cache'.*tmpfs"):
        segment(root)


def test_room_is_really_taken(tmp_path: Path) -> None:
    made = segment(tmp_path, 1 << 20)
    assert (tmp_path / made.name).stat().st_blocks * 512 >= 1 << 20
    made.close()


def test_an_array_keeps_its_memory_after_both_sides_closed(tmp_path: Path) -> None:
    made = segment(tmp_path)
    mapping = Mapping(str(tmp_path), key(made), writable=True)
    mine, theirs = np.frombuffer(made.view, dtype=np.uint64), np.frombuffer(mapping.view, dtype=np.uint64)
    made.close()
    mapping.close()
    mine[5] = 7
    assert theirs[5] == 7
    assert list(tmp_path.iterdir()) == []


def test_a_mapping_sees_that_its_owner_closed(tmp_path: Path) -> None:
    made = segment(tmp_path)
    mapping = Mapping(str(tmp_path), key(made), writable=False)
    assert mapping.is_live()
    assert mapping.view.readonly
    made.close()
    assert not mapping.is_live()
    mapping.close()
    mapping.close()
    with pytest.raises(RegionRevoked):
        Mapping(str(tmp_path), key(made), writable=False)


def test_a_segment_that_is_about_to_be_unlinked_is_revoked_already(tmp_path: Path) -> None:
    made = segment(tmp_path)
    os.link(tmp_path / made.name, tmp_path / "kept")
    made.close()
    os.rename(tmp_path / "kept", tmp_path / made.name)
    with pytest.raises(RegionRevoked):
        Mapping(str(tmp_path), key(made), writable=True)


def test_only_what_is_a_segment_and_is_the_key_s_is_mapped(tmp_path: Path) -> None:
    made, other = segment(tmp_path), segment(tmp_path, region=4)
    good = key(made)
    (tmp_path / "afore-run-1-garbage-1").write_bytes(b"\xff" * (HEADER_BYTES + 4096))
    (tmp_path / "afore-run-1-short-1").write_bytes(b"\xff")
    (tmp_path / "afore-run-1-link-1").symlink_to(tmp_path / made.name)
    (tmp_path / "afore-run-1-folder-1").mkdir()
    os.mkfifo(tmp_path / "afore-run-1-fifo-1")
    for forged in (
        dataclasses.replace(good, nbytes=4095),
        dataclasses.replace(good, region=4),
        dataclasses.replace(good, address="/somewhere/else"),
        dataclasses.replace(good, token=other.name),
        dataclasses.replace(good, token="afore-run-1-garbage-1"),
        dataclasses.replace(good, token="afore-run-1-short-1"),
        dataclasses.replace(good, token="../" + made.name),
        dataclasses.replace(good, token=""),
    ):
        with pytest.raises(AccessRefused):
            Mapping(str(tmp_path), forged, writable=True)
    for token in ("afore-run-1-link-1", "afore-run-1-folder-1", "afore-run-1-fifo-1"):
        with pytest.raises((AccessRefused, HostError)):
            Mapping(str(tmp_path), dataclasses.replace(good, token=token), writable=True)
    made.close()
    other.close()


def test_start_ticks_tell_processes_apart() -> None:
    assert start_ticks(os.getpid()) == start_ticks(os.getpid()) is not None
    assert start_ticks(1) is not None
    assert start_ticks(2**22 + 1) is None
