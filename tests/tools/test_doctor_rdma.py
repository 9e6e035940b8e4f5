"""The doctor on machines with RDMA devices, GPUs and several sockets, as their /sys looks; and on one with nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from afore.core.errors import HostError
from afore.tools.doctor_check import Check
from afore.tools.doctor_devices import check_distance, check_huge_pages, check_peer_memory, distance
from afore.tools.doctor_fabrics import check_fabrics, check_tcp, own_addresses
from afore.tools.doctor_rdma import NO_DEVICE, check_bindings, check_choice, check_opening, check_rdma

IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0007"
LINK_LOCAL = "fe80:0000:0000:0000:0ae9:1dff:fe1d:43b9"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def adapter(
    sys: Path, name: str, *, bus: str, numa: int, state: str = "4: ACTIVE", gids: tuple[str, ...] = (IPV4,)
) -> None:
    """A RoCE adapter on a PCI path, as the kernel lists it."""
    write(sys, {f"devices/{bus}/numa_node": str(numa)})
    port = f"class/infiniband/{name}/ports/1"
    write(
        sys,
        {
            f"class/infiniband/{name}/fw_ver": "28.39.1002",
            f"{port}/state": state,
            f"{port}/link_layer": "Ethernet",
            f"{port}/rate": "400 Gb/sec (4X NDR)",
            f"class/net/{name}_eth/mtu": "1500",
        },
    )
    for index, gid in enumerate(gids):
        write(
            sys,
            {
                f"{port}/gids/{index}": gid,
                f"{port}/gid_attrs/types/{index}": "RoCE v2",
                f"{port}/gid_attrs/ndevs/{index}": f"{name}_eth",
            },
        )
    (sys / f"class/infiniband/{name}/device").symlink_to(sys / "devices" / bus)


def gpu(sys: Path, bus: str, numa: int) -> None:
    write(
        sys, {f"devices/{bus}/{name}": text for name, text in
              (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(numa)))}
    )  # fmt: skip
    (sys / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (sys / "bus/pci/devices" / bus.rpartition("/")[2]).symlink_to(sys / "devices" / bus)


class NoBinding:
    def __call__(self, api: str) -> Any:
        raise HostError("RDMA binding", f"none can be imported ({api}: no module)", "install it")


class Opens:
    """A binding whose device opens, or does not: what ibverbs.so would say."""

    name, version = "some", "1.2"

    def __init__(self, error: OSError | None = None, mtu: int = 3) -> None:
        self.error, self.mtu = error, mtu
        self.closed = 0

    def __call__(self, api: str) -> Any:
        return self

    def open(self, device: str) -> Any:
        if self.error is not None:
            raise self.error
        return self

    def active_mtu(self, port: int) -> int:
        return self.mtu

    def close(self) -> None:
        self.closed += 1


def names(checks: list[Check]) -> list[tuple[str, str]]:
    return [(check.name, check.status) for check in checks]


def test_a_machine_without_rdma_is_well(tmp_path: Path) -> None:
    checks = [*check_rdma(tmp_path), check_choice(tmp_path), check_bindings(tmp_path, NoBinding())]
    checks += [check_peer_memory(tmp_path), *check_distance(tmp_path), *check_fabrics(tmp_path, NoBinding())]
    assert {check.status for check in checks} == {"ok"}
    assert check_opening(tmp_path, NoBinding()) == []
    assert NO_DEVICE in check_fabrics(tmp_path)[3].found


def test_a_device_is_told_with_port_addresses_and_the_choice(tmp_path: Path) -> None:
    adapter(tmp_path, "mlx5_0", bus="pci0000:10/0000:10:01.0/0000:11:00.0", numa=0, gids=(LINK_LOCAL, IPV4))
    devices, port, choice, *_ = check_rdma(tmp_path)
    assert (devices.found, port.name, port.status) == ("mlx5_0", "rdma mlx5_0/1", "ok")
    for fact in ("ACTIVE", "Ethernet", "400 Gb/sec", "firmware 28.39.1002", "NUMA node 0", "10.0.0.7", "RoCE v2"):
        assert fact in port.found
    assert "mlx5_0_eth MTU 1500: RDMA packets of 1024 bytes (4096 would need MTU 4192)" in port.found
    assert choice.status == "ok"
    assert "GID 1 (10.0.0.7, RoCE v2, mlx5_0_eth): RoCE v2 over IPv4" in choice.found
    assert "passed over: GID 0" in choice.found


def test_what_keeps_a_device_from_serving_has_its_mend(tmp_path: Path) -> None:
    adapter(tmp_path, "mlx5_0", bus="pci0000:10/0000:10:01.0/0000:11:00.0", numa=0, state="1: DOWN")
    _, port, choice, *_ = check_rdma(tmp_path)
    assert (port.status, port.mend) == ("warn", "ip link set mlx5_0_eth up")
    assert (choice.status, choice.found) == ("warn", "none is active: mlx5_0 port 1 is DOWN")
    assert check_fabrics(tmp_path)[3].status == "warn"


def test_a_link_local_address_alone_is_a_warning(tmp_path: Path) -> None:
    adapter(tmp_path, "rxe0", bus="pci0000:10/0000:10:01.0/0000:11:00.0", numa=0, gids=(LINK_LOCAL,))
    assert check_choice(tmp_path).status == "warn"
    assert "give rxe0_eth an IPv4 address" in check_choice(tmp_path).mend


def test_bindings(tmp_path: Path) -> None:
    assert "none is needed" in check_bindings(tmp_path, NoBinding()).found
    adapter(tmp_path, "rxe0", bus="pci0000:10/0000:10:01.0/0000:11:00.0", numa=0)
    missing = check_bindings(tmp_path, NoBinding())
    assert (missing.status, missing.mend) == ("warn", "install it")
    assert missing.found == "pyverbs: no module; ibverbs: no module"
    assert check_bindings(tmp_path, Opens()).found == "pyverbs 1.2; ibverbs 1.2; auto takes pyverbs"


def test_opening_the_device_says_what_is_missing(tmp_path: Path) -> None:
    adapter(tmp_path, "rxe0", bus="pci0000:10/0000:10:01.0/0000:11:00.0", numa=0)
    opens = Opens()
    (found,) = check_opening(tmp_path, opens)
    assert (found.status, found.found) == ("ok", "some 1.2 opens it; its active MTU is 1024")
    assert opens.closed == 1
    (refused,) = check_opening(tmp_path, Opens(PermissionError(13, "Permission denied")))
    assert refused.status == "fail"
    assert "/dev/infiniband/uverbs" in refused.mend


@pytest.mark.parametrize(
    ("bus", "numa", "shown"),
    [
        ("pci0000:10/0000:10:01.0/0000:12:00.0", 0, "one PCIe switch"),
        ("pci0000:10/0000:10:03.0/0000:19:00.0", 0, "one host bridge"),
        ("pci0000:20/0000:20:01.0/0000:21:00.0", 0, "two host bridges of one NUMA node"),
        ("pci0000:80/0000:80:01.0/0000:81:00.0", 1, "across sockets (NUMA node 0 and 1)"),
    ],
)
def test_distance_of_adapter_and_gpu(bus: str, numa: int, shown: str, tmp_path: Path) -> None:
    adapter(tmp_path, "mlx5_0", bus="pci0000:10/0000:10:01.0/0000:11:00.0", numa=0)
    gpu(tmp_path, bus, numa)
    write(tmp_path, {"devices/system/node/node0/distance": "10 21"})
    (found,) = check_distance(tmp_path)
    assert f"NUMA node 0 (distances 10 21); NVIDIA GPU {bus.rpartition('/')[2]}: {shown}" in found.found
    assert found.status == ("warn" if "across" in shown else "ok")
    assert distance(tmp_path / "devices" / bus, tmp_path / "devices" / bus) == "one PCIe switch"


def test_peer_memory_needs_a_module_where_there_is_a_gpu_and_an_adapter(tmp_path: Path) -> None:
    gpu(tmp_path, "pci0000:10/0000:10:01.0/0000:12:00.0", 0)
    assert "no RDMA device here" in check_peer_memory(tmp_path).found
    adapter(tmp_path, "mlx5_0", bus="pci0000:10/0000:10:01.0/0000:11:00.0", numa=0)
    assert check_peer_memory(tmp_path).status == "warn"
    assert "modprobe nvidia_peermem" in check_peer_memory(tmp_path).mend
    (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    assert check_peer_memory(tmp_path) == Check("peer memory", "ok", "modules loaded: nvidia_peermem")


def test_huge_pages(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "meminfo": "HugePages_Total:      64\nHugePages_Free:       60\nHugepagesize:       2048 kB",
            "kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        },
    )
    assert check_huge_pages(tmp_path, tmp_path).found == "60 of 64 free, 2048 kB each; transparent: madvise"
    assert check_huge_pages(tmp_path / "none", tmp_path / "none").status == "ok"


def test_tcp_is_tried() -> None:
    assert check_tcp().status == "ok"
    assert check_tcp("203.0.113.77").status == "fail"  # an address of nobody
    assert not [address for address in own_addresses() if " 127." in address or " fe80" in address]
