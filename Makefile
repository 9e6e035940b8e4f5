# Two commands: `make run` and `make test`. Each sets itself up; Python >= 3.11 with venv is all they presume.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# A terminal sees pip's progress bars; a log has one line for each stage.
PIP     = if test -t 1; then quiet=; else quiet=--quiet; fi; $(BIN)/pip install $$quiet --disable-pip-version-check --constraint constraints.txt
# Test files side by side: much of the suite waits for processes that it has started. 1 runs them one after another.
WORKERS ?= 2
# What this machine must have (namespaces, rdma): tests that need it fail where they would be skipped.
REQUIRE ?=
# One OpenMP thread everywhere: a second one makes forked children hang in their first parallel region.
export OMP_NUM_THREADS = 1

.PHONY: run serve test softroce softroce-hosts softroce-kills softbench lint types arrows wheel check doctor clean help

run: $(READY)  ## install, then answer the 32 bundled prompts and print the table
	$(BIN)/python -m afore.launch --demo

serve: $(READY)  ## install, then start the default topology and stay up
	$(BIN)/python -m afore.launch

test: $(READY)  ## install, then run the test suite
	$(BIN)/python -m tests.kernels
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(addprefix --require=,$(REQUIRE))

softroce: $(READY)  ## RDMA on an emulated device: the fabrics' suite, then the model's tokens (Debian 12, root)
	@$(PIP) --editable ".[rdma]"
	tests/softroce/run $(abspath $(BIN))/python suite tokens

softroce-hosts: $(READY)  ## the model's tokens over RDMA between two emulated machines
	@$(PIP) --editable ".[rdma]"
	tests/softroce/run $(abspath $(BIN))/python hosts

softroce-kills: $(READY)  ## peers killed at every step over RDMA on the emulated device, and what they leave
	@$(PIP) --editable ".[rdma]"
	tests/softroce/run $(abspath $(BIN))/python kills

softbench: $(READY)  ## the verbs fabric against its bindings' bare calls, on the same emulated device
	@$(PIP) --editable ".[rdma]"
	tests/softroce/run $(abspath $(BIN))/python bench

lint: $(READY)  ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy --strict
	$(BIN)/mypy

arrows: $(READY)  ## the import contract: arrows between folders run down only
	$(BIN)/lint-imports

wheel: $(READY)  ## build the wheel, install it in an empty environment, import it
	rm -rf dist build
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . > dist.log 2>&1 || (cat dist.log; exit 1)
	rm -f dist.log
	$(BIN)/python .ci/check_wheel.py dist

check: lint types arrows test wheel  ## everything that CI runs

doctor: $(READY)  ## what this machine has and lacks
	$(BIN)/python -m afore.tools.doctor

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || (echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>/dev/null || echo not there). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): several minutes, and 1.6 GB with a CPU build of torch (README.md says how to choose it) ..."
	@echo "1 of 2: torch"
	@$(PIP) "setuptools>=77" wheel torch
	@echo "2 of 2: everything else"
	@$(PIP) --editable ".[dev]"
	@touch $(READY)

clean:  ## remove what the commands above made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/'
