# `make` lists the targets. Each one sets up .venv first, if need be, and then runs one command, which you can run yourself.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# What can be given on the command line: make run STEP=02 MODEL=tiny ARGS="--max-new-tokens 8"
MODEL ?=
DEVICE ?=
DTYPE ?=
THREADS ?=
STEP ?=
A ?=
B ?=
ARGS ?=
TORCH_INDEX ?=
PYTHON ?= $(shell .venv/bin/python -c "" 2>/dev/null && echo .venv/bin/python || echo python3)

PY := .venv/bin/python
# Only what was given is passed on; the commands have their own defaults.
OPTIONS = $(strip $(if $(MODEL),--model $(MODEL)) $(if $(DEVICE),--device $(DEVICE)) $(if $(DTYPE),--dtype $(DTYPE)) \
                  $(if $(THREADS),--threads $(THREADS)) $(ARGS))
RUN_PY = $(firstword $(wildcard steps/$(STEP)/run.py steps/$(STEP)_*/run.py steps/0$(STEP)_*/run.py))
STEPS = $(notdir $(patsubst %/,%,$(dir $(wildcard steps/[0-9]*/run.py))))

.PHONY: help env setup model run diff bench bench-full bench-peers publish-results report check-generated test test-slow \
        zoo doctor compat lint format docs serve lock clean distclean

help: ## list the targets
	@echo "kv-ladder: the paged KV cache of an LLM inference engine, from slow to fast, one runnable step at a time"
	@echo
	@awk -F ':.*## ' '/^##@/ { print "\n" substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "Variables: STEP=02  A=01 B=02  MODEL=tiny|FOLDER|HUB-ID  DEVICE=cpu|cuda  DTYPE=float32  THREADS=2  ARGS=\"--any --option\""
	@echo "           PYTHON=python3.12 and TORCH_INDEX=ADDRESS for setup"
	@echo "Try:       make run STEP=01 && make diff A=01 B=02 && make run STEP=02"

env:
	@$(PYTHON) shared/setup_env.py --quiet --torch-index "$(TORCH_INDEX)"

##@ Set up (the other targets do this themselves)

setup: ## create .venv with the exact versions of requirements.lock
	@$(PYTHON) shared/setup_env.py --torch-index "$(TORCH_INDEX)"

model: env ## prepare the model (MODEL=..., by default SmolLM2-135M-Instruct) under models/
	@$(PY) -m shared.models $(MODEL)

##@ Learn

run: env ## answer prompts with one step: make run STEP=02
	@$(if $(RUN_PY),,echo "error: which step? make run STEP=01, with one of: $(STEPS)" >&2; exit 2)
	$(PY) $(RUN_PY) $(OPTIONS)

diff: env ## what changed between two steps: make diff A=01 B=02
	@$(PY) -m shared.diff $(A) $(B) $(ARGS)

##@ Measure

bench: env ## measure every step against transformers, a few minutes
	@$(PY) -m shared.models $(MODEL)
	$(PY) -m shared.bench quick $(OPTIONS)

bench-full: env ## measure thoroughly: shapes, lengths, batch sizes
	@$(PY) -m shared.models $(MODEL)
	$(PY) -m shared.bench full $(OPTIONS)

bench-peers: env ## measure beside other engines (installs them under .peers/)
	@$(PY) -m shared.models $(MODEL)
	$(PY) -m shared.bench peers $(OPTIONS)

publish-results: env ## copy your measurements from results/local/ to results/
	$(PY) -m shared.bench publish $(ARGS)

report: env ## write docs/generated/ and README's table from results/
	$(PY) -m shared.report $(ARGS)

check-generated: env ## fail if a generated file is not what its sources give
	$(PY) -m shared.report --check

##@ Check

test: env ## run the test suite
	@$(PY) -m shared.models
	$(PY) -m pytest $(ARGS)

test-slow: env ## run the tests that take minutes
	@$(PY) -m shared.models
	$(PY) -m pytest -m slow $(ARGS)

zoo: env ## plant every bug of the bug zoo and show the test that catches it
	$(PY) -m tests.zoo $(ARGS)

doctor: ## say what works on this machine and what is missing
	@$(PYTHON) shared/doctor.py $(ARGS)

compat: env ## what six versions of transformers do with each kind of cache (installs them under .compat/)
	$(PY) -m shared.compat $(ARGS)

lint: env ## ruff: lint and format, without changing a file
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: env ## ruff: format, and put right what it can
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

##@ Read and write the pages

docs: env ## build the site into site/
	$(PY) -m mkdocs build --strict

serve: env ## show the site while you write
	$(PY) -m mkdocs serve

##@ Keep the repository

lock: ## write requirements.lock anew from pyproject.toml
	@$(PYTHON) shared/setup_env.py --lock --torch-index "$(TORCH_INDEX)"

clean: ## remove caches, the built site and local results; models and .venv stay
	rm -rf site results/local .pytest_cache .ruff_cache .hypothesis .cache
	find shared steps tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv, models/ and the other environments, too
	rm -rf .venv .compat .peers models
