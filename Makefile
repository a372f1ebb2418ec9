# make demo   install, then stream three answers from the bundled pair and compare them with plain decoding
# make test   install, then lint, type-check, check the import contract and run the tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test reference clean

demo: $(INSTALLED)
	$(BIN)/volley demo

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest --cov --cov-report=term:skip-covered

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Train the bundled pair again from a folder of training text (see docs/training.md).
reference: $(INSTALLED)
	scripts/reference/run $(DATA)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
