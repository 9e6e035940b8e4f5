"""The command line and files of the launcher: everything is read off the config dataclasses; command line over file over default.

Unknown keys are refused by name, with the nearest known one.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import jsonargparse
import yaml

from afore.core.config import RunConfig
from afore.core.errors import ConfigError
from afore.core.limits import MOST
from afore.core.topology import DOOR, MAX_WORKERS, ROLES, SCHEDULER, Topology
from afore.core.version import VERSION
from afore.serving.files import read_file

EXAMPLE = """examples:
  python -m afore.launch --demo                      answer the bundled prompts, print the table, end
  python -m afore.launch --prompt "Question: What is 3 * 4? Answer:"
  python -m afore.launch --topology.ffn 8 --policy static --demo --json out.json
  python -m afore.launch                             start the default topology, serve HTTP at 127.0.0.1:8000
  python -m afore.launch --host 0.0.0.0 --api-key SECRET --max-num-seqs 64
  python -m afore.launch --device cuda --planner.tile_tokens 64 --demo
  python -m afore.launch --role ffn                  one role of the default local cluster, next free rank
  python -m afore.launch --role door,scheduler,attention,prefill --topology topology.yaml
"""


SHORT_NAMES = {
    "host": "serve.host",
    "port": "serve.port",
    "api_key": "serve.api_key",
    "allow_remote_without_key": "serve.allow_remote_without_key",
    "served_model_name": "serve.served_model_name",
    "max_model_len": "batch.max_model_len",
    "max_num_seqs": "batch.max_num_seqs",
    "kv_blocks": "batch.kv_blocks",
    "rendezvous": "topology.rendezvous",
    "device": "device.name",
}
"""What other servers call these on the command line."""
SHORT = "".join(f"  --{short.replace('_', '-'):<48} --{key}\n" for short, key in SHORT_NAMES.items())


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What one invocation of the launcher does; everything about the run itself is ``RunConfig``."""

    role: str | None = None
    """One role or several, comma-separated (door, scheduler, ffn, attention, prefill); none supervises the whole topology."""
    rank: int | None = None
    """Rank of that role; none takes the next free one."""
    cluster: str | None = None
    """Name of the local cluster to join or start; none means the one at the rendezvous for a role, a new private one otherwise."""
    demo: bool = False
    """Answer the bundled prompts (or --prompts), print the table, end."""
    prompt: str | None = None
    """Answer this one prompt and end."""
    prompts: str | None = None
    """JSONL file with prompts for --demo: objects with "prompt" and optionally "id", "domain", "max_new_tokens"."""
    max_new_tokens: int = 48
    """Tokens to generate where a prompt does not say."""
    json: str | None = None
    """Write the result of --demo or --prompt to this file; "-" means standard output."""
    log: Literal["error", "warning", "info", "debug"] = "warning"
    """How much the roles log to standard error."""

    def __post_init__(self) -> None:
        if self.role is not None:
            for role in self.roles:
                if role not in ROLES:
                    near = difflib.get_close_matches(role, ROLES, n=1)
                    hint = f"did you mean {near[0]}? " if near else ""
                    raise ConfigError("role", f"{role!r} is not a role", f"{hint}roles: {', '.join(ROLES)}")
            for role in (DOOR, SCHEDULER):
                if self.roles.count(role) > 1:
                    raise ConfigError("role", f"{role} is given twice and a cluster has one", "leave out one of them")
            if self.demo or self.prompt is not None or self.prompts is not None:
                raise ConfigError("role", "one role cannot run --demo, --prompt or --prompts", "leave out --role")
        if self.rank is not None:
            if self.role is None or len(self.roles) != 1:
                raise ConfigError("rank", "only one single --role has a rank", "leave it out")
            if self.rank < 0:
                raise ConfigError("rank", f"{self.rank} is negative", "ranks count from 0")
            if self.rank > 0 and self.roles[0] in (DOOR, SCHEDULER):
                raise ConfigError("rank", f"{self.roles[0]} has rank 0 alone, not {self.rank}", "leave it out")
            if self.rank >= MAX_WORKERS:
                raise ConfigError("rank", f"{self.rank} is beyond any topology", f"give one below {MAX_WORKERS}")
        if self.prompt is not None and (self.demo or self.prompts is not None):
            raise ConfigError("prompt", "it excludes --demo and --prompts", "give one of them")
        if self.prompt == "":
            raise ConfigError("prompt", "it is empty", "write some text")
        if self.max_new_tokens < 1:
            raise ConfigError("max_new_tokens", f"{self.max_new_tokens} is below 1", "ask for at least 1")
        if self.max_new_tokens > MOST:
            raise ConfigError("max_new_tokens", f"{self.max_new_tokens} is above {MOST}", "ask for fewer")
        if self.cluster is not None and not re.fullmatch(r"[A-Za-z0-9_]{1,24}", self.cluster):
            raise ConfigError("cluster", f"{self.cluster!r} is not 1 to 24 letters, digits or _")

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of this process, in order; empty when it supervises."""
        return tuple(part.strip() for part in self.role.split(",")) if self.role is not None else ()


class _Formatter(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the examples."""


class _Parser(jsonargparse.ArgumentParser):
    """Turns every refusal into ``ConfigError`` instead of a usage dump."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        cause = ex
        while cause is not None:
            if isinstance(cause, ConfigError):
                raise cause
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        raise _explain(message, self.known_keys())

    def known_keys(self) -> list[str]:
        """Every key that the command line or a file may give."""
        return [*_keys(LaunchOptions), *_keys(RunConfig), *SHORT_NAMES]


def _keys(kind: Any, prefix: str = "") -> list[str]:
    keys = []
    for field in dataclasses.fields(kind):
        name = prefix + field.name
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default):
            keys.extend(_keys(type(default), name + "."))
        keys.append(name)
    return keys


def _explain(message: str, known: list[str]) -> ConfigError:
    """One line out of jsonargparse's message: the key, what is wrong, the nearest known key."""
    text = " ".join(message.split())
    unknown = re.search(r"[Uu]nrecognized arguments: --([\w.\-]+)(?:[= ]([^\s-]\S*))?", text)
    in_group = re.search(r"Group '([\w.]+)' does not accept option '([\w.\-]+)'", text)
    at_root = re.search(r"(?:[Kk]ey|Option|option) ['\"]([\w.\-]+)['\"](?: is not| not)", text)
    if unknown is not None or in_group is not None or at_root is not None:
        found = unknown or in_group or at_root
        assert found is not None
        key = found.group(1) if unknown is not None else ".".join(found.groups())
        inside = [name for name in known if name.endswith("." + key.replace("-", "_"))]
        if unknown is not None and inside:
            value = "" if unknown.group(2) is None else f" {unknown.group(2)}"
            return ConfigError(key, "no such option", f"did you mean --{inside[0]}{value}?")
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5) or difflib.get_close_matches(
            key.split(".")[-1], known, n=1, cutoff=0.5
        )
        return ConfigError(key, "no such option", f"did you mean {near[0]}?" if near else "see --help")
    keys = re.findall(r"Parser key \"([\w.]+)\"", text)
    named = re.search(r"(?:[Aa]rgument|key) [\"'`]?-?-?([\w.]+)[\"'`]?:? ?", text)
    if named is not None and text.startswith("Parser key"):
        text = text[named.end() :]
    # The innermost key is the one that is wrong: a file's own stands before it.
    if keys:
        return ConfigError(keys[-1], _plain(text), "see --help")
    return ConfigError(named.group(1) if named else "command line", _plain(text), "see --help")


_PLAIN = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "NoneType": "null",
    "tuple": "a list, such as [1, 0.5]",
    "tuple[int, ...]": "a list of whole numbers",
}


def _plain(text: str) -> str:
    """A value of the wrong type, without the types' Python names."""
    one = re.search(r"Expected an? (.+?)\. Got value: (.*?)$", text)
    several = re.search(r"Union subtypes Subtypes: \[(.*)\] Errors: .* Given value: (.*?)$", text)
    if one is not None:
        return f"{one.group(2)!r} is not {_type_name(one.group(1))}"
    if several is not None:
        names = re.findall(r"tuple\[int, \.\.\.\]|[\w.]*Literal\[[^\]]*\]|<class '[\w.]+'>|Path\w*", several.group(1))
        return f"{several.group(2)!r} is not {' or '.join(_type_name(name) for name in names)}"
    return re.sub(r"\btyping\.|<class '([\w.]+)'>", r"\1", text)


def _type_name(hint: str) -> str:
    name = re.sub(r"^<class '([\w.]+)'>$", r"\1", hint)
    if name.rpartition("[")[0].endswith("Literal"):
        return "one of " + ", ".join(re.findall(r"'([^']*)'", name))
    return _PLAIN.get(name, name)


def _underscored(argument: str) -> str:
    """``--max-new-tokens=8`` is the same option as ``--max_new_tokens=8``, ``--port`` the same as ``--serve.port``."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    name = name.replace("-", "_")
    if name == "allow_remote_without_key" and not equals:
        equals, value = "=", "true"
    return "--" + SHORT_NAMES.get(name, name) + equals + value


def build_parser() -> _Parser:
    """The launcher's parser."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(
        prog="python -m afore.launch",
        description="Start an AFORE cluster on this machine, or one role of it.",
        epilog=f"short names:\n{SHORT}\n{EXAMPLE}",
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=f"afore {VERSION}", help="print the version and end")
    parser.add_argument("--config", action="config", help="YAML file with any of the options below")
    parser.add_class_arguments(LaunchOptions, None, skip={"demo"})
    parser.add_argument(
        "--demo", action="store_true", help="answer the bundled prompts (or --prompts), print the table, end"
    )
    parser.add_class_arguments(RunConfig, None, sub_configs=True)
    return parser


def prepared(argv: Sequence[str] | None = None) -> list[str]:
    """The arguments as the parser takes them, after a look at every file that they name, and at the topology file that a
    configuration names. What can be read only once, such as a pipe, is put in place of its name. Raises ``ConfigError``.
    """
    arguments = [_underscored(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    for number, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option not in ("--config", "--topology") or not (equals or number + 1 < len(arguments)):
            continue
        path = value if equals else arguments[number + 1]
        # Fields may also be given in place, as YAML.
        if not path or path.startswith("{"):
            continue
        name = option.removeprefix("--")
        text = read_file(name, path)
        once = not Path(path).is_file()
        # As text alone: what a value means is the parser's to say.
        content = yaml.load(text, yaml.BaseLoader)
        topology = content.get("topology") if name == "config" and isinstance(content, dict) else None
        if isinstance(topology, str):
            read_file("topology", topology if once else str(Path(path).parent / topology))
        if once:
            in_place = _in_place(name, path, text)
            arguments[number + (not equals)] = f"{option}={in_place}" if equals else in_place
    return arguments


def _in_place(option: str, path: str, text: str) -> str:
    """A mapping in one line, as an argument has it."""
    try:
        content = yaml.safe_load(text)
        if not isinstance(content, dict):
            raise ConfigError(option, f"{path} holds no mapping", "write option: value, one a line")
        return json.dumps(content)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(option, f"{path} holds what no option takes: {' '.join(str(error).split())}") from error


def parse(argv: Sequence[str] | None = None) -> tuple[LaunchOptions, RunConfig]:
    """Options and run configuration from the command line. Raises ``ConfigError`` naming the key."""
    arguments = prepared(argv)
    try:
        values = build_parser().parse_args(arguments)
    except ConfigError:
        raise
    except (
        TypeError,
        ValueError,
        RecursionError,
        OverflowError,
        yaml.YAMLError,
    ) as error:  # what it lets through of a broken file
        raise ConfigError("config", " ".join(str(error).split()) or type(error).__name__, "see --help") from error
    values.pop("config", None)
    parts = build_parser().instantiate(values)
    launch_names = {field.name for field in dataclasses.fields(LaunchOptions)}
    given = {name: getattr(parts, name) for name in launch_names}
    run = {field.name: getattr(parts, field.name) for field in dataclasses.fields(RunConfig)}
    options, config = LaunchOptions(**given), RunConfig(**run)
    for part in (options, config):
        _refuse_null_characters(part, "")
    return options, config


def _refuse_null_characters(part: Any, prefix: str) -> None:
    """No text of an option may hold what ends a name for the operating system."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            _refuse_null_characters(value, f"{prefix}{field.name}.")
        elif isinstance(value, str) and "\0" in value:
            raise ConfigError(prefix + field.name, f"{value!r} holds a null character", "leave it out")


def given_keys(argv: Sequence[str] | None = None) -> frozenset[str]:
    """The dotted keys of ``RunConfig`` that command line and files give. A topology file gives all of ``topology``: what it
    leaves out is meant to be the default. To be called after ``parse`` has accepted the same arguments.
    """
    parser = build_parser()
    given = set(vars(parser.parse_args(prepared(argv), defaults=False).as_flat()))
    if "topology.__path__" in given:
        given |= {f"topology.{field.name}" for field in dataclasses.fields(Topology)}
    return frozenset(given & set(_keys(RunConfig)))
