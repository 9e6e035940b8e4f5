"""The door's options under the names that other servers gave them, and what the launcher prints of its address."""

from __future__ import annotations

import json
import shlex

import pytest

from afore.core.config import RunConfig, ServeOptions
from afore.core.errors import ConfigError
from afore.serving.options import parse
from afore.serving.ready import curl_line


def test_short_names_mean_the_long_ones() -> None:
    arguments = (
        "--host 0.0.0.0 --port=0 --allow-remote-without-key --served-model-name m --max-model-len 512 --max-num-seqs 5 "
        "--kv_blocks 9"
    )
    _, config = parse(arguments.split())
    assert config.serve == ServeOptions(host="0.0.0.0", port=0, allow_remote_without_key=True, served_model_name="m")
    assert (config.batch.max_model_len, config.batch.max_num_seqs, config.batch.kv_blocks) == (512, 5, 9)
    assert parse(["--serve.port", "9"])[1] == parse(["--port", "9"])[1]
    assert parse(["--api-key", "k"])[1].serve.api_key == "k"
    assert not parse([])[1].serve.http, "the launcher decides that"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--host", "0.0.0.0"], "serve.host"),
        (["--port", "70000"], "serve.port"),
        (["--api-key", ""], "serve.api_key"),
        (["--max-num-seqs", "0"], "batch.max_num_seqs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(arguments)
    assert refused.value.field == field


def test_the_printed_command_says_what_to_send_and_keeps_the_key() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", RunConfig(serve=ServeOptions(api_key="hush"))))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/completions"]
    assert json.loads(words[-1])["model"] == "tiny-glm4moe"
    assert "Authorization: Bearer $AFORE_KEY" in words
    assert "hush" not in " ".join(words)
