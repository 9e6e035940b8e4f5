"""Completions through OpenAI's own client: exact tokens, streams, choices, stops, log-probabilities."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from afore.models.bundle import bundled_model_path, bundled_prompts
from afore.models.tokenizer import Tokenizer
from tests.serving.http.served import Served

pytestmark = pytest.mark.slow

MODEL = "tiny-glm4moe"
PROMPT = "Question: What is 3 * 4?\nAnswer:"


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(str(bundled_model_path()), dtype=torch.float32, local_files_only=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_model_path())


def test_the_text_is_the_scripting_apis(served: Served, openai: OpenAI) -> None:
    for prompt in bundled_prompts()[::5]:
        ids, text = served.generate(prompt.prompt, max_new_tokens=12)
        answer = openai.completions.create(model=MODEL, prompt=prompt.prompt, max_tokens=12, temperature=0)
        assert answer.choices[0].text == text
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(ids)
        assert answer.choices[0].finish_reason == ("length" if len(ids) == 12 else "stop")


def test_a_stream_adds_up_to_the_whole(openai: OpenAI, tokenizer: Tokenizer) -> None:
    whole = openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    chunks = list(
        openai.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = chunks
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert len(pieces) == 12, "a chunk for each token"
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * 11 + ["length"]
    assert all(piece.usage is None for piece in pieces)
    assert last.choices == []
    assert last.usage == whole.usage
    assert last.usage is not None
    assert last.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert last.usage.total_tokens == last.usage.prompt_tokens + 12
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 0
    assert len({chunk.id for chunk in chunks}) == 1


def test_choices_of_a_seed_are_the_scripting_apis_and_come_again(served: Served, openai: OpenAI) -> None:
    def ask(**options: object) -> list[str]:
        answer = openai.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=10,
            temperature=0.9,
            top_p=0.95,
            n=3,
            seed=11,
            **options,  # type: ignore[call-overload]  # options vary
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first = ask()
    assert ask() == first
    assert len(set(first)) > 1
    assert served.generate(PROMPT, max_new_tokens=10, temperature=0.9, top_p=0.95, seed=11)[1] == first[0]
    streamed = ["", "", ""]
    for chunk in openai.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=10, temperature=0.9, top_p=0.95, n=3, seed=11, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == first
    assert ask(extra_body={"top_k": 1}) == [first_of(served)] * 3


def first_of(served: Served) -> str:
    return served.generate(PROMPT, max_new_tokens=10)[1]


def test_without_a_seed_answers_differ(openai: OpenAI) -> None:
    texts = {
        openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=1.5).choices[0].text
        for _ in range(4)
    }
    assert len(texts) > 1


def test_several_prompts_of_any_kind(served: Served, openai: OpenAI, tokenizer: Tokenizer) -> None:
    prompts = [prompt.prompt[-60:] for prompt in bundled_prompts()[:3]]
    expected = [served.generate(prompt, max_new_tokens=5)[1] for prompt in prompts]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    for given in (prompts, ids):
        answer = openai.completions.create(model=MODEL, prompt=given, max_tokens=5, temperature=0, n=2)
        by_index = {choice.index: choice.text for choice in answer.choices}
        assert [by_index[index] for index in range(6)] == [text for text in expected for _ in range(2)]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids)), "a prompt counts once, whatever n"
    one = openai.completions.create(model=MODEL, prompt=ids[0], max_tokens=5, temperature=0)
    assert one.choices[0].text == expected[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_output_before_it(served: Served, openai: OpenAI, stream: bool) -> None:
    ids, text = served.generate(PROMPT, max_new_tokens=30)
    stop = text[9:22]
    assert text.index(stop) == 9
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stop": ["never there", stop]}
    if stream:
        chunks = list(openai.completions.create(**options, stream=True))  # type: ignore[call-overload]  # options vary
        pieces = [chunk.choices[0].text for chunk in chunks]
        reason = chunks[-1].choices[0].finish_reason
        assert len(chunks) < len(ids)
    else:
        answer = openai.completions.create(**options)  # type: ignore[call-overload]  # options vary
        pieces, reason = [answer.choices[0].text], answer.choices[0].finish_reason
        assert answer.usage.completion_tokens < len(ids)
    assert "".join(pieces) == text[:9]
    assert reason == "stop"


def test_text_that_might_have_become_a_stop_string_comes_in_the_end(served: Served, openai: OpenAI) -> None:
    _, text = served.generate(PROMPT, max_new_tokens=6)
    answer = openai.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, stop=text[-3:] + " and never this"
    )
    assert answer.choices[0].text == text
    assert answer.choices[0].finish_reason == "length"


def test_echo_puts_the_prompt_before_the_output(openai: OpenAI, tokenizer: Tokenizer) -> None:
    plain = openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0).choices[0].text
    echoed = openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, echo=True)
    assert echoed.choices[0].text == PROMPT + plain
    ids = tokenizer.encode(PROMPT)
    chunks = openai.completions.create(model=MODEL, prompt=[ids], max_tokens=4, temperature=0, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + plain


def test_ignore_eos_goes_on_to_the_length(openai: OpenAI) -> None:
    answer = openai.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 60


def test_logprobs_are_the_models_own(served: Served, openai: OpenAI, tokenizer: Tokenizer, reference: Any) -> None:
    """Against transformers' logits of the whole sequence in one pass."""
    answer = openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3)
    report = answer.choices[0].logprobs
    assert report is not None
    assert report.tokens is not None
    assert report.token_logprobs is not None
    assert report.top_logprobs is not None
    assert "".join(report.tokens) == answer.choices[0].text
    prompt = tokenizer.encode(PROMPT)
    output, _ = served.generate(PROMPT, max_new_tokens=8)
    with torch.inference_mode():
        logits_TV = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].double()
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1).numpy()
    for position, token in enumerate(output):
        assert report.token_logprobs[position] == pytest.approx(logprobs_TV[position, token], abs=1e-3)
        best = np.argsort(-logprobs_TV[position], kind="stable")[:3].tolist()
        assert list(report.top_logprobs[position]) == [tokenizer.decode([other]) for other in best]
        assert list(report.top_logprobs[position].values()) == pytest.approx(logprobs_TV[position, best], abs=1e-3)


def test_a_repetition_penalty_gives_what_transformers_gives(
    openai: OpenAI, tokenizer: Tokenizer, reference: Any
) -> None:
    for prompt in (PROMPT, bundled_prompts()[9].prompt[-200:]):
        ids = tokenizer.encode(prompt)
        with torch.inference_mode():
            expected = reference.generate(
                torch.tensor([ids]), max_new_tokens=16, do_sample=False, repetition_penalty=1.3
            )[0, len(ids) :].tolist()
        answer = openai.completions.create(
            model=MODEL, prompt=ids, max_tokens=16, temperature=0, extra_body={"repetition_penalty": 1.3}
        )
        assert answer.choices[0].text == tokenizer.decode(expected)


def test_tokenize_and_detokenize(http: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = http.post("/tokenize", json={"prompt": "héllo 漢字"}).json()
    assert answer == {"count": len(answer["tokens"]), "max_model_len": 2048, "tokens": tokenizer.encode("héllo 漢字")}
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "héllo 漢字"}
    messages = [{"role": "user", "content": "Hi"}]
    assert http.post("/tokenize", json={"messages": messages}).json()["tokens"] == tokenizer.encode_chat(messages)


def test_models(openai: OpenAI) -> None:
    (model,) = openai.models.list()
    assert model.id == MODEL
    assert openai.models.retrieve(MODEL) == model
