from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from afore.core.errors import ConfigError
from afore.models.bundle import bundled_prompts
from afore.models.checkpoint import Checkpoint
from afore.models.loading import verify_checkpoint
from afore.models.local import LocalDecoder
from afore.models.reference import Reference
from afore.models.tokenizer import Tokenizer
from afore.tools.train_corpus import Domain, read_domains, tokenize, train_tokenizer
from afore.tools.train_loop import StepReport, TrainingDiverged, TrainOptions, moe_layers, new_model, train
from afore.tools.train_tiny import main


def flags(**values: float) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


SMALL = flags(hidden=32, experts=8, top_k=2, expert_hidden=16, dense_hidden=32, vocab=400, layers=3)
SHORT = flags(window=24, batch=8, max_positions=256, learning_rate=1e-2)


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Two domains of a few thousand characters."""
    arguments = []
    for domain in ("math", "code"):
        file = tmp_path / f"{domain}.txt"
        file.write_text("\n".join(prompt.prompt for prompt in bundled_prompts() if prompt.domain == domain) * 3)
        arguments.append(f"{domain}={file}")
    return arguments


@pytest.mark.slow
def test_a_few_steps_make_a_model_that_is_served(
    texts: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert main([*texts, "--out", str(out), "--steps", "30", *SMALL, *SHORT]) == 0
    said = capfd.readouterr()
    assert said.out == ""
    assert "held-out loss" in said.err
    assert "shards" not in said.err, "no bars of other libraries"
    record = json.loads((out / "training.json").read_text())
    assert record["steps"] == 30
    assert set(record["held_out_loss"]) == {"math", "code"}
    assert all(loss < np.log(400) - 0.5 for loss in record["held_out_loss"].values()), "it has learnt something"

    tokenizer = Tokenizer(out)
    prompts = [tokenizer.encode(prompt.prompt) for prompt in bundled_prompts()[::12]]
    assert tokenizer.encode_chat([{"role": "user", "content": "Why?"}])[0] == 1
    with Checkpoint(out) as checkpoint:
        verify_checkpoint(checkpoint)
        assert checkpoint.spec.eos_ids == (2,)
        assert checkpoint.read("model.layers.1.mlp.gate.e_score_correction_bias").dtype == torch.float32
        assert checkpoint.read("model.embed_tokens.weight").dtype == torch.bfloat16
        decoder = LocalDecoder.load(checkpoint)
    reference = Reference(out)
    outputs = decoder.generate(prompts, [8] * len(prompts))
    for ids, ours in zip(prompts, outputs, strict=True):
        difference = reference.first_difference(ids, ours, reference.generate(ids, 8))
        assert difference is None or difference.margin < 1e-4, str(difference)


@pytest.mark.slow
def test_the_same_seed_and_steps_give_the_same_weights(texts: list[str], tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        arguments = ["--out", str(tmp_path / name), "--steps", "3", "--seed", seed]
        assert main([*texts, *arguments, *SMALL, *SHORT]) == 0
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def small_model() -> object:
    config = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "moe_intermediate_size": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    return new_model(config, seed=0)


OPTIONS = TrainOptions(batch=2, window=8)


@pytest.fixture
def domain() -> Domain:
    tokens = np.random.default_rng(0).integers(3, 64, size=200)
    return Domain("noise", tokens[:150], tokens[150:])


def test_sorted_experts_and_their_gradients_equal_the_modules_own() -> None:
    experts = moe_layers(small_model())[0].mlp.experts
    torch.manual_seed(1)
    ids_TK = torch.stack([torch.randperm(8)[:2] for _ in range(20)])
    weights_TK = torch.rand(20, 2)
    results = []
    for forward in (experts.forward, type(experts).forward.__wrapped__.__get__(experts)):
        hidden = torch.randn(20, 16, generator=torch.Generator().manual_seed(3), requires_grad=True)
        experts.zero_grad()
        out = forward(hidden, ids_TK, weights_TK)
        torch.autograd.backward(out.square().sum())
        assert hidden.grad is not None
        results.append((out.detach(), hidden.grad, experts.gate_up_proj.grad.clone(), experts.down_proj.grad.clone()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_correction_bias_moves_towards_equal_use(domain: Domain) -> None:
    model = small_model()
    router = moe_layers(model)[0].mlp.gate
    used = torch.zeros(8)

    def count(module: object, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        used.add_(torch.bincount(output[2].reshape(-1), minlength=8))

    router.register_forward_hook(count)
    train(model, [domain], OPTIONS, float, lambda step: None)
    assert used.sum() == 2 * 8 * 2, "one step"
    expected = 0.01 * torch.sign(used.mean() - used)
    assert torch.equal(router.e_score_correction_bias, expected)
    assert len(set(expected.tolist())) > 1


def test_ctrl_c_keeps_what_was_learnt(domain: Domain) -> None:
    reports: list[StepReport] = []

    def interrupt(step: StepReport) -> None:
        reports.append(step)
        if step.step == 2:
            raise KeyboardInterrupt

    steps = train(small_model(), [domain], OPTIONS, lambda step: step / 100, interrupt)
    assert steps == 2
    assert [report.step for report in reports] == [0, 1, 2]


def test_a_loss_that_is_no_number_ends_training(domain: Domain) -> None:
    model = small_model()
    with torch.no_grad():
        moe_layers(model)[0].mlp.gate.weight.fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match="step 0"):
        train(model, [domain], OPTIONS, float, lambda step: None)


def test_documents_come_from_text_and_three_shapes_of_json_lines(tmp_path: Path) -> None:
    lines = tmp_path / "mixed.jsonl"
    records = [{"text": "plain"}, {"prompt": " Hi ", "response": "Ho"}, {"question": "1+1?", "answer": "2", "id": 3}]
    lines.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    text = tmp_path / "book.txt"
    text.write_text("a line\n" * 1000)
    domains = read_domains([str(lines), f"mixed={text}", str(text)])
    assert domains["mixed"][:3] == ["plain", "User: Hi\nAssistant: Ho", "Question: 1+1?\nAnswer: 2"]
    assert "".join(domains["book"]) == text.read_text() == "".join(domains["mixed"][3:])
    assert len(domains["book"]) == 3


def test_the_held_out_part_is_not_trained_on(tmp_path: Path) -> None:
    documents = {"one": [f"document number {n}" for n in range(300)]}
    tokenizer = train_tokenizer(documents["one"], 300)
    (domain,) = tokenize(documents, tokenizer, window=20, seed=1)
    whole = [*domain.train_n.tolist(), *domain.held_out_n.tolist()]
    assert tokenizer.decode(whole) != ""
    assert whole.count(1) == whole.count(2) == 300, "every document once, between its begin and end"
    assert len(domain.held_out_n) == max(int(len(whole) * 0.03), 22)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds no text"),
        (b"\xff\xfe", "not UTF-8"),
        (b"too short", "tokens"),
    ],
)
def test_texts_that_cannot_be_used_are_refused(
    tmp_path: Path, content: bytes, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    out = tmp_path / "model"
    assert main([str(file), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("line", "problem"),
    [("{", "line 2 is not JSON"), ("[1]", "line 2 has no text"), ('{"body": "x"}', "prompt/response")],
)
def test_json_lines_without_text_are_refused_by_number(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=problem):
        read_domains([str(file)])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--top-k", "9", "--experts", "8"], "top-k"),
        (["--experts", "1", "--top-k", "1"], "experts"),
        (["--layers", "1"], "layers"),
        (["--heads", "3"], "heads"),
        (["--window", "4096"], "window"),
        (["--minutes", "0"], "minutes"),
        (["--learning-rate", "nan"], "learning-rate"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(
    texts: list[str], tmp_path: Path, arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*texts, "--out", str(tmp_path / "model"), *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"train_tiny: {field}: ")


def test_a_directory_that_is_not_empty_is_left_alone(texts: list[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    assert main([*texts, "--out", str(tmp_path)]) == 2
    assert main([*texts, "--out", texts[0].partition("=")[2]]) == 2
    assert sorted(tmp_path.iterdir()) == before
