"""Text that came from elsewhere (a server, a file's name), so that a terminal shows it as it is: on one line, and no markup."""

from __future__ import annotations

from rich.markup import escape


def printable(text: str, most: int = 300) -> str:
    """At most ``most`` characters of ``text``, a space for each that is not printable (line ends, escapes, lone surrogates)."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:most])


def unmarked(text: str) -> str:
    """The same for a console or table of rich, which would take ``[red]`` for a style."""
    # A backslash at the end would escape the markup that follows.
    return escape(printable(text))
