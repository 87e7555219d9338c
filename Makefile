# Each target sets up .venv first (requirements/install.sh), which takes minutes once and no time after that.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup train experiment test lint doctor up open down clean
.NOTPARALLEL:

BIN := .venv/bin
EXPERIMENT ?= deployments/experiments/laptop.yaml
ARGS ?=

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo
	@echo 'EXPERIMENT=file.yaml and ARGS="optimizer.lr=1e-6" go to train; ARGS="-k ledger" goes to test.'

setup: ## Install what is missing into .venv (CUDA stack where there is a GPU, else CPU stack)
	@requirements/install.sh

train: experiment setup ## Train the laptop experiment, or EXPERIMENT
	@$(BIN)/hexflow prepare "$(EXPERIMENT)" $(ARGS)
	@$(BIN)/hexflow train "$(EXPERIMENT)" $(ARGS)

# Looked for before set-up, which takes minutes.
experiment:
	@test -f "$(EXPERIMENT)" || \
	{ echo 'hexflow: There is no experiment file $(EXPERIMENT); see deployments/experiments.' >&2; exit 2; }

test: setup ## Run all tests; ARGS='-m "not e2e"' for the quick ones
	@$(BIN)/ruff check --quiet .
	@$(BIN)/python -m pytest $(ARGS)

lint: setup ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

doctor: ## Say what this machine lacks, and the remedy (works before set-up, too)
	@if [ -x $(BIN)/python ]; then python=$(BIN)/python; else python=$$(requirements/install.sh --python) || exit; fi; \
	$$python -m deployments.doctor

up: setup ## Start the local stack: Prefect, MLflow, workers
	@$(BIN)/hexflow up

open: setup ## Open the pages of Prefect and MLflow, signed in
	@$(BIN)/hexflow open

down: ## End the local stack
	@if [ -x $(BIN)/hexflow ]; then $(BIN)/hexflow down; fi

clean: down ## Remove .venv and tools' caches; results and prepared models stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build hexflow.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
