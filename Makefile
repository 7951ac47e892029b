# deltastore: every command that people and CI run. `make` lists them.
#
# PYTHON   interpreter to make the environment with (3.11 or newer)
# VENV     folder of the environment
# TORCH    what pip installs for torch, with options; TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
#          gives a build without CUDA where the default index has none
# DIST     folder for the source archive and the wheel of `make package`
# ARGS     more arguments, for example: make test ARGS="-k codecs -x"

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
TORCH ?= $(shell grep '^torch==' constraints.txt)
DIST ?= dist
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.deltastore-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench docs pictures package clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(READY) ## make .venv and install deltastore with everything that tests and demo need

demo: $(READY) ## fine-tune a real model, commit 64 steps, get them back bit for bit
	@$(BIN)/python -m benchmarks.demo $(ARGS)

test: $(READY) ## run the tests
	@$(BIN)/python -m pytest -q -n auto --dist worksteal $(ARGS)

lint: $(READY) ## check style, types and the layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(READY) ## measure size and speed against memcpy, safetensors and torch.save
	@$(BIN)/python -m benchmarks.bench $(ARGS)

docs: $(READY) ## write the reference from docstrings and help (ARGS=--check only compares)
	@$(BIN)/python docs/build_reference.py $(ARGS)

pictures: $(READY) ## make the pictures of the documentation with the commands themselves
	@$(BIN)/python -m pip --disable-pip-version-check -qq install 'rich>=13,<16'
	@PYTHONPATH=. $(BIN)/python docs/build_pictures.py

package: $(READY) ## build the source archive and the wheel into dist/
	@$(BIN)/python -m build --no-isolation --outdir $(DIST) .

clean: ## remove the environment, build outputs and caches
	@rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@rm -f deltastore/codecs/_kernel*.so
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes in first, alone: what is there already stays, and nothing that follows may replace it.
$(READY): pyproject.toml constraints.txt deltastore/codecs/_kernel.c
	@test -n "$(PYTHON)" || { echo "deltastore needs Python 3.11 or newer, and none was found." >&2; \
		echo "Name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "deltastore needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "installing $(TORCH)"; $(PIP) install $(TORCH); }
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >> $(VENV)/constraints.txt
	@echo "installing deltastore (a few minutes at the first time)"
	@$(PIP) install -c $(VENV)/constraints.txt -e '.[test,demo,lint]'
	@$(BIN)/python -c 'from deltastore.codecs import kernel; kernel.NAME == "native" or print("No C compiler (or no Python headers):", \
		"deltastore works, with the slower NumPy kernel. Install cc and python3-dev, then: make clean install")'
	@touch $@
