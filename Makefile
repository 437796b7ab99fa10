# `make` alone lists the targets. Everything runs in .venv, which `make setup` makes from requirements/.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test lint types check protections bench format docs clean

unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
CODE := nbehind rollout_queue weight_sync producer_svc trainer_svc
DEMO_ARGS ?=
PYTEST_ARGS ?=
ARGS ?=

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with everything pinned; nothing to do the second time
	@./scripts/setup.sh

demo: setup ## train the demo: GRPO with two vLLM producers on CPU, some minutes (DEMO_ARGS='--set run.n_behind=2')
	@$(BIN)/nbehind demo $(DEMO_ARGS)

test: setup ## run the tests (PYTEST_ARGS='-k queue')
	@$(BIN)/python -m pytest --numprocesses 3 --dist loadfile $(PYTEST_ARGS)

lint: setup ## ruff: style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup ## mypy
	@$(BIN)/mypy $(CODE)

check: lint types test ## what CI runs: lint, types, test

protections: setup ## remove each protection in a copy and see its test fail (ARGS='--only lease'); an hour
	@$(BIN)/python scripts/check_protections.py $(ARGS)

bench: setup ## measure: queue rate, overlap, stall of weight updates, what grows in 5,000 steps; JSON in bench/out
	@mkdir -p bench/out
	@$(BIN)/python -m bench.queue --json bench/out/queue.json
	@$(BIN)/python -m bench.overlap --json bench/out/overlap.json
	@$(BIN)/python -m bench.weight_sync --params 1 135 --members 1 2 --json bench/out/weight_sync.json
	@$(BIN)/python -m bench.stall --json bench/out/stall.json
	@$(BIN)/python -m bench.long_run --json bench/out/long_run.json

format: setup ## format the code
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

docs: setup ## bring the configuration table of README.md up to date
	@$(BIN)/python -m nbehind.config_docs README.md

clean: ## delete .venv and caches (runs are kept)
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis bench/out *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
