from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.serving.http.served import Served, serving


@pytest.fixture(scope="package")
def served() -> Iterator[Served]:
    """A cluster that all tests of this folder share."""
    with serving() as running:
        yield running


@pytest.fixture(scope="package")
def openai(served: Served) -> Iterator[OpenAI]:
    """OpenAI's own client."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="package")
def http(served: Served) -> Iterator[httpx.Client]:
    """Plain HTTP."""
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client
