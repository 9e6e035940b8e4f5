"""FFN workers with real weights on CPU devices, inline and with threads: replies equal a float64 reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from afore.core.clock import LoopClock, WallClock
from afore.core.config import DeviceOptions, RunConfig
from afore.core.errors import DeviceError
from afore.core.plan import CopyStart
from afore.testing import run_virtual
from afore.transport.loopback import LoopbackNetwork
from afore.transport.session import RoleContext
from afore.workers.experts import ExpertRow, ExpertStore, Store
from afore.workers.ffn_world import CheckpointFfn
from tests.workers.ffn_parts import F32, I32, Plans, Shape
from tests.workers.ffn_rig import Rig
from tests.workers.random_plans import Answer, NoPlans, PlannerPlans, RandomPlans

SHAPE = Shape(attention=2, ffn=3, microbatches=3, slots=2, layers=2, steps=4, experts=8, top_k=3, hidden=8, expert=12)


class RandomExperts:
    """Weights of every expert, and what they make of rows."""

    def __init__(self, shape: Shape) -> None:
        numbers = np.random.default_rng(1)
        self.gate_up = numbers.standard_normal((shape.layers, shape.experts, 2 * shape.expert, shape.hidden))
        self.down = numbers.standard_normal((shape.layers, shape.experts, shape.hidden, shape.expert)) / 4

    def read(self, layer: int, expert: int, row: ExpertRow) -> None:
        row.gate_up_FD[:] = self.gate_up[layer, expert]
        row.down_DI[:] = self.down[layer, expert]

    def out(self, hidden_TD: F32, layer: int, ids_TK: I32, weights_TK: F32) -> F32:
        out_TD = np.zeros(hidden_TD.shape)
        for t, k in np.ndindex(ids_TK.shape):
            gate_up_FD, down_DI = self.gate_up[layer, ids_TK[t, k]], self.down[layer, ids_TK[t, k]]
            gate_I, up_I = np.split(gate_up_FD @ hidden_TD[t], 2)
            out_TD[t] += weights_TK[t, k] * (down_DI @ (gate_I / (1 + np.exp(-gate_I)) * up_I))
        return out_TD.astype(np.float32)


class RandomFfn(CheckpointFfn):
    """The product's parts; only the weights come from elsewhere."""

    def __init__(self, ctx: RoleContext, experts: RandomExperts) -> None:
        super().__init__(ctx)
        self._experts = experts

    def load(self, store: Store) -> Iterator[tuple[int, int]]:
        assert isinstance(store, ExpertStore)
        yield from store.load_each(self._experts.read)


def configured(*, threads: bool) -> RunConfig:
    plain = SHAPE.config()
    return RunConfig(
        topology=plain.topology, batch=plain.batch, device=DeviceOptions(threads=threads, verify_copies=True)
    )


async def serve(threads: bool, seed: int, make_plans: str) -> Rig:
    experts = RandomExperts(SHAPE)
    rig = Rig(SHAPE, LoopbackNetwork(WallClock() if threads else LoopClock()), seed, configured(threads=threads))
    rig.expert = experts.out
    choices: dict[str, Plans] = {"random": RandomPlans(SHAPE, seed), "planner": PlannerPlans(SHAPE), "none": NoPlans()}
    await rig.open(lambda ctx: RandomFfn(ctx, experts))
    try:
        await rig.serve(choices[make_plans])
    finally:
        await rig.close()
    return rig


@pytest.mark.slow
@pytest.mark.parametrize("plans", ["random", "planner"])
async def test_threads(plans: str) -> None:
    for seed in range(3):
        rig = await serve(True, seed, plans)
        assert rig.seen.copies > 0
        assert sum(record.replica_pairs for record in rig.records) > 0


@pytest.mark.slow
@pytest.mark.parametrize("plans", ["random", "planner"])
def test_inline_in_any_order_of_callbacks(plans: str) -> None:
    for seed in range(6):
        rig = run_virtual(serve(False, seed, plans), seed=seed)
        assert rig.seen.copies > 0
        assert sum(record.replica_pairs for record in rig.records) > 0


async def test_static() -> None:
    rig = await serve(False, 0, "none")
    assert rig.seen.copies == 0
    assert len(rig.seen.entries) == 3 * 4 * 2


async def test_a_copy_of_damaged_weights_ends_the_worker() -> None:
    experts = RandomExperts(SHAPE)
    rig = Rig(SHAPE, LoopbackNetwork(LoopClock()), 0, configured(threads=False))
    rig.expert = experts.out
    await rig.open(lambda ctx: RandomFfn(ctx, experts))
    # After its checksum was taken; worker 0 computes with it unknowing, whoever copies it does not.
    rig.workers[0].region.buffer[0] ^= 1
    try:
        with pytest.raises(DeviceError, match=r"copy of .* has checksum .* its expert was not copied whole"):
            await rig.serve(EveryoneWants(0))
    finally:
        await rig.close()


class EveryoneWants:
    """Copies one expert to worker 1 in each plan, and uses it there."""

    def __init__(self, expert: int) -> None:
        self._expert = expert

    def reset(self, layer: int) -> None:
        pass

    def plan(self, layer: int, demand_E: I32) -> Answer:
        return [(self._expert, 1, 0, 1)], [(self._expert, 1, 0)], CopyStart.NOW
