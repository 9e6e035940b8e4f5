"""Whatever the documentation names is there: links, files, commands, options, configuration keys, spans, policies."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from afore.core.control import WIRE_VERSION
from afore.core.errors import ConfigError
from afore.core.trace import SPANS
from afore.core.version import VERSION
from afore.scheduler.policies.registry import POLICIES
from afore.serving.options import build_parser, parse
from tests.docs.pages import PAGES, ROOT, Page

FOLDERS = ("afore/", "transport/", "workers/", "scheduler/", "tools/", "docs/", "tests/")
SECTIONS = ("topology", "planner", "costs", "batch", "serve", "times", "device", "verbs")
MISTAKES = frozenset({"topolgy.ffn"})
"""Options that a page gives in order to show how they are refused."""
pages = pytest.mark.parametrize("page", [Page(name) for name in PAGES], ids=PAGES)


@pages
def test_relative_links_and_anchors_resolve(page: Page) -> None:
    for link in page.links:
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), link
        if anchor:
            assert anchor in Page(str(path.relative_to(ROOT))).anchors, link


@pages
def test_the_wire_version_that_is_shown_is_the_present_one(page: Page) -> None:
    for version in re.findall(r"speaks wire version (\d+)", page.text):
        assert int(version) == WIRE_VERSION


@pages
def test_files_and_folders_exist(page: Page) -> None:
    for code in page.inline:
        if code.startswith(FOLDERS) and " " not in code:
            assert (ROOT / code).exists(), code
            assert not code.endswith("/") or (ROOT / code).is_dir(), code


def exists(dotted: str) -> bool:
    """A module, or a name within one."""
    module, _, name = dotted.rpartition(".")
    try:
        return importlib.util.find_spec(dotted) is not None
    except ModuleNotFoundError:
        return hasattr(importlib.import_module(module), name)


@pages
def test_dotted_names_of_modules_exist(page: Page) -> None:
    for code in page.inline:
        if re.fullmatch(r"afore(\.\w+)+", code):
            assert exists(code), code


def launcher_keys() -> frozenset[str]:
    return frozenset(build_parser().known_keys()) | {"config", "print_config", "help"}


@pytest.mark.slow
@pages
def test_configuration_keys_exist(page: Page) -> None:
    known = launcher_keys()
    for code in page.inline:
        if re.fullmatch(rf"({'|'.join(SECTIONS)})\.\w+", code) and not code.endswith(".yaml"):
            assert code in known, code


def options_of(module: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What ``--help`` of a tool prints, for its subcommand where it has some."""
    with_commands = ("afore.tools.trace", "afore.tools.bench", "afore.tools.plan", "afore.tools.traces")
    subcommand = arguments[:1] if module in with_commands or arguments[:1] in (["plan"], ["reality"]) else []
    with pytest.raises(SystemExit):
        importlib.import_module(module).main([*subcommand, "--help"])
    return capsys.readouterr().out


@pytest.mark.slow
@pages
def test_commands_exist_with_their_options(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    known = launcher_keys()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for command in page.commands:
        words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        if words[0] == "make":
            assert len(words) == 1 or words[1] in targets, command
            continue
        assert Path(words[0]).name == "python", command
        if words[1] != "-m":
            assert (ROOT / words[1]).is_file(), command
            continue
        module, arguments = words[2], words[3:]
        assert importlib.util.find_spec(module) is not None, command
        for word in arguments:
            if not word.startswith("-"):
                continue
            option = word.split("=")[0]
            if module == "afore.launch":
                assert option.lstrip("-").replace("-", "_") in known | MISTAKES, command
            else:
                assert re.search(rf"(?<![\w-]){re.escape(option)}\b", options_of(module, arguments, capsys)), command


@pytest.mark.slow
@pages
def test_options_in_prose_exist(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    known = {key.replace("_", "-") for key in launcher_keys()} | {"rw", "stop"}
    for tool, *subcommand in (
        ("doctor",),
        ("calibrate",),
        ("evaluate",),
        ("evaluate", "plan"),
        ("evaluate", "reality"),
        ("gpu_check",),
        ("inspect",),
        ("top",),
        ("train_tiny",),
        ("bench", "serve"),
        ("bench", "planner"),
        ("bench", "path"),
        ("bench", "transport"),
        ("top",),
        ("trace", "summary"),
        ("wire", "replay"),
        ("plan", "explain"),
        ("plan", "table2"),
        ("replay",),
        ("traces", "info"),
        ("traces", "import"),
        ("traces", "export"),
    ):
        known |= set(re.findall(r"--([\w-]+)", options_of(f"afore.tools.{tool}", subcommand, capsys)))
    for code in page.inline:
        for option in re.findall(r"(?:^|[\s(])--([\w.-]+)", code):
            assert option.replace("_", "-") in known, code


def test_every_span_has_its_step_and_every_policy_its_row() -> None:
    life = Page("docs/life-of-a-microbatch.md")
    assert set(SPANS) <= set(life.inline)
    policies = Page("docs/policies.md")
    assert set(POLICIES) <= set(policies.inline)
    assert {f"`{name}`" for name in POLICIES} == set(
        re.findall(r"^\| (`[\w-]+`) \| .* \|.*\|.*\|$", policies.prose, re.M)
    ) - {"`on_demand`"}


def test_documented_files_are_those_that_the_parser_reads(tmp_path: Path) -> None:
    topology, run = Page("docs/topologies.md").code("yaml")
    (tmp_path / "topology.yaml").write_text(topology)
    (tmp_path / "run.yaml").write_text(run)
    _, config = parse(["--config", str(tmp_path / "run.yaml")])
    assert config.topology.slots_N == tuple(yaml.safe_load(topology)["redundant_slots_per_worker"])
    assert (config.topology.attention, config.topology.ffn, config.topology.microbatches) == (1, 3, 3)
    assert config.policy == "static"
    assert config.batch.max_num_seqs == 8


def printed(page: Page, command: str) -> str:
    """What a page says that a command prints."""
    (block,) = [text for text in page.code("console") if f"$ {command}\n" in text]
    return block.partition(f"$ {command}\n")[2].partition("$ ")[0]


def test_print_config_prints_what_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Page("docs/topologies.md")
    for name, text in zip(("topology.yaml", "run.yaml"), page.code("yaml"), strict=True):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    arguments = "--config run.yaml --topology.attention 2 --print_config=skip_default"
    with pytest.raises(SystemExit):
        parse(arguments.split())
    assert capsys.readouterr().out == printed(page, f"python -m afore.launch {arguments}")


def test_an_unknown_option_is_refused_as_it_stands_there() -> None:
    with pytest.raises(ConfigError) as refused:
        parse(["--topolgy.ffn", "3"])
    assert printed(Page("docs/topologies.md"), "python -m afore.launch --topolgy.ffn 3") == f"afore: {refused.value}\n"


def test_the_documented_policy_is_the_example() -> None:
    (source,) = [block for block in Page("docs/policies.md").code("python") if block.startswith("class ")]
    assert source.strip() in (ROOT / "docs/examples/custom_policy.py").read_text()


def test_the_documented_planner_prints_what_stands_there(capsys: pytest.CaptureFixture[str]) -> None:
    page = Page("docs/policies.md")
    (source,) = [block for block in page.code("python") if block.startswith("import ")]
    (printed,) = [block for block in page.code("text") if block.startswith("most loaded worker")]
    exec(compile(source, "docs/policies.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_changes_name_the_version() -> None:
    assert f"## [{VERSION}]" in Page("CHANGELOG.md").text


def test_the_picture_is_whole_and_has_two_moods() -> None:
    root = ElementTree.parse(ROOT / "docs/microbatch.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{svg}title") is not None
    assert root.find(f"{svg}desc") is not None
    style = root.findtext(f"{svg}style", "")
    assert "prefers-color-scheme: dark" in style
    used = {name for element in root.iter() for name in element.get("class", "").split()}
    assert used <= set(re.findall(r"\.(\w+)", style))
