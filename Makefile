# A bare machine needs python3 (3.11 or newer) with venv, make and git; everything else lands in .uv and .venv.
PYTHON ?= python3
# The tests wait for servers and processes half of their time, so four at once keep two cores busy.
PYTEST_ARGS ?= -n 4 --dist loadgroup

export UV_PYTHON_DOWNLOADS := never
# An activated environment elsewhere must not receive our packages.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME

UV := .uv/bin/uv
READY := .venv/.ready
CHECKED := $(wildcard src tests bench)
LINTED := $(CHECKED) $(wildcard examples)

# uv does not read pip's settings: hand it the same index and certificates, and a cache it can write to.
define uv_env
set -e; \
index="$${PIP_INDEX_URL:-$$(.uv/bin/pip config get global.index-url 2>/dev/null || true)}"; \
cert="$${PIP_CERT:-$$(.uv/bin/pip config get global.cert 2>/dev/null || true)}"; \
if [ -n "$$index" ] && [ -z "$$UV_DEFAULT_INDEX$$UV_INDEX_URL" ]; then export UV_DEFAULT_INDEX="$$index"; fi; \
if [ -n "$$cert" ] && [ -z "$$SSL_CERT_FILE" ]; then export SSL_CERT_FILE="$$cert"; fi; \
if ! [ -w "$${HOME:-/nonexistent}" ] && [ -z "$$UV_CACHE_DIR" ]; then export UV_CACHE_DIR="$$PWD/.uv/cache"; fi;
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check fast bench bench-full bench-history bench-pruning bench-stream format lock clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY)  ## a minute of many tenants sharing one queue, on this machine
	@.venv/bin/fairlane demo

test: check  ## everything: the static checks, then the whole suite in random order
	rm -f .pytest_cache/v/cache/lastfailed
	.venv/bin/python -m pytest $(PYTEST_ARGS) || .venv/bin/python tests/second_look.py

check: $(READY)  ## lint, format, types, architecture; under two minutes
	.venv/bin/ruff check $(LINTED)
	.venv/bin/ruff format --check $(LINTED)
	.venv/bin/mypy $(CHECKED)
	.venv/bin/python -m pytest -q -p no:randomly -k "not postgres" tests/test_architecture.py tests/test_architecture_page.py

# In conftest.py, "postgres" stands for every test that needs a server. What starts processes is left to `make test`.
fast: $(READY)  ## the pure core, workers and stores, on SQLite in memory only; aimed at two minutes on two cores
	.venv/bin/python -m pytest $(PYTEST_ARGS) -q -m "not slow" -k "not (postgres or sqlite-file or process)" \
	    tests/policy tests/scheduler tests/worker tests/store

bench: $(READY)  ## Fairlane and its peers side by side, the short works; a missed bar is an error
	.venv/bin/python -m bench

bench-full: $(READY)  ## every work and every bar; an hour or more on a quiet machine
	.venv/bin/python -m bench --full

bench-history: $(READY)  ## claims and enqueues beside ten million finished jobs; a quarter of an hour, 15 GB
	.venv/bin/python -m bench history

bench-pruning: $(READY)  ## whether upkeep keeps up with ten thousand finishes a second
	.venv/bin/python -m bench pruning

bench-stream: $(READY)  ## a million jobs in one streamed call
	.venv/bin/python -m bench stream

format: $(READY)  ## rewrite the code in the house format
	.venv/bin/ruff check --fix-only $(LINTED)
	.venv/bin/ruff format $(LINTED)

# Names, versions and hashes only: the lock holds whatever index it is installed from.
lock: $(UV)  ## pin the newest versions that pyproject.toml allows into requirements.lock
	@$(uv_env) $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	    --no-header --no-emit-index-url --no-emit-find-links --all-extras --group dev \
	    --output-file requirements.lock pyproject.toml

clean:  ## remove everything that make created
	rm -rf .uv .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A private environment for uv itself: `pip install` into an externally managed Python is refused.
$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Fairlane needs Python 3.11 or newer; name one with: make PYTHON=python3.12")'
	@rm -rf .uv
	$(PYTHON) -m venv .uv
	@.uv/bin/pip install -qq 'uv>=0.13,<0.14'

$(READY): pyproject.toml requirements.lock | $(UV)
	@$(uv_env) \
	$(UV) venv --quiet --clear --python .uv/bin/python .venv; \
	$(UV) pip sync --quiet --python .venv/bin/python --require-hashes requirements.lock; \
	$(UV) pip install --quiet --python .venv/bin/python --no-deps --editable .
	@touch $@
