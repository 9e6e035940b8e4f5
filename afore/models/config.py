"""What a checkpoint's configuration says about the model, read from local files only.

``ModelSpec`` is what every role needs to know: plain values, no ``transformers`` object. Importing it costs nothing:
``transformers`` (seconds) is imported only where a configuration is read, so that virtual time never pays for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afore.core.errors import CheckpointError
from afore.core.topology import MAX_LAYERS
from afore.models.expert_form import SILU_GATED, ExpertForm
from afore.models.families import FAMILIES, Family, HeadsAndDim

LOCAL_DIRECTORY = "give a local directory with config.json, tokenizer and *.safetensors files; nothing is downloaded"
_MOST_BYTES = 64 << 20
"""Of a JSON file beside the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The numbers of a model that roles, planner and transport need."""

    family: str
    """``model_type`` of config.json."""
    num_layers: int
    """All decoder layers, dense and sparse, without multi-token-prediction layers."""
    moe_layers: tuple[int, ...]
    """Model layer index of each MoE layer; the position in this tuple is the MoE ordinal 0…L-1."""
    num_experts: int
    """E, routed experts of each MoE layer."""
    experts_per_token: int
    """K."""
    hidden_size: int
    """D."""
    expert_size: int
    """I, hidden size of one routed expert."""
    expert_dtype: str
    """What the checkpoint stores, such as ``bfloat16``; roles may compute in another."""
    has_shared_experts: bool
    vocab_size: int
    eos_ids: tuple[int, ...]
    """Tokens that end a sequence; may be empty."""
    max_positions: int
    """Longest sequence, prompt and generated tokens together."""
    num_heads: int
    """Query heads."""
    kv_parts: tuple[HeadsAndDim, HeadsAndDim]
    """(heads, dim) of the two tensors that a layer caches per token, as ``Cache.update`` receives them."""
    expert_form: ExpertForm = SILU_GATED
    """What a routed expert holds and computes."""

    @property
    def num_moe_layers(self) -> int:
        """L."""
        return len(self.moe_layers)

    @property
    def expert_elements(self) -> int:
        """Numbers in one routed expert: gate, up and down, and biases where it has them."""
        return self.expert_form.elements(self.hidden_size, self.expert_size)


def read_config(path: str | Path, families: Mapping[str, Family] = FAMILIES) -> tuple[ModelSpec, Family, Any]:
    """Reads ``path``/config.json: the spec, the family's adapter and the ``transformers`` configuration.

    Raises ``CheckpointError`` with cause and remedy for a directory or configuration that cannot be served.
    """
    from transformers import AutoConfig

    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(str(path), "no such directory", LOCAL_DIRECTORY)
    raw = _read_json(directory / "config.json", LOCAL_DIRECTORY)
    family = _supported_family(directory / "config.json", raw, families)
    layers = raw.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:  # transformers makes lists as long
        raise CheckpointError(
            str(directory / "config.json"),
            f"num_hidden_layers is {layers:,}; {MAX_LAYERS:,} is the most",
            "copy the file again from where the model was published",
        )
    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds here, for values that config.json holds
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            str(directory / "config.json"),
            f"transformers refuses it: {' '.join(map(str.strip, reason[:2])) or type(error).__name__}",
            "copy the file again from where the model was published",
        ) from error
    return _spec(directory, config, family), family, config


def read_spec(path: str | Path, families: Mapping[str, Family] = FAMILIES) -> ModelSpec:
    """The ``ModelSpec`` of the checkpoint in directory ``path``. Raises ``CheckpointError``."""
    return read_config(path, families)[0]


def _read_json(file: Path, remedy: str) -> dict[str, Any]:
    try:
        if file.exists() and not file.is_file() and not file.is_dir():
            raise CheckpointError(
                str(file), "is no file: a pipe or a device may never end", "copy what it gives into a file"
            )
        if file.is_file() and file.stat().st_size > _MOST_BYTES:
            raise CheckpointError(str(file), f"has more than {_MOST_BYTES >> 20} MiB", "copy the file again")
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(str(file), "file is missing", remedy) from error
    except (ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8, or a number of too many digits
        raise CheckpointError(str(file), f"not JSON ({error})", "copy the file again") from error
    except OSError as error:
        raise CheckpointError(str(file), f"cannot be read ({error.strerror})", "check its permissions") from error
    if not isinstance(content, dict):
        raise CheckpointError(str(file), f"holds a {type(content).__name__}, not an object", "copy the file again")
    return content


def _supported_family(file: Path, raw: dict[str, Any], families: Mapping[str, Family]) -> Family:
    model_type = raw.get("model_type")
    family = families.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(
            str(file),
            f"model_type {model_type!r} is not supported",
            f"use a checkpoint whose model_type is one of: {', '.join(families)}",
        )
    quantisation = raw.get("quantization_config", raw.get("compression_config"))
    if quantisation is not None:
        raise CheckpointError(
            str(file),
            f"the weights are quantised ({_quantisation_name(quantisation)})",
            f"use a bfloat16, float16 or float32 release of {family.title}",
        )
    return family


def _quantisation_name(quantisation: object) -> str:
    if not isinstance(quantisation, dict):
        return repr(quantisation)
    method = str(quantisation.get("quant_method", "unnamed method"))
    detail = quantisation.get("fmt") or quantisation.get("format") or quantisation.get("bits")
    return f"{method}, {detail}" if detail is not None else method


def _spec(directory: Path, config: Any, family: Family) -> ModelSpec:
    file = str(directory / "config.json")
    spec = ModelSpec(
        family=family.model_type,
        num_layers=config.num_hidden_layers,
        moe_layers=family.moe_layers(config),
        num_experts=getattr(config, family.num_experts),
        experts_per_token=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        expert_size=getattr(config, family.expert_size),
        expert_dtype=str(config.dtype or "float32").removeprefix("torch."),
        has_shared_experts=family.has_shared(config),
        vocab_size=config.vocab_size,
        eos_ids=_eos_ids(directory, config),
        max_positions=_max_positions(config),
        num_heads=config.num_attention_heads,
        kv_parts=family.kv_parts(config),
        expert_form=family.expert_form(config),
    )
    if not spec.moe_layers:
        raise CheckpointError(file, "the model has no MoE layer", "use a model with routed experts")
    if not 1 <= spec.experts_per_token <= spec.num_experts:
        raise CheckpointError(
            file,
            f"{spec.experts_per_token} experts per token of {spec.num_experts} experts",
            "copy the file again from where the model was published",
        )
    if config.hidden_act != "silu":
        raise CheckpointError(
            file, f"hidden_act {config.hidden_act!r} is not supported", "use a model whose experts are silu-gated"
        )
    refusal = family.refusal(config)
    if refusal is not None:
        raise CheckpointError(file, refusal, "copy the file again from where the model was published")
    return spec


def _max_positions(config: Any) -> int:
    """Rotary tables of kind ``longrope`` are others beyond the original length, for a whole batch at once: rows of one step would
    change each other there, and what is cached would be of the wrong table. Sequences end before it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        return min(int(original), int(config.max_position_embeddings))
    return int(config.max_position_embeddings)


def _eos_ids(directory: Path, config: Any) -> tuple[int, ...]:
    """As ``generate`` has it: generation_config.json where there is one, the configuration otherwise."""
    generation = directory / "generation_config.json"
    eos = _read_json(generation, "").get("eos_token_id") if generation.exists() else None
    eos = config.eos_token_id if eos is None else eos
    if eos is None:
        return ()
    return tuple(int(token) for token in eos) if isinstance(eos, list) else (int(eos),)
