# `make demo` and `make test` set everything up on a machine that has Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PAGES := src/bertsmith/report/templates src/bertsmith/serving/page

# without cached bytecode every process would compile PyTorch's sources again, which takes seconds
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-wheel test-gpu chaos lock lint bench docs docs-serve clean

# installed again when what is to be installed changes; what is never imported need not be compiled
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'Bertsmith needs Python 3.11 or newer, this is %s' % sys.version.split()[0])"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[all,test,lint]"
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/bertsmith demo --out demo --force
	@echo "Look at demo/report.html"

test: $(VENV)/.installed
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# what takes minutes: several processes, kills from outside, further graphs
test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

# the wheel in dist/, tested in an environment of its own
test-wheel: $(VENV)/.installed
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	$(BIN)/python -m pytest -m slow tests/documents/test_installed_wheel.py

# every kernel on a GPU; neighbouring tests go to one process, so that few processes compile the same kernel
test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -m "" --numprocesses 12 --dist worksteal tests/kernels tests/contracts/test_padding.py tests/unit/training/test_adamw.py tests/unit/layers/test_replay.py

# kills, mutated files, failing writes, hostile clients and generated requests: an hour or two on two idle cores; the
# figures are in docs/results/reliability.md
chaos: $(VENV)/.installed
	$(BIN)/python tests/chaos/chaos.py --kills 300 --mutations 5000
	$(BIN)/python tests/chaos/serving_trial.py --seconds 12 --signals 3
	$(BIN)/python tests/chaos/schema_trial.py

# versions and hashes of everything that the service needs
lock:
	uv pip compile pyproject.toml --quiet --extra serve --constraint constraints.txt --python-version 3.12 --generate-hashes --no-annotate --custom-compile-command "make lock" --output-file requirements.lock

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/djlint --lint --quiet $(PAGES)
	$(BIN)/oxlint --deny-warnings $(PAGES)

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/corpus.py
	$(BIN)/python benchmarks/encoder.py

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[docs]"
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html"

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

clean:
	rm -rf $(VENV) demo build dist site
