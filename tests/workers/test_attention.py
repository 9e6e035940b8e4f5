"""Attention and prefill roles against transformers' own greedy decoding, token for token, over a real hub, mailbox and exchange."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from afore.core import control
from afore.core.clock import LoopClock
from afore.core.config import BatchOptions, RunConfig, TimeOptions
from afore.core.control import Row
from afore.core.errors import PeerLost
from afore.core.target import Target
from afore.core.topology import ATTENTION, PREFILL, Topology
from afore.models.bundle import bundled_model_path, bundled_prompts
from afore.models.reference import Reference
from afore.models.tokenizer import Tokenizer
from afore.testing import virtual_test
from tests.workers.attention_rig import Rig, Sequence, decode_all
from tests.workers.plain_experts import ExpertsOfCheckpoint

NEW_TOKENS = 8
SEATS = [(0, 0), (0, 1), (0, 0), (1, 1), (1, 0), (1, 1), (0, 1), (0, 0)]
"""(attention worker, microbatch) of each request."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def experts() -> ExpertsOfCheckpoint:
    return ExpertsOfCheckpoint()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer(bundled_model_path())
    return [tokenizer.encode(prompt.prompt) for prompt in bundled_prompts()[::4]]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    reference = Reference(bundled_model_path())
    return [reference.generate(prompt, NEW_TOKENS, ignore_eos=True) for prompt in prompts]


def make_config(attention: int = 2, ffn: int = 3, microbatches: int = 2, **batch: Any) -> RunConfig:
    topology = Topology(attention=attention, ffn=ffn, microbatches=microbatches, redundant_slots=0)
    options = BatchOptions(max_num_seqs=16, **batch)
    return RunConfig(topology=topology, batch=options, times=TimeOptions(step_s=20, control_s=20))


async def test_tokens_equal_generate_with_joins_in_mid_stream_and_idle_workers(
    experts: ExpertsOfCheckpoint, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Two microbatches side by side; requests join at different steps; worker 1 has no rows at first and at last."""
    async with Rig(make_config(), experts) as rig:
        assert await decode_all(rig, prompts, SEATS, NEW_TOKENS) == expected
    assert rig.targets, "no target was executed"


async def test_a_cancelled_step_runs_again_under_another_number(
    experts: ExpertsOfCheckpoint, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A target is lost in the middle of a step, on both workers; meanwhile the other microbatch goes on."""
    async with Rig(make_config(), experts) as rig:
        sequences = [
            Sequence(request, prompts[request], await rig.admit(request % 2, request, prompts[request], NEW_TOKENS))
            for request in range(3)
        ]
        step = 0
        while not sequences[0].done:
            rows_A = {0: [sequences[0].row], 1: [sequences[1].row]}
            if step in (2, 5):
                lost = Target(step // 3, 0, step)
                rig.swallow.add(lost)
                rig.swallowed.clear()
                rig.start_step(0, step, rows_A)
                await rig.swallowed.wait()
                beside = await rig.step(1, step, {0: [sequences[2].row]})
                assert not rig.has_mail(control.StepDone, 0, 0, step)
                for worker in rows_A:
                    rig.post(ATTENTION, worker, control.CancelStep(0, step))
                assert lost not in rig.targets
            else:
                tokens_A = await rig.step(0, step, rows_A)
                sequences[0].tokens.extend(tokens_A[0])
                sequences[1].tokens.extend(tokens_A[1])
                beside = await rig.step(1, step, {0: [sequences[2].row]}) if not sequences[2].done else {}
            for tokens in beside.values():
                sequences[2].tokens.extend(tokens)
            step += 1
    assert [s.tokens for s in sequences[:2]] == expected[:2]
    assert sequences[2].tokens == expected[2]


async def test_a_cancellation_that_crosses_the_report_changes_nothing(
    experts: ExpertsOfCheckpoint, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    async with Rig(make_config(attention=1, ffn=1, microbatches=1), experts) as rig:
        sequence = Sequence(0, prompts[0], await rig.admit(0, 0, prompts[0], NEW_TOKENS))
        for step in range(NEW_TOKENS - 1):
            sequence.tokens.extend((await rig.step(0, step, {0: [sequence.row]}))[0])
            rig.post(ATTENTION, 0, control.CancelStep(0, step))
    assert sequence.tokens == expected[0]


async def test_blocks_of_an_abandoned_request_stay_out_of_use_until_prefill_has_written_them(
    experts: ExpertsOfCheckpoint, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    needed = -(-(len(prompts[0]) + NEW_TOKENS) // 16)
    config = make_config(attention=1, ffn=2, microbatches=1, kv_blocks=2 * needed)
    async with Rig(config, experts) as rig:
        tokens = len(prompts[0]) + NEW_TOKENS
        blocks = await rig.reserve(0, 0, tokens)
        assert len(blocks) == needed
        rig.post(ATTENTION, 0, control.Release(0, quarantine=True, late=True))
        others = await rig.reserve(0, 1, tokens)
        assert not set(others) & set(blocks), "prefill may still write them"
        assert not rig.has_mail(control.Freed, 0, 0)
        rig.post(PREFILL, 0, control.PrefillWork(0, tuple(prompts[0]), 0, blocks, control.Sampling()))
        await rig.mail(control.Freed, 0, 0)
        sequence = Sequence(3, prompts[0], await rig.admit(0, 3, prompts[0], NEW_TOKENS))
        for step in range(NEW_TOKENS - 1):
            sequence.tokens.extend((await rig.step(0, step, {0: [sequence.row]}))[0])
        assert not rig.has_mail(control.KvReady, 0, 0), "nobody waits for that request any more"
    assert sequence.tokens == expected[0]


async def test_a_request_released_during_its_step_keeps_its_blocks_until_the_step_ends(
    experts: ExpertsOfCheckpoint, prompts: list[list[int]]
) -> None:
    needed = -(-(len(prompts[0]) + NEW_TOKENS) // 16)
    async with Rig(make_config(attention=1, ffn=1, microbatches=1, kv_blocks=2 * needed), experts) as rig:
        tokens = len(prompts[0]) + NEW_TOKENS
        sequence = Sequence(0, prompts[0], await rig.admit(0, 0, prompts[0], NEW_TOKENS))
        rig.swallow.add(Target(1, 0, 0))
        rig.start_step(0, 0, {0: [sequence.row]})
        await rig.swallowed.wait()
        rig.post(ATTENTION, 0, control.Release(0, quarantine=False, late=True))
        others = await rig.reserve(0, 1, tokens)
        assert len(others) == needed
        assert not rig.has_mail(control.Freed, 0, 0), "the step writes into them"
        rig.post(ATTENTION, 0, control.CancelStep(0, 0))
        await rig.mail(control.Freed, 0, 0)
        again = await rig.reserve(0, 2, tokens)
        assert not set(again) & set(others), "the blocks come back with the step's end"


async def test_sampled_tokens_depend_on_seed_and_position_alone(
    experts: ExpertsOfCheckpoint, prompts: list[list[int]]
) -> None:
    """The same request alone, in company, and continued from the middle by another prefill gives the same tokens."""
    sampling = control.Sampling(temperature=1.0, top_p=0.95, seed=17)
    async with Rig(make_config(attention=1, ffn=2, microbatches=1), experts) as rig:
        runs = [Sequence(r, prompts[1], await rig.admit(0, r, prompts[1], NEW_TOKENS, sampling)) for r in range(2)]
        other = Sequence(2, prompts[2], await rig.admit(0, 2, prompts[2], NEW_TOKENS))
        for step in range(NEW_TOKENS - 1):
            company = [runs[0], other, runs[1]] if step % 2 else [runs[1], runs[0]]
            tokens = (await rig.step(0, step, {0: [s.row for s in company]}))[0]
            for sequence, token in zip(company, tokens, strict=True):
                sequence.tokens.append(token)
        assert runs[0].tokens == runs[1].tokens
        for cut in (1, 4):
            resumed = await rig.admit(0, 10 + cut, prompts[1] + runs[0].tokens[:cut], NEW_TOKENS, sampling)
            assert resumed == runs[0].tokens[cut]


async def test_a_lost_ffn_worker_ends_the_role_with_an_error_that_names_it(
    experts: ExpertsOfCheckpoint, prompts: list[list[int]]
) -> None:
    async with Rig(make_config(attention=1, ffn=2, microbatches=1), experts) as rig:
        sequence = Sequence(0, prompts[0], await rig.admit(0, 0, prompts[0], NEW_TOKENS))
        rig.kill("ffn-1")
        rig.start_step(0, 0, {0: [sequence.row]})
        assert (await rig.loss_of("attention-0")).startswith("PeerLost: peer ffn-1")
        assert isinstance(rig.failures["attention-0"], PeerLost)


async def test_a_lost_attention_worker_ends_prefill_with_an_error_that_names_it(
    experts: ExpertsOfCheckpoint, prompts: list[list[int]]
) -> None:
    async with Rig(make_config(attention=2, ffn=1, microbatches=1), experts) as rig:
        blocks = await rig.reserve(1, 0, len(prompts[0]))
        rig.kill("attention-1")
        rig.post(PREFILL, 0, control.PrefillWork(0, tuple(prompts[0]), 1, blocks, control.Sampling()))
        assert "peer attention-1" in await rig.loss_of("prefill-0")


@virtual_test
async def test_replies_that_do_not_come_end_the_role_at_the_deadline(
    experts: ExpertsOfCheckpoint, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(make_config(attention=1, ffn=2, microbatches=1), experts, clock=LoopClock()) as rig:
        sequence = Sequence(0, prompts[0], await rig.admit(0, 0, prompts[0], NEW_TOKENS))
        rig.swallow.add(Target(1, 0, 0))
        rig.start_step(0, 0, {0: [sequence.row]})
        assert (await rig.loss_of("attention-0")).startswith(
            "DeadlineExceeded: peer ffn-0, ffn-1: no reply to l1/m0/s0"
        )
    # While they might still have come, the log has named them.
    (warned,) = [record.getMessage() for record in caplog.records if "counts as lost" in record.getMessage()]
    assert warned.startswith("ffn-0, ffn-1: no reply to l1/m0/s0 for ")


@pytest.mark.parametrize(
    ("role", "message"),
    [
        (ATTENTION, control.StepWork.of(0, 0, (Row(99, 1, 0),))),
        (ATTENTION, control.PrefillDone(1, 2)),
        (PREFILL, control.Reserve(1, 2, control.Sampling())),
    ],
)
async def test_a_message_that_makes_no_sense_ends_the_role_with_an_error_that_names_it(
    experts: ExpertsOfCheckpoint, role: str, message: control.Message
) -> None:
    async with Rig(make_config(attention=1, ffn=1, microbatches=1), experts) as rig:
        rig.post(role, 0, message)
        assert (await rig.loss_of(f"{role}-0")).startswith("WireError: peer hub")
