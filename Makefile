# Every target sets up .venv by itself; python3 >= 3.11 is all that a machine needs. `make help` lists them.

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
EXTRAS := dev,mpi
PYTHON3 ?=
TORCH_INDEX ?=
PIP_INSTALL = $(PYTHON) -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
export DEMO_PROMPT ?= A paper boat drifts down a rainy street

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-long test-gpu bench train-small lint fix hooks wheel clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "On a machine without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu after any target"
	@echo "fetches torch's small CPU build when .venv is made. PYTHON3=/path/to/python picks the interpreter."

venv: $(STAMP)  ## build .venv once, with the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@for python in $(PYTHON3) python3.11 python3.12 python3.13 python3; do \
	    if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; \
	    then $$python -m venv $(VENV) && exit; fi; \
	done; echo 'no python3 >= 3.11 with venv found; install one (on Debian: python3 and python3-venv), or PYTHON3=...' >&2; exit 1
	@echo 'installing into $(VENV), once; this takes a minute or a few'
	@$(PIP_INSTALL) --upgrade pip setuptools wheel
	@PYTHONWARNINGS='ignore:Editable installation' $(PIP_INSTALL) --no-build-isolation --editable '.[$(EXTRAS)]'
	@touch $@

demo: venv  ## four processes make an mp4 with the packaged small model, on any machine
	$(PYTHON) generate.py --nproc 4 --prompt "$$DEMO_PROMPT"

test: venv  ## every test that runs without a GPU in minutes
	$(PYTHON) -m pytest -q -m 'not long and not gpu'

test-long: venv  ## the tests that take many minutes
	$(PYTHON) -m pytest -q -m 'long and not gpu'

test-gpu: venv  ## the tests that need a CUDA device, and those of the exchange, whose ranks then share the GPUs
	$(PYTHON) -m pytest -q --timeout 300 -m gpu
	$(PYTHON) -m pytest -q --timeout 300 tests/multi_gpu/test_exchange.py tests/multi_gpu/test_pipeline.py \
	    tests/multi_gpu/test_pipeline_faults.py

bench: venv  ## time kernels, a block and a step on this GPU, into docs/benchmarks.md; takes some ten minutes
	$(PYTHON) scripts/bench_kernels.py --json docs/benchmarks/kernels.json
	$(PYTHON) scripts/bench_block.py --json docs/benchmarks/blocks.json
	$(PYTHON) scripts/bench_block.py --ranks 2 --tokens 75600 --no-compile --json docs/benchmarks/share.json
	$(PYTHON) scripts/bench_block.py --ranks 8 --tokens 32760 --no-compile --json docs/benchmarks/share8.json
	$(PYTHON) scripts/bench_step.py --json docs/benchmarks/steps.json
	$(PYTHON) scripts/render_benchmarks.py docs/benchmarks/*.json

train-small: venv  ## train the packaged small model on a GPU, some 14 minutes, into outputs/train_small
	$(PYTHON) -m scripts.train_small.run --out outputs/train_small

lint: venv  ## style, formatting and types, without changing a file
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

fix: venv  ## repair what ruff can
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

hooks: venv  ## run the linters before every commit
	$(PYTHON) -m pre_commit install

wheel: venv  ## build the wheel, install it into an empty environment, check what it brings
	$(PYTHON) scripts/check_wheel.py

clean:  ## remove .venv, caches and build outputs; outputs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
