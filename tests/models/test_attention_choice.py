"""Which attention a GPU runs, and why."""

from __future__ import annotations

from afore.models.attention_choice import attention_way


def test_why_sdpa() -> None:
    assert attention_way("float32", (9, 0), lambda name: None) == (
        "sdpa",
        "flash_attn is not installed; flashinfer is not installed",
    )
    name, why = attention_way("float32", (9, 0), lambda name: object())
    assert name == "sdpa"
    assert why.startswith("flash_attn computes bfloat16 and float16, not float32; flashinfer computes")
    assert attention_way("bfloat16", (7, 0), lambda name: object())[0] == "sdpa"


def test_the_first_that_is_capable() -> None:
    assert attention_way("bfloat16", (8, 0), lambda name: object())[0] == "flash_attn"
    assert attention_way("bfloat16", (7, 5), lambda name: object())[0] == "flashinfer"
    only = attention_way("float16", (9, 0), lambda name: object() if name == "flashinfer" else None)
    assert only == ("flashinfer", "it is installed and computes float16")
