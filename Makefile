# Two commands matter: `make demo` and `make test`. Each does its own set-up under $(CACHE), which git ignores.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export HOLDFAST_CACHE ?= $(CURDIR)/.cache
VENV := $(HOLDFAST_CACHE)/venv
PY := $(VENV)/bin/python
BOOTSTRAP := PYTHONPATH=testbed/src PYTHONDONTWRITEBYTECODE=1 python3 -m holdfast_testbed.bootstrap
TESTBED := $(PY) -m holdfast_testbed
PACKAGES := operator/src sidecar/src trainer_lib/src testbed/src
NODES ?= 3
CLUSTER ?= default
CHART_CRDS := charts/holdfast/crds

.PHONY: help demo test test-unit test-integration test-e2e lint fmt cluster cluster-down bench bench-operator drill generate verify setup setup-venv clean

help: ## print this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "make %-18s %s\n", $$1, $$2}'

demo: setup ## train on a local real Kubernetes, break it on purpose, print the story (KEEP=1 leaves it running)
	@exec $(PY) -m holdfast_testbed.demo

test: setup ## every test: unit, integration, end to end (set-up included)
	@$(PY) -m pytest

test-unit: setup-venv ## tests that need no cluster
	@$(PY) -m pytest -m "not integration and not e2e"

test-integration: setup ## tests against a real API server
	@$(PY) -m pytest -m integration

test-e2e: setup ## tests on real nodes
	@$(PY) -m pytest -m e2e

lint: setup-venv ## ruff, mypy strict, import rules, and the `operator` package trap
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(PY) -m mypy $(PACKAGES)
	@PYTHONPATH=operator/src:sidecar/src:trainer_lib/src:testbed/src $(VENV)/bin/lint-imports
	@for trap in operator/__init__.py operator.py tests/operator; do \
	  if [ -e $$trap ]; then echo "$$trap shadows the standard library's operator module: remove it" >&2; exit 1; fi; done

fmt: setup-venv ## format and sort imports
	@$(VENV)/bin/ruff check --fix-only --quiet . && $(VENV)/bin/ruff format .

cluster: setup ## a local real Kubernetes with NODES nodes (default 3)
	@$(TESTBED) up --name $(CLUSTER) --nodes $(NODES)

cluster-down: setup-venv ## remove it without a trace
	@$(TESTBED) down --name $(CLUSTER)

bench: setup ## every benchmark, each a table against its peer and its limit
	@for b in benchmarks/*.py; do case $$b in */_*) ;; *) $(PY) $$b $(BENCH_ARGS) ;; esac; done

bench-operator: bench-operator_scale ## the operator at scale

bench-%: setup
	@$(PY) benchmarks/$*.py $(BENCH_ARGS)

drill: setup ## each fault of docs/reference/drills.md on one local cluster, once (DRILL_ARGS=--full: ten times)
	@$(PY) drills/matrix.py $(DRILL_ARGS)

drill-%: setup
	@$(PY) drills/matrix.py $* $(DRILL_ARGS)

generate: ## make the files that are derived from others
	@mkdir -p $(CHART_CRDS) && cp crds/*.yaml $(CHART_CRDS)/
	@python3 charts/dashboards.py charts/holdfast/dashboards

verify: ## fail if a derived file differs from what `make generate` makes
	@diff -ru crds $(CHART_CRDS) || { echo "the chart's copy of the CRD is stale: run 'make generate'" >&2; exit 1; }
	@made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && python3 charts/dashboards.py "$$made" && \
	  diff -ru "$$made" charts/holdfast/dashboards || { echo "the dashboards are stale: run 'make generate'" >&2; exit 1; }

setup: ## everything that demo and tests need, into the cache (done once)
	@$(BOOTSTRAP)

setup-venv: ## only the Python environment
	@$(BOOTSTRAP) --only venv

clean: ## stop clusters and remove the cache and all build products
	@if [ -x $(PY) ]; then $(TESTBED) down --all || true; fi
	@rm -rf $(HOLDFAST_CACHE) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
