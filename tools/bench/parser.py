"""How command lines of benchmarks are refused: in one line, with status 2."""

from __future__ import annotations

import argparse
from typing import NoReturn

from afore.core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser whose refusals are ``ConfigError``: one line, as everywhere."""

    def error(self, message: str) -> NoReturn:
        """Raises it, with the option as its field."""
        option, _, problem = message.removeprefix("argument ").partition(": ")
        if not problem:
            option, problem = "options", message
        raise ConfigError(option.lstrip("-"), problem, f"see {self.prog} --help")
