# Two commands matter: `make demo` and `make test`. Each does its own set-up under $(CACHE), which git ignores.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export HOLDFAST_CACHE ?= $(CURDIR)/.cache
VENV := $(HOLDFAST_CACHE)/venv
PY := $(VENV)/bin/python
BOOTSTRAP := PYTHONPATH=testbed/src PYTHONDONTWRITEBYTECODE=1 python3 -m holdfast_testbed.build.bootstrap
TESTBED := $(PY) -m holdfast_testbed
PACKAGES := operator/src sidecar/src trainer_lib/src testbed/src
# Tests wait at least as long as they compute. tests/conftest.py hands out the longest piece first.
TWO_STREAMS := -n 2 --dist loadfile --no-loadscope-reorder
NODES ?= 3
CLUSTER ?= default
CRD := crds/holdfast.dev_faulttolerantjobs.yaml
# Not in the chart's crds/, which Helm would never upgrade: templates/crd.yaml reads it.
CHART_CRDS := charts/holdfast/files
CHART_README := charts/holdfast/README.md
DASHBOARDS := charts/holdfast/dashboards
CRD_REFERENCE := docs/reference/faulttolerantjob.md
REASONS := docs/reference/reasons.md
SETTINGS := docs/reference/holdfast-run.md

.PHONY: help demo test test-thorough test-all test-durations test-unit test-integration test-e2e test-scale mutants lint fmt cluster cluster-down bench bench-operator bench-checkpoint drill drill-checkpoint generate verify setup setup-venv clean

help: ## print this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "make %-18s %s\n", $$1, $$2}'

demo: setup ## train on a local real Kubernetes, break it on purpose, print the story (KEEP=1 leaves it running)
	@exec $(PY) -m holdfast_testbed.demo

test: setup ## each promise, proved where that is cheapest: unit, integration and end-to-end tests
	@$(PY) -m pytest $(TWO_STREAMS) -m "not thorough"

test-thorough: setup ## the tests that `make test` leaves out: more faults, seeds and sizes, and many jobs at once
	@$(PY) -m pytest $(TWO_STREAMS) -m thorough

test-all: setup ## every test
	@$(PY) -m pytest $(TWO_STREAMS)

test-durations: setup ## run every test and record how long each file takes
	@$(PY) -m pytest $(TWO_STREAMS) --record-durations

test-unit: setup-venv ## tests that need no cluster
	@$(PY) -m pytest $(TWO_STREAMS) -m "not integration and not e2e and not scale"

test-integration: setup ## tests against a real API server
	@$(PY) -m pytest -m integration

test-e2e: setup ## tests on real nodes
	@$(PY) -m pytest -m e2e

test-scale: setup ## many jobs on nodes that kwok plays
	@$(PY) -m pytest -m scale

mutants: setup-venv ## change 200 places of the decisions, one at a time, and count what no test detects (hours)
	@$(PY) tools/mutants.py $(MUTANT_ARGS)

lint: setup-venv ## ruff, mypy strict, import rules, prose, and the `operator` package trap
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(PY) -m mypy $(PACKAGES)
	@PYTHONPATH=operator/src:sidecar/src:trainer_lib/src:testbed/src $(VENV)/bin/lint-imports
	@python3 tools/prose.py
	@for trap in operator/__init__.py operator.py tests/operator; do \
	  if [ -e $$trap ]; then echo "$$trap shadows the standard library's operator module: remove it" >&2; exit 1; fi; done

fmt: setup-venv ## format and sort imports
	@$(VENV)/bin/ruff check --fix-only --quiet . && $(VENV)/bin/ruff format .

cluster: setup ## a local real Kubernetes with NODES nodes (default 3)
	@$(TESTBED) up --name $(CLUSTER) --nodes $(NODES)

cluster-down: setup-venv ## remove it without a trace
	@$(TESTBED) down --name $(CLUSTER)

bench: setup ## every benchmark, each a table against its peer and its limit
	@missed=; for b in benchmarks/*.py; do case $$b in */_*) ;; \
	  *) echo "$$b"; $(PY) $$b $(BENCH_ARGS) || missed="$$missed $$b" ;; esac; done; \
	  if [ -n "$$missed" ]; then echo "these missed a bar or failed:$$missed" >&2; exit 1; fi

bench-operator: bench-operator_scale bench-operator_recovery ## the operator at scale, and when it loses pods and nodes

bench-checkpoint: setup ## what a checkpoint costs beside DCP, the disk's limit and a copy in memory
	@$(PY) benchmarks/checkpoint.py $(BENCH_ARGS)

bench-%: setup
	@$(PY) benchmarks/$*.py $(BENCH_ARGS)

drill: setup ## each fault of docs/reference/drills.md on one local cluster, once (DRILL_ARGS=--full: ten times)
	@$(PY) drills/matrix.py $(DRILL_ARGS)
	@$(PY) drills/checkpoint.py $(DRILL_ARGS)

drill-checkpoint: setup-venv ## checkpoints under harm: damage, kills, cuts, touch-files, bad disks (DRILL_ARGS=--full: 1,000 kills)
	@$(PY) drills/checkpoint.py $(DRILL_ARGS)

drill-%: setup
	@$(PY) drills/matrix.py $* $(DRILL_ARGS)

generate: setup-venv ## make the files that are derived from others
	@python3 tools/pod_fields.py $(CRD)
	@mkdir -p $(CHART_CRDS) && cp crds/*.yaml $(CHART_CRDS)/
	@python3 tools/dashboards.py $(DASHBOARDS)
	@$(PY) tools/crd_reference.py $(CRD_REFERENCE)
	@python3 tools/reasons.py $(REASONS)
	@PYTHONPATH=trainer_lib/src python3 tools/settings.py $(SETTINGS)
	@$(PY) tools/chart_values.py $(CHART_README)

verify: $(PY) ## fail if a derived file differs from what `make generate` makes
	@made=$$(mktemp) && trap 'rm -f "$$made"' EXIT && python3 tools/pod_fields.py "$$made" && \
	  diff -u "$$made" $(CRD) || { echo "the fields of a pod are stale: run 'make generate'" >&2; exit 1; }
	@diff -ru crds $(CHART_CRDS) || { echo "the chart's copy of the CRD is stale: run 'make generate'" >&2; exit 1; }
	@made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && python3 tools/dashboards.py "$$made" && \
	  diff -ru "$$made" $(DASHBOARDS) || { echo "the dashboards are stale: run 'make generate'" >&2; exit 1; }
	@made=$$(mktemp) && trap 'rm -f "$$made"' EXIT && $(PY) tools/crd_reference.py "$$made" && \
	  diff -u "$$made" $(CRD_REFERENCE) || { echo "the CRD's reference is stale: run 'make generate'" >&2; exit 1; }
	@made=$$(mktemp) && trap 'rm -f "$$made"' EXIT && python3 tools/reasons.py "$$made" && \
	  diff -u "$$made" $(REASONS) || { echo "the page of reasons is stale: run 'make generate'" >&2; exit 1; }
	@made=$$(mktemp) && trap 'rm -f "$$made"' EXIT && cp $(SETTINGS) "$$made" && \
	  PYTHONPATH=trainer_lib/src python3 tools/settings.py "$$made" && \
	  diff -u "$$made" $(SETTINGS) || { echo "the tables of settings are stale: run 'make generate'" >&2; exit 1; }
	@made=$$(mktemp) && trap 'rm -f "$$made"' EXIT && cp $(CHART_README) "$$made" && $(PY) tools/chart_values.py "$$made" && \
	  diff -u "$$made" $(CHART_README) || { echo "the chart's table of values is stale: run 'make generate'" >&2; exit 1; }

$(PY):
	@$(BOOTSTRAP) --only venv

setup: ## everything that demo and tests need, into the cache (done once)
	@$(BOOTSTRAP)

setup-venv: ## only the Python environment
	@$(BOOTSTRAP) --only venv

# What set-up, clusters and benchmarks leave in the cache, which may be a folder that others use as well.
IN_CACHE := bench-peers bin clusters cluster.lock go images pip.log venv venv.lock

clean: ## stop clusters and remove the cache and all build products
	@if ls $(HOLDFAST_CACHE)/clusters/*/cluster.json >/dev/null 2>&1; then \
	  $(TESTBED) down --all || { echo "clusters run still: 'make setup-venv', then 'make clean' again" >&2; exit 1; }; fi
	@if grep -F " $(HOLDFAST_CACHE)/" /proc/self/mounts; then echo "still mounted: unmount it, then 'make clean' again" >&2; exit 1; fi
	@rm -rf $(addprefix $(HOLDFAST_CACHE)/,$(IN_CACHE))
	@rmdir $(HOLDFAST_CACHE) 2>/dev/null || true
	@rm -rf out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find operator sidecar trainer_lib testbed tests benchmarks drills tools -name __pycache__ -prune -exec rm -rf {} +
	@rm -rf */build */src/*.egg-info
