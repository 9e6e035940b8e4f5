"""Configuration files, looked at before they are read: whatever a YAML reader would let through silently is refused by name."""

from __future__ import annotations

import io
import os
import select
import stat
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from afore.core.errors import ConfigError

SIZE_LIMIT = 1 << 20
DEPTH_LIMIT = 16
LONGEST_NUMBER = 40
MOST_ENTRIES = 4096
"""Of one list, twice the keys of one mapping: more than there can be workers, and few enough to be read at once."""
PATIENCE_S = 10.0
"""For what is no regular file: a pipe without a writer, a terminal."""
MERGE = "<<"
"""The key by which YAML takes another mapping's keys over."""
BOM = b"\xef\xbb\xbf"


def read_file(option: str, path: str) -> str:
    """The text of a YAML file. Refuses one that is not there, no text, not YAML, nested too deeply, or that gives a key twice;
    and what no option needs: anchors, tags, keys that are no plain text, several documents.

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
        raw = _bytes_of(file)
    except TimeoutError:
        raise refuse(f"is a pipe or a device that has not ended within {PATIENCE_S:g} s", "give a YAML file") from None
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}", "give a YAML file") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(option, f"{path!r} is no path: {error}", "give a YAML file") from error
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
        is_mapping = _is_mapping(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise refuse(f"is not YAML: {getattr(error, 'problem', None) or 'unreadable'}{where}", "mend it") from None
    except _Unneeded as unneeded:
        raise refuse(str(unneeded), "nothing here needs that") from None
    if not is_mapping and (option == "topology" or text.strip()):
        raise refuse("is empty" if not text.strip() else "holds no options", "write option: value, one a line")
    if twice is not None:
        key, line = twice
        raise refuse(f"gives {key} twice, again in line {line}", "keep one of them")
    return text


def _bytes_of(file: Path) -> bytes:
    """At most ``SIZE_LIMIT`` + 1 bytes. Raises ``OSError``, ``TimeoutError`` for a pipe without a writer or an end."""
    # Without O_NONBLOCK, to open a pipe is to wait for its writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return _all_of(stream, lambda: None)
        due_s = time.monotonic() + PATIENCE_S
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)

        def ready() -> None:
            left_s = due_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1e3):
                raise TimeoutError

        return _all_of(stream, ready)


def _all_of(stream: io.FileIO, ready: Callable[[], None]) -> bytes:
    raw = b""
    while len(raw) <= SIZE_LIMIT:
        ready()
        part = stream.read(SIZE_LIMIT + 1 - len(raw))
        if part == b"":
            break
        raw += part or b""
    return raw


def _is_mapping(text: str) -> bool:
    """Whether its document is a mapping: the first event that is no start of stream or document begins one."""
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.NodeEvent):
            return isinstance(event, yaml.MappingStartEvent)
    return False


class _Unneeded(Exception):
    """What YAML has and no option needs."""


def _first_key_twice(text: str) -> tuple[str, int] | None:
    """The first key that was given already, dotted, and its line; ``a: {b: 1}`` and ``a.b: 1`` give the same key.

    Reads events only, so depth costs no recursion, and nothing is built of what the text asks for. Raises ``_Unneeded``.
    """
    stack: list[_Open] = []
    seen: set[str] = set()
    documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            stack.pop()
            continue
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _Unneeded(f"holds a second document from line {_line(event)} on")
        if not isinstance(event, yaml.NodeEvent):
            continue
        _refuse_unneeded(event)
        top = stack[-1] if stack else None
        if top is not None:
            top.take(event)
            if top.count > MOST_ENTRIES:
                raise _Unneeded(f"has more than {MOST_ENTRIES:,} entries, by line {_line(event)}")
            if top.path is not None:
                # A mapping after one of its keys, dotted, would put that aside without a word.
                if top.path in seen or any(key.startswith(top.path + ".") for key in seen):
                    return top.path, _line(event)
                seen.add(top.path)
        if isinstance(event, yaml.CollectionStartEvent):
            if len(stack) >= DEPTH_LIMIT:
                raise _Unneeded(f"is nested deeper than {DEPTH_LIMIT} levels")
            within = "" if top is None else top.key + "."
            stack.append(_Open(isinstance(event, yaml.MappingStartEvent), within))
    return None


def _refuse_unneeded(event: yaml.NodeEvent) -> None:
    # A few lines of aliases stand for more values than there is memory; a tag may name any Python object.
    if event.anchor is not None:
        raise _Unneeded(f"has an anchor or alias ({event.anchor}) in line {_line(event)}")
    if getattr(event, "tag", None) is not None:
        raise _Unneeded(f"has a tag in line {_line(event)}")
    if isinstance(event, yaml.ScalarEvent) and len(event.value) > LONGEST_NUMBER and _is_digits(event.value):
        raise _Unneeded(f"has a number of {len(event.value):,} digits in line {_line(event)}")


def _is_digits(text: str) -> bool:
    return text.strip("+-").replace("_", "").isdecimal()


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return 0 if mark is None else mark.line + 1


class _Open:
    """A collection whose end has not come."""

    def __init__(self, is_mapping: bool, within: str) -> None:
        self._is_mapping = is_mapping
        self._within = within
        self.count = 0
        self.key = ""
        """What is due or was last, dotted from the top; elements of a sequence by number."""
        self.path: str | None = None
        """The same where the last event was a key."""

    def take(self, event: yaml.NodeEvent) -> None:
        """The next event that belongs to it directly."""
        self.count += 1
        self.path = None
        if not self._is_mapping:
            self.key = f"{self._within}[{self.count}]"
        elif self.count % 2:
            if not isinstance(event, yaml.ScalarEvent) or event.value == MERGE:
                raise _Unneeded(f"has a key that is no plain text in line {_line(event)}")
            self.key = self.path = self._within + event.value
