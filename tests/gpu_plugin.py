"""For machines with pytest alone (``-p tests.gpu_plugin``): coroutines run, and no missing package is a failure."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Generator
from typing import Any

import pytest

OPTIONAL = ("hypothesis", "httpx", "openai", "ortools", "psutil")
"""Packages of the test suite that a GPU machine may lack: a module that asks for one is skipped there."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test in a new loop, where no plugin does."""
    plugins = pyfuncitem.config.pluginmanager
    if plugins.hasplugin("asyncio") or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**given))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that imports a package which is not here is skipped by that name."""
    report = yield
    if report.outcome == "failed" and isinstance(collector, pytest.Module):
        lacking = [name for name in OPTIONAL if f"No module named '{name}'" in str(report.longrepr)]
        if lacking:
            report.outcome = "skipped"
            report.longrepr = (
                str(collector.path),
                1,
                f"Skipped: {lacking[0]} is not installed: {collector.path.name}",
            )
    return report
