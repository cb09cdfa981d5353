# The two commands of a fresh clone are `make chat` and `make test`; both make .venv first when it is missing or stale.
#
#   make chat [PROMPT="..."]   chat with the default model (fetched once); with a PROMPT answer it and exit
#   make test [ARGS="..."]     run the whole test suite (ARGS are pytest's)
#   make check                 formatter, linter, types, generated pages up to date
#   make docs                  regenerate docs/cli.md, docs/env.md and docs/benchmarks.md
#   make acceptance            measure every promised figure on this machine
#
#   PYTHON=python3.12          interpreter for .venv
#   JOBS=N                     how many tests run beside each other (default: as many as there are cores)
#   TORCH_INDEX=URL            a package index to look for torch in as well, such as one with CPU-only builds

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
JOBS ?= auto
PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# The prompt travels in the environment, unexpanded, so that quotes, dollars and newlines reach the program whole.
export EDGELLM_PROMPT = $(value PROMPT)

.PHONY: chat test check docs acceptance clean

chat: $(VENV)/.runtime
	@$(VENV)/bin/edgellm chat

test: $(VENV)/.development
	@$(VENV)/bin/python -m pytest -n $(JOBS) $(ARGS)

check: $(VENV)/.development
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python tools/generate_docs.py --check

docs: $(VENV)/.development
	$(VENV)/bin/python tools/generate_docs.py

acceptance: $(VENV)/.development
	$(VENV)/bin/python -m acceptance $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/.runtime: pyproject.toml constraints.txt setup.py $(wildcard kernels/edgellm_kernels/native/*.cpp kernels/edgellm_kernels/native/*.h)
	@$(PYTHON) -c 'import sys; sys.exit("edgellm needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + \
	". Name another one: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV) (once; torch is large) ..." >&2
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) >&2
	@$(PIP_INSTALL) -e . >&2
	@touch $@

$(VENV)/.development: $(VENV)/.runtime
	@echo "Adding the test tools to $(VENV) ..." >&2
	@$(PIP_INSTALL) -e '.[dev]' >&2
	@touch $@
