"""Which device, port, address and MTU are chosen, and the reason that is given: tables in, sentences out, no device."""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import ConfigError, HostError
from afore.transport.verbs.choice import agree_mtu, choose_mtu, choose_path, gid_rank
from afore.transport.verbs.table import DeviceEntry, GidEntry, PortEntry, read_table


def gid(index: int, address: str, kind: str = "RoCE v2", netdev: str = "eth0") -> GidEntry:
    number = ipaddress.ip_address(address)
    text = f"::ffff:{address}" if number.version == 4 else address
    return GidEntry(index, ipaddress.IPv6Address(text).packed, kind, netdev)


GIDS = (
    gid(0, "fe80::5054:ff:fe77:1", "IB/RoCE v1"),
    gid(1, "fe80::5054:ff:fe77:1"),
    gid(2, "10.0.0.5", "IB/RoCE v1"),
    gid(3, "10.0.0.5"),
    gid(4, "fd00::5"),
    gid(5, "169.254.3.4"),
)


def nic(name: str, *, numa: int | None = None, state: str = "ACTIVE", gids: tuple[GidEntry, ...] = GIDS) -> DeviceEntry:
    return DeviceEntry(name, numa, (PortEntry(1, state, False, gids),))


@given(st.permutations(GIDS))
def test_roce_v2_over_ipv4_is_preferred_and_link_local_comes_last(gids: list[GidEntry]) -> None:
    ranks = sorted(gids, key=lambda one: (gid_rank(one, False)[0], one.index))
    assert [one.index for one in ranks] == [3, 4, 2, 1, 5, 0]
    choice = choose_path([nic("mlx5_0", gids=tuple(gids))])
    assert (choice.device, choice.port, choice.gid.index) == ("mlx5_0", 1, 3)


def test_every_part_is_explained() -> None:
    choice = choose_path([nic("mlx5_0", state="DOWN"), nic("mlx5_1"), nic("mlx5_2")])
    device, port, address = choice.reasons
    assert device == "device mlx5_1: the first with the best address; passed over: mlx5_2"
    assert port == "port 1 (Ethernet): active"
    assert address.startswith("GID 3 (10.0.0.5, RoCE v2, eth0): RoCE v2 over IPv4")
    assert "GID 1 (fe80::5054:ff:fe77:1, RoCE v2, eth0): link-local" in address
    assert choose_path([nic("mlx5_0")]).reasons[0] == "device mlx5_0: the only one with an active port"


def test_what_is_named_is_taken_and_said_so() -> None:
    table = [nic("mlx5_0"), nic("mlx5_1")]
    choice = choose_path(table, device="mlx5_1", port=1, gid_index=1)
    assert (choice.device, choice.gid.index) == ("mlx5_1", 1)
    assert all("the config names it" in reason for reason in choice.reasons)


def test_the_nearest_device_is_chosen_but_not_for_a_worse_address() -> None:
    near, far = nic("mlx5_1", numa=1), nic("mlx5_0", numa=0)
    choice = choose_path([far, near], numa_node=1)
    assert choice.device == "mlx5_1"
    assert choice.reasons[0] == "device mlx5_1: on this process's NUMA node 1; passed over: mlx5_0"
    poor = nic("mlx5_1", numa=1, gids=GIDS[:2])
    assert choose_path([far, poor], numa_node=1).device == "mlx5_0"
    assert choose_path([far, near]).device == "mlx5_0"
    # Neither is on the process's node: the kernel's distances decide, and without them the name.
    assert choose_path([far, near], numa_node=2, distances={0: 32, 1: 21, 2: 10}).device == "mlx5_1"
    choice = choose_path([far, near], numa_node=2, distances={0: 21, 1: 32, 2: 10})
    assert choice.device == "mlx5_0"
    assert choice.reasons[0] == (
        "device mlx5_0: on NUMA node 0, none with as good an address is nearer to 2; passed over: mlx5_1"
    )
    # One NUMA node: nothing is known, nothing is far.
    assert choose_path([nic("a"), near], numa_node=1).device == "a"


def test_infiniband_takes_its_first_address() -> None:
    port = PortEntry(2, "ACTIVE", True, (gid(0, "fe80::1", "IB/RoCE v1", ""), gid(1, "fe80::2", "IB/RoCE v1", "")))
    choice = choose_path([DeviceEntry("mlx4_0", None, (PortEntry(1, "DOWN", True, ()), port))])
    assert (choice.port, choice.gid.index, choice.infiniband) == (2, 0, True)
    assert choice.reasons[1] == "port 2 (InfiniBand): active; not active: 1"


def test_what_is_lacking_is_named_with_its_remedy() -> None:
    with pytest.raises(HostError, match=r"has none.*rdma link add"):
        choose_path([])
    with pytest.raises(HostError, match="mlx5_0 port 1 is DOWN; bring the interface up"):
        choose_path([nic("mlx5_0", state="DOWN")])
    with pytest.raises(HostError, match="no active port has a GID"):
        choose_path([nic("mlx5_0", gids=())])
    with pytest.raises(ConfigError, match=r"verbs.device: no device is named 'mlx9'; choose one of mlx5_0, mlx5_1"):
        choose_path([nic("mlx5_0"), nic("mlx5_1")], device="mlx9")
    with pytest.raises(ConfigError, match=r"verbs.port: mlx5_0 has no port 2"):
        choose_path([nic("mlx5_0")], port=2)
    with pytest.raises(ConfigError, match=r"verbs.gid_index: no active port has a GID 77"):
        choose_path([nic("mlx5_0")], gid_index=77)


def test_the_choice_does_not_depend_on_the_order_of_the_table() -> None:
    devices = [nic("b", numa=1), nic("a", numa=0), nic("c", state="DOWN"), nic("d", gids=GIDS[:2])]
    chosen = {dataclasses.astuple(choose_path(order))[:2] for order in itertools.permutations(devices)}
    assert chosen == {("a", 1)}


def test_the_mtu_is_the_lower_of_both_sides() -> None:
    assert choose_mtu(5, None) == (5, "MTU 4096: the port's")
    assert choose_mtu(5, 1024) == (3, "MTU 1024: the config names it (the port has 4096)")
    assert choose_mtu(3, 4096) == (3, "MTU 1024: the port has no more, though the config names 4096")
    assert agree_mtu(5, 5) == (5, "MTU 4096: both sides' own")
    assert agree_mtu(5, 3) == (3, "MTU 1024: the peer's, the other side would take 4096")
    assert agree_mtu(3, 5) == (3, "MTU 1024: this side's, the other side would take 4096")


def test_the_table_is_read_from_sysfs(tmp_path: Path) -> None:
    def put(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    put("mlx5_0/device/numa_node", "1")
    put("mlx5_0/ports/1/state", "4: ACTIVE")
    put("mlx5_0/ports/1/link_layer", "Ethernet")
    put("mlx5_0/ports/1/gids/0", "0000:0000:0000:0000:0000:ffff:0a4d:0001")
    put("mlx5_0/ports/1/gid_attrs/types/0", "RoCE v2")
    put("mlx5_0/ports/1/gid_attrs/ndevs/0", "eth0")
    put("mlx5_0/ports/1/gids/1", "0000:0000:0000:0000:0000:0000:0000:0000")
    for index in range(2, 100):
        put(f"mlx5_0/ports/1/gids/{index}", "0000:0000:0000:0000:0000:0000:0000:0000")
    put("mlx5_0/ports/1/gids/100", "0000:0000:0000:0000:0000:ffff:0a4d:0002")
    put("mlx5_0/ports/1/gid_attrs/types/100", "RoCE v2")
    put("mlx5_0/ports/2/state", "1: DOWN")
    put("rxe0/ports/1/state", "4: ACTIVE")
    first, second = read_table(str(tmp_path))
    assert (first.name, first.numa_node, [port.state for port in first.ports]) == ("mlx5_0", 1, ["ACTIVE", "DOWN"])
    assert [str(one) for one in first.ports[0].gids] == [
        "GID 0 (10.77.0.1, RoCE v2, eth0)",
        "GID 100 (10.77.0.2, RoCE v2)",
    ]
    assert (second.name, second.numa_node, second.ports[0].gids) == ("rxe0", None, ())
    assert read_table(str(tmp_path / "nothing")) == ()
