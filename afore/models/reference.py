"""What AFORE's tokens are compared with: ``transformers``' own loader and ``generate``, batch 1, greedy, one thread.

Also random checkpoints to compare on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, Glm4MoeConfig, Glm4MoeForCausalLM

from afore.models.bundle import bundled_model_path
from afore.models.checkpoint import INDEX_FILE, SINGLE_FILE
from afore.models.quiet import no_progress_bar, one_thread

_RANDOM_DEFAULTS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 1024,
    "use_qk_norm": True,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which an output departs from the reference, and how sure the reference was there."""

    position: int
    """Index within the generated tokens."""
    ours: int | None
    """``None``: the output ends here."""
    reference: int | None
    """``None``: the reference ends here."""
    margin: float
    """The reference's logit of its token minus its logit of ours; infinite when one of the two ends."""
    top2_margin: float
    """The reference's best logit minus its second best at this position."""
    resume_ids: tuple[int, ...]
    """Prompt and reference tokens up to and with this position: compare on from here, teacher-forced."""

    def __str__(self) -> str:
        return (
            f"token {self.position}: {self.ours} instead of {self.reference}, "
            f"reference's margin {self.margin:.2e} (top two {self.top2_margin:.2e})"
        )


class Reference:
    """``transformers``' model of a checkpoint directory, loaded by ``transformers`` itself."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        with one_thread(), no_progress_bar():
            self._model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, local_files_only=True)
        self._eos = self._model.generation_config.eos_token_id
        # What a call leaves unset is taken from here: a checkpoint's own end tokens, penalties, sampling. Greedy knows none.
        self._model.generation_config = GenerationConfig()

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """Greedy tokens after ``prompt_ids``; ends with the end token unless ``ignore_eos``."""
        eos = None if ignore_eos else self._eos
        config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=0)
        ids = torch.tensor([list(prompt_ids)], dtype=torch.int64)
        with one_thread(), torch.inference_mode():
            output = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return [int(token) for token in output[0, len(prompt_ids) :]]

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [V] after ``token_ids``, in one pass."""
        with one_thread(), torch.inference_mode():
            output = self._model(input_ids=torch.tensor([list(token_ids)], dtype=torch.int64), logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    def first_difference(
        self, prompt_ids: Sequence[int], ours: Sequence[int], reference: Sequence[int]
    ) -> Difference | None:
        """Where ``ours`` departs from ``reference`` (both generated after ``prompt_ids``), or ``None``.

        Float32 sums in another order move logits by about 1e-5: a difference counts as none while ``margin`` is below 1e-4.
        """
        length = max(len(ours), len(reference))
        for position in range(length):
            mine = ours[position] if position < len(ours) else None
            theirs = reference[position] if position < len(reference) else None
            if mine == theirs:
                continue
            logits_V = self.logits([*prompt_ids, *reference[:position]])
            best = torch.topk(logits_V, 2).values
            margin = float("inf") if mine is None or theirs is None else float(logits_V[theirs] - logits_V[mine])
            resume = (*prompt_ids, *reference[: position + 1])
            return Difference(position, mine, theirs, margin, float(best[0] - best[1]), tuple(resume))
        return None


def reference_generate(
    path: str | Path,
    prompts_ids: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> list[list[int]]:
    """Greedy tokens of each prompt by ``transformers.generate`` at batch 1, on one thread."""
    counts = [max_new_tokens] * len(prompts_ids) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    reference = Reference(path, dtype)
    return [reference.generate(ids, count) for ids, count in zip(prompts_ids, counts, strict=True)]


def random_checkpoint(
    directory: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = None,
    mtp_layer: bool = False,
    tokenizer: bool = False,
    **config: Any,
) -> Path:
    """Writes a small random Glm4Moe checkpoint into ``directory`` (made if need be) and returns it.

    Routers are drawn from N(0, 0.3) and correction biases from N(0, 0.05), so that routing is skewed and rows differ.
    ``config`` overrides values of ``Glm4MoeConfig``; ``max_shard_size`` such as ``"200KB"`` splits the weights into shards with an
    index; ``mtp_layer`` adds a multi-token-prediction layer as published checkpoints have it; ``tokenizer`` copies the
    bundled one (vocabulary 4,096).
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {**_RANDOM_DEFAULTS, **({"vocab_size": 4096} if tokenizer else {}), **config}
    model_config = Glm4MoeConfig(**values, num_nextn_predict_layers=int(mtp_layer), dtype=dtype)
    with one_thread(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Glm4MoeForCausalLM(model_config)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("mlp.gate.weight"):
                tensor.normal_(0.0, 0.3)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(0.0, 0.05)
            elif not name.endswith("inv_freq"):
                tensor.data = tensor.data.to(dtype)
        with no_progress_bar():
            model.save_pretrained(str(path), **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    if mtp_layer:
        _add_mtp_layer(path, model_config.num_hidden_layers, model_config.hidden_size)
    if tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(bundled_model_path() / name, path / name)
    return path


def _add_mtp_layer(path: Path, layer: int, hidden_size: int) -> None:
    """Appends two tensors of a layer behind the last to the checkpoint's last file."""
    index = path / INDEX_FILE
    mapping = json.loads(index.read_text(encoding="utf-8")) if index.exists() else None
    file = SINGLE_FILE if mapping is None else max(mapping["weight_map"].values())
    extra = {
        f"model.layers.{layer}.eh_proj.weight": torch.randn(hidden_size, 2 * hidden_size),
        f"model.layers.{layer}.mlp.experts.0.gate_proj.weight": torch.randn(hidden_size, hidden_size),
    }
    save_file({**load_file(path / file), **extra}, path / file, metadata={"format": "pt"})
    if mapping is not None:
        mapping["weight_map"].update(dict.fromkeys(extra, file))
        index.write_text(json.dumps(mapping), encoding="utf-8")
