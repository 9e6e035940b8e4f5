"""Configuration files, looked at before they are read: whatever a YAML reader would let through silently is refused by name."""

from __future__ import annotations

from pathlib import Path

import yaml

from afore.core.errors import ConfigError

SIZE_LIMIT = 1 << 20
DEPTH_LIMIT = 16
BOM = b"\xef\xbb\xbf"


def check_file(option: str, path: str) -> None:
    """Refuses a file that is not there, no text, not YAML, nested too deeply, or that gives a key twice.

    Raises ``ConfigError`` with ``option`` as its field, naming the file and, where there is one, the key.
    """

    def refuse(problem: str, remedy: str) -> ConfigError:
        return ConfigError(option, f"{path} {problem}", remedy)

    file = Path(path)
    try:
        if file.is_dir():
            raise refuse("is a directory", "give a YAML file")
        if not file.exists():
            raise refuse("does not exist", f"give a YAML file, or the fields themselves (--{option}.FIELD …)")
        with file.open("rb") as stream:
            raw = stream.read(SIZE_LIMIT + 1)
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}", "give a YAML file") from error
    if len(raw) > SIZE_LIMIT:
        raise refuse(f"is longer than {SIZE_LIMIT:,} bytes", "give a YAML file")
    if raw.startswith(BOM):
        raise refuse("begins with a byte order mark", "save it as UTF-8 without one")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse(f"is not UTF-8 (byte {error.start})", "save it as UTF-8") from None
    try:
        twice = _first_key_twice(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise refuse(f"is not YAML: {getattr(error, 'problem', None) or 'unreadable'}{where}", "mend it") from None
    except _TooDeep:
        raise refuse(f"is nested deeper than {DEPTH_LIMIT} levels", "nothing here needs that") from None
    if twice is not None:
        key, line = twice
        raise refuse(f"gives {key} twice, again in line {line}", "keep one of them")


class _TooDeep(Exception):
    """More levels than any option has."""


def _first_key_twice(text: str) -> tuple[str, int] | None:
    """The first key that its mapping has already, dotted, and its line. Reads events only, so depth costs no recursion."""
    # For each open collection: the keys seen (none for a sequence), whether a key is due, and the current key.
    stack: list[_Open] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            stack.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        if stack and stack[-1].is_mapping:
            top = stack[-1]
            top.key_due = not top.key_due
            if not top.key_due and isinstance(event, yaml.ScalarEvent):
                top.key = event.value
                if top.key in top.seen:
                    return ".".join(part.key for part in stack if part.is_mapping), _line(event)
                top.seen.add(top.key)
        if isinstance(event, yaml.CollectionStartEvent):
            if len(stack) >= DEPTH_LIMIT:
                raise _TooDeep
            stack.append(_Open(isinstance(event, yaml.MappingStartEvent)))
    return None


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return 0 if mark is None else mark.line + 1


class _Open:
    """A collection whose end has not come."""

    def __init__(self, is_mapping: bool) -> None:
        self.is_mapping = is_mapping
        self.seen: set[str] = set()
        self.key = ""
        self.key_due = True
