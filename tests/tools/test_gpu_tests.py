"""The part of the GPU check that runs tests: by pytest alone, and precise about what did not run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from afore.tools.gpu_claims import ClaimFailed, NotHere
from afore.tools.gpu_tests import FILES, ROOT, run_gpu_tests

COROUTINES = """
import asyncio
import pytest

@pytest.fixture
def seven():
    return 7

@pytest.mark.gpu
@pytest.mark.parametrize("more", [1, 2])
async def test_a_coroutine(seven, more):
    await asyncio.sleep(0)
    assert seven + more > 7

@pytest.mark.gpu
def test_without_a_gpu():
    pytest.skip("no such GPU")

async def test_of_something_else():
    raise AssertionError
"""
LACKING = "import hypothesis\nimport pytest\n\n@pytest.mark.gpu\ndef test_random(): pass\n"
WRONG = "import pytest\n\n@pytest.mark.gpu\nasync def test_wrong(): assert 1 == 2, 'the GPU is off'\n"


def tree(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on the path whose hypothesis cannot be found."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "hypothesis.py").write_text("raise ModuleNotFoundError(\"No module named 'hypothesis'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    (tmp_path / "tests").mkdir()
    return tmp_path / "tests"


@pytest.mark.slow
def test_coroutines_run_by_pytest_alone_and_what_did_not_run_is_named(bare: Path) -> None:
    root = tree(bare, test_one=COROUTINES, test_two=LACKING)
    found = run_gpu_tests(120, files=["test_one.py", "test_two.py"], root=root)
    assert (found["passed"], found["failures"], found["errors"]) == (2, 0, 0)
    assert found["not_run"] == [
        {"cases": 1, "why": "hypothesis is not installed: test_two.py"},
        {"cases": 1, "why": "no such GPU"},
    ]


@pytest.mark.slow
def test_a_test_that_fails_is_told(bare: Path) -> None:
    root = tree(bare, test_one=COROUTINES, test_bad=WRONG)
    with pytest.raises(ClaimFailed, match=r"(?s)pytest ended with status 1.*the GPU is off") as caught:
        run_gpu_tests(120, files=["test_one.py", "test_bad.py"], root=root)
    assert (caught.value.found["passed"], caught.value.found["failures"]) == (2, 1)
    with pytest.raises(ClaimFailed, match="no test ran"):
        run_gpu_tests(120, files=["test_two.py"], root=tree(bare, test_two=LACKING))


def test_without_pytest_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotHere, match="pytest is not installed"):
        run_gpu_tests(120)


def test_all_files_with_tests_for_a_gpu_are_run() -> None:
    marks = ("pytest.mark.gpu", "EVERY_KIND")
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if any(mark in path.read_text(encoding="utf-8") for mark in marks) and path != Path(__file__)
    }
    assert found == set(FILES)
