"""Answers of several prompts: one that cannot be answered says so and holds up no other."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rich.console import Console

from afore.cluster import Token
from afore.core.clock import WallClock
from afore.core.config import RunConfig, ServeOptions
from afore.core.errors import ConfigError, PromptTooLong, RoleLost
from afore.models.bundle import Prompt
from afore.serving import demo
from afore.serving.ready import print_address


class Cluster:
    """Answers each prompt with its letters, up to the limit; refuses one that is too long; dies at the word."""

    clock = WallClock()

    async def generate(self, prompt: str, *, max_new_tokens: int) -> AsyncIterator[Token]:
        if len(prompt) > 10:
            raise PromptTooLong("r0", "11 exceed 10", "shorten it")
        if prompt == "die":
            raise RoleLost("ffn-0", "killed")
        for index, letter in enumerate(prompt[:max_new_tokens]):
            last = index + 1 == min(len(prompt), max_new_tokens)
            finish = ("length" if len(prompt) > max_new_tokens else "stop") if last else ""
            yield Token(id=ord(letter), text=letter, index=index, at_ns=self.clock.now_ns(), finish_reason=finish)

    async def stats(self) -> dict[str, Any]:
        return {"imbalance": {}, "migration": {}, "counters": {}}


def prompt(text: str, most: int = 9) -> Prompt:
    return Prompt(id=text[:4], domain="", prompt=text, max_new_tokens=most)


async def test_one_that_is_too_long_fails_by_name_and_the_others_are_answered() -> None:
    console = Console(file=io.StringIO())
    prompts = [prompt("one"), prompt("much too long"), prompt("two")]
    answers = await demo.answer_all(Cluster(), prompts, console)
    assert [answer.text for answer in answers] == ["one", "", "two"]
    assert [answer.error for answer in answers] == ["", "11 exceed 10; shorten it", ""]
    result = demo.summarise(answers, await Cluster().stats(), "static", "")
    assert (result["requests"], result["completed"]) == (3, 2)
    assert [entry.get("error") for entry in result["answers"]] == [None, "11 exceed 10; shorten it", None]


async def test_a_lost_role_ends_all_of_them() -> None:
    with pytest.raises(RoleLost):
        await demo.answer_all(Cluster(), [prompt("one"), prompt("die")], Console(file=io.StringIO()))


async def test_an_answer_that_was_cut_off_says_so() -> None:
    cut = await demo.answer_one(Cluster(), prompt("three", 2))
    assert cut.text == "th"
    assert demo.limit_note(cut) == "(stopped at the limit of 2 tokens; --max-new-tokens raises it)"
    assert demo.limit_note(await demo.answer_one(Cluster(), prompt("one"))) == ""
    with pytest.raises(PromptTooLong):
        await demo.answer_one(Cluster(), prompt("much too long"))


def test_text_of_the_user_is_printed_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=200)
    print_address("http://127.0.0.1:1", RunConfig(serve=ServeOptions(served_model_name="org/[/x]")), console)
    assert isinstance(console.file, io.StringIO)
    assert "serving org/[/x] at http://127.0.0.1:1" in console.file.getvalue()


def test_an_endless_file_of_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompts: /dev/zero is longer than 64 MiB"):
        demo.read_prompts("/dev/zero", 1)
