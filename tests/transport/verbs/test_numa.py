"""Where a process runs, out of trees as the kernel's sysfs has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from afore.transport.verbs.numa import SYSFS, numa_distances, own_numa_node


@pytest.fixture
def two_nodes(tmp_path: Path) -> str:
    """Two nodes, numbered as where one socket is empty."""
    for node, cores, distance in ((0, "0-3,8", "10 32"), (2, "4-7,9-11", "32 10")):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cores}\n")
        (folder / "distance").write_text(f"{distance}\n")
    (tmp_path / "possible").write_text("0-2\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("cores", "node"),
    [({0}, 0), ({3, 8}, 0), ({4, 9, 11}, 2), ({3, 4}, None), (set(range(12)), None), ({99}, None), (set(), None)],
)
def test_a_process_is_where_all_its_cores_are(two_nodes: str, cores: set[int], node: int | None) -> None:
    assert own_numa_node(cores, two_nodes) == node


def test_distances_are_by_number_of_node(two_nodes: str) -> None:
    assert numa_distances(0, two_nodes) == {0: 10, 2: 32}
    assert numa_distances(2, two_nodes) == {0: 32, 2: 10}
    assert numa_distances(1, two_nodes) == {}


@pytest.mark.parametrize("text", ["", "10", "10 x", "10 20 30"])
def test_a_kernel_that_says_something_else_says_nothing(two_nodes: str, text: str) -> None:
    Path(two_nodes, "node0", "distance").write_text(text)
    assert numa_distances(0, two_nodes) == {}
    Path(two_nodes, "node0", "cpulist").write_text(text)
    assert own_numa_node({3}, two_nodes) is None


def test_a_machine_without_the_list_has_no_nodes(tmp_path: Path) -> None:
    assert own_numa_node({0}, str(tmp_path / "nothing")) is None
    assert numa_distances(0, str(tmp_path / "nothing")) == {}


def test_this_machine_is_read() -> None:
    node = own_numa_node()
    known = os.path.isdir(SYSFS)
    assert node is None or (known and numa_distances(node)[node] == 10)
