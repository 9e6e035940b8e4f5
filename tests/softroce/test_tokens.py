"""A cluster whose attention and FFN workers are on nodes with nothing but RDMA between them: the model's own tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from afore.models.bundle import bundled_model_path, bundled_prompts
from afore.models.reference import Reference
from afore.models.tokenizer import Tokenizer
from tests.serving.exact import differences
from tests.serving.launcher import Launcher
from tests.softroce.device import need_device, sent_packets

pytestmark = [pytest.mark.slow, pytest.mark.processes]

PROMPTS, TOKENS = 6, 12
PATIENCE_S = 900.0
"""Emulated machines are slow."""
NODES = """
attention: 1
ffn: 2
redundant_slots: 4
fabric: verbs
nodes:
  a: door,attention,prefill
  b: scheduler,ffn-0
  c: ffn-1
"""
"""Experts on two nodes: their weights are read over RDMA too."""


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """A test that fails must not leave its processes to the tests after it."""
    yield
    while Launcher.started:
        launcher = Launcher.started.pop()
        if launcher.process.returncode is None:
            launcher.kill_all()
            launcher.process.communicate()


@pytest.mark.parametrize("api", ["pyverbs", "ibverbs"])
def test_attention_and_experts_over_verbs_answer_as_the_model_does(
    api: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    device = need_device(request, api)
    topology, prompts, out = tmp_path / "nodes.yaml", tmp_path / "prompts.jsonl", tmp_path / "result.json"
    topology.write_text(NODES)
    texts = [prompt.prompt for prompt in bundled_prompts()][:PROMPTS]
    prompts.write_text("".join(json.dumps({"prompt": text, "max_new_tokens": TOKENS}) + "\n" for text in texts))
    before = sent_packets(device)
    launcher = Launcher(
        "--topology", str(topology), "--verbs.api", api, "--prompts", str(prompts), "--json", str(out),
        "--planner.tile_tokens", "1", "--times.join_s", str(PATIENCE_S),
    )  # fmt: skip
    status, stdout, stderr = launcher.end(PATIENCE_S)
    assert status == 0, f"{stdout}\n{stderr}"
    assert launcher.leftovers() == []
    packets = sent_packets(device) - before
    result = json.loads(out.read_text())
    assert result["completed"] == PROMPTS
    encode = Tokenizer(bundled_model_path()).encode
    ours = [answer["token_ids"] for answer in result["answers"]]
    assert (
        differences(Reference(bundled_model_path()), [encode(text) for text in texts], ours, [TOKENS] * PROMPTS) == []
    )
    # Every layer of every token has crossed: its demand, its rows to the experts and back.
    assert packets > 2 * PROMPTS * TOKENS
    sys.stdout.write(
        f"{api}: {result['tokens']} tokens as the model's own, {packets} packets over {device}, "
        f"{result['migration']['copies']} experts copied\n"
    )
