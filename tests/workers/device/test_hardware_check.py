"""Profiles that cannot be: each refused at the door, with the number's name, whatever the file holds."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from afore.core.errors import ConfigError
from afore.workers.device.hardware import parse_profile, profile_text, read_profile

TEXT = profile_text("a100-glm45air")
RAW: dict[str, Any] = yaml.safe_load(TEXT)


def changed(name: str, value: Any, what: str = "value") -> dict[str, Any]:
    content = copy.deepcopy(RAW)
    group, _, field = name.partition(".")
    content[group][field][what] = value
    return content


RATES = [
    "shape.weight_bytes",
    "chip.memory_gb_per_s",
    "chip.memory_efficiency",
    "chip.tflops",
    "chip.gemm_efficiency",
    "chip.dense_efficiency",
    "wires.link_gb_per_s",
    "wires.link_efficiency",
]
COUNTS = [
    "shape.layers",
    "shape.hidden",
    "shape.expert",
    "shape.experts",
    "shape.top_k",
    "shape.heads",
    "shape.kv_heads",
    "shape.head_dim",
    "shape.vocabulary",
    "chip.tile_tokens",
]


@pytest.mark.parametrize("value", [0, 1e-300, 1e300, float("inf"), float("nan"), 10**400, "1", [1], None, True])
@pytest.mark.parametrize("name", [*RATES, *COUNTS])
def test_no_number_that_makes_no_sense_comes_in(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_profile(changed(name, value), "mine.yaml")


@pytest.mark.parametrize("name", [*COUNTS, "shape.dense_layers"])
def test_what_is_counted_is_whole(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: .*whole number"):
        parse_profile(changed(name, 2.5), "mine.yaml")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("shape.top_k", 129, "129 of 128 experts"),
        ("shape.experts", 100_000, "16384"),
        ("shape.dense_layers", 46, "none has experts"),
        ("chip.gemm_efficiency", 1e-8, "a tile takes"),
        ("chip.layer_host_us", 1e10, "a target's experts takes"),
        ("wires.message_us", 1e11, "a message takes"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(name: str, value: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_profile(changed(name, value), "mine.yaml")


@pytest.mark.parametrize(
    "content",
    [
        os.urandom(64) + b"\xff",
        b"",
        b"[1, 2]",
        TEXT.encode() + b"# \xe9\n",
        TEXT.encode() + b"\x00",
        b"[" * 10_000,
        b"? [a]\n: b\n",
        b"!!python/object/apply:os.getcwd []",
        b"a: 2001-99-99\n",
        TEXT.replace("value: 312", "value: " + "9" * 5000).encode(),
        b"#" * ((1 << 20) + 1),
    ],
    ids=["binary", "empty", "list", "latin", "nul", "deep", "unhashable", "tag", "date", "digits", "long"],
)
def test_a_file_of_anything_else_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"profile.*mine\.yaml") as refused:
        read_profile(str(path))
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize("name", ["nowhere.yaml", "a\0b.yaml", "folder.yaml", "pipe.yaml"])
def test_what_is_no_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="profile"):
        read_profile(str(tmp_path / name))


@pytest.mark.parametrize(("line", "key"), [("name: other", "name"), ("chip: {}", "chip")])
def test_a_key_that_stands_there_twice_is_refused(line: str, key: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"{TEXT}\n{line}\n")
    with pytest.raises(ConfigError, match=f"'{key}' stands there twice"):
        read_profile(str(path))


def test_aliases_do_not_fill_a_message(tmp_path: Path) -> None:
    lines = [
        "a: &a [x, x]",
        *(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    ]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(lines) + "\n" + TEXT.replace("value: 312", "value: *i"))
    with pytest.raises(ConfigError) as refused:
        read_profile(str(path))
    assert len(str(refused.value)) < 700


def test_texts_stand_on_one_line_and_hold_no_escapes() -> None:
    assert parse_profile(RAW | {"about": "two\n lines "}, "mine.yaml").about == "two lines"
    with pytest.raises(ConfigError, match="printable"):
        parse_profile(RAW | {"about": "\x1b[31mred"}, "mine.yaml")
    with pytest.raises(ConfigError, match=r"chip\.tflops"):
        parse_profile(changed("chip.tflops", "\x1b[31m", "source"), "mine.yaml")
