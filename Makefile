# `make demo` writes report.html from a shipped checkpoint; `make test` runs every check.
# Both need only Python 3.11 or newer and make: they install the rest into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test check format benchmark clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/windtunnel report bijection-transformer -o report.html

check: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile

format: $(VENV)/.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

benchmark: $(VENV)/.installed
	for file in tests/benchmarks/*.py; do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf $(VENV)
