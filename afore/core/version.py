"""The version, where everything may read it without importing the package's scripting API."""

from typing import Final

VERSION: Final = "0.1.0"
