"""Where workers with GPUs are, what follows from it, and what is said where there is no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from afore.core.config import DeviceOptions, RunConfig
from afore.core.errors import ConfigError, HostError
from afore.core.topology import Topology
from afore.serving.alone import is_alone
from afore.workers.device.cuda.places import attention_on_gpu, ffn_together, gpus_of, group_of, rows_apart
from afore.workers.device.cuda.probe import require_gpus
from tests.workers.device.cuda.presence import missing_gpu


def config(ffn: int = 4, attention: int = 2, policy: str = "afore", **device: Any) -> RunConfig:
    options = DeviceOptions(**{"name": "cuda", **device})
    return RunConfig(topology=Topology(attention=attention, ffn=ffn), device=options, policy=policy)


def everywhere(left: int, right: int) -> bool:
    return True


def nowhere(left: int, right: int) -> bool:
    return left == right


def test_attention_follows_the_ffn_workers() -> None:
    assert attention_on_gpu(config())
    assert not attention_on_gpu(config(attention=2, name="cpu"))
    assert not attention_on_gpu(RunConfig(device=DeviceOptions(name="cuda", attention="cpu")))
    assert attention_on_gpu(RunConfig(device=DeviceOptions(name="cpu", attention="cuda")))


@pytest.mark.parametrize(
    ("changes", "gpus", "reaches", "nccl", "expected"),
    [
        (
            {},
            1,
            everywhere,
            "",
            ("ipc", "several of them share GPU 0; they read rows in the attention workers' GPU memory"),
        ),
        (
            {},
            2,
            everywhere,
            "",
            ("ipc", "several of them share GPU 0; they read rows in the attention workers' GPU memory"),
        ),
        ({}, 4, everywhere, "", ("nccl", "each has a GPU of its own")),
        ({}, 4, everywhere, "no NCCL", ("ipc", "no NCCL; they read rows in the attention workers' GPU memory")),
        ({}, 4, nowhere, "no NCCL", ("hosted", "no NCCL; GPU 0 does not reach GPU 1")),
        ({"group": "direct"}, 4, everywhere, "", ("ipc", "they read rows in the attention workers' GPU memory")),
        ({"where": "cpu"}, 1, everywhere, "", ("hosted", "several of them share GPU 0; attention is on CPUs")),
        ({"group": "nccl"}, 4, everywhere, "", ("nccl", "as asked for")),
        ({"ffn": 1}, 4, everywhere, "", ("ipc", "they read rows in the attention workers' GPU memory")),
        (
            {"policy": "lina", "group": "direct"},
            1,
            everywhere,
            "",
            ("hosted", "policy lina needs the ids on the host"),
        ),
    ],
)
def test_the_group(changes: dict[str, Any], gpus: int, reaches: Any, nccl: str, expected: tuple[str, str]) -> None:
    changes = dict(changes)
    where = changes.pop("where", "auto")
    chosen = config(**changes)
    chosen = dataclasses.replace(chosen, device=dataclasses.replace(chosen.device, attention=where))
    assert group_of(chosen, gpus, reaches, nccl) == expected


def test_recordings_need_rows_on_the_host() -> None:
    assert rows_apart(config()) == ""
    assert rows_apart(dataclasses.replace(config(), record_wire="wire")) == "record_wire needs them on the host"
    ids = dataclasses.replace(config(), record="record.afore", record_ids=True)
    assert rows_apart(ids, 1, everywhere) == "record_ids needs them on the host"
    assert rows_apart(config(name="cpu", attention=2)) == "attention is on CPUs"


def test_a_group_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device\.group: nccl cannot be: several of them share GPU 1"):
        group_of(config(ffn=3, gpus=(1, 2), group="nccl"), 3, everywhere, "")
    with pytest.raises(ConfigError, match=r"nccl cannot be: built without"):
        group_of(config(ffn=2, group="nccl"), 2, everywhere, "built without")
    with pytest.raises(ConfigError, match=r"device\.gpus: there is no GPU 5: 2 are visible"):
        gpus_of(config(gpus=(5,)), "ffn", 2)


def test_workers_of_several_machines_exchange_rows_among_themselves() -> None:
    nodes = {"one": "door,scheduler,attention,prefill,ffn-0", "two": "ffn-1"}
    spread = dataclasses.replace(
        config(ffn=2), topology=Topology(attention=2, ffn=2, nodes=nodes, secret_file="secret")
    )
    assert not ffn_together(spread)
    assert rows_apart(spread) == "workers may be on several machines"
    assert group_of(spread, 1, everywhere, "")[0] == "nccl"
    together = dataclasses.replace(
        spread,
        topology=dataclasses.replace(spread.topology, nodes={"one": "door,scheduler,attention,prefill", "two": "ffn"}),
    )
    assert ffn_together(together)
    assert group_of(together, 1, everywhere, "")[0] == "hosted"


def test_roles_on_gpus_are_processes_of_their_own() -> None:
    def spec(role: str, **device: Any) -> dict[str, Any]:
        return {"config": {"device": {"name": "cuda", "attention": "auto", **device}}, "roles": [[role, 0]]}

    assert is_alone(spec("ffn"))
    assert is_alone(spec("attention"))
    assert is_alone(spec("prefill"))
    assert not is_alone(spec("scheduler"))
    assert not is_alone(spec("attention", attention="cpu"))
    assert not is_alone(spec("ffn", name="cpu", attention="cuda"))
    assert is_alone(spec("attention", name="cpu", attention="cuda"))


def test_a_configuration_that_needs_no_gpu_is_never_refused() -> None:
    require_gpus(RunConfig())
    if not missing_gpu():
        pytest.skip("there is a GPU here")
    for device in (DeviceOptions(name="cuda"), DeviceOptions(attention="cuda")):
        with pytest.raises(HostError, match=r"^GPU: "):
            require_gpus(RunConfig(device=device))
