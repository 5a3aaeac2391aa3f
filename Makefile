# Targets that need the project's own environment build it first; it is built again when the packaging files change.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready-$(shell cat pyproject.toml setup.py | cksum | cut -d' ' -f1)

# The oldest transformers that pyproject.toml allows, over the other packages of .venv.
FLOOR := .venv-floor
FLOOR_TRANSFORMERS := transformers==5.17.0

.PHONY: demo test test-slow test-floor lint format bench device clean

demo: $(READY)
	$(BIN)/tokred demo

test: $(READY)
	$(BIN)/python -m pytest -q -n 2

test-slow: $(READY)
	$(BIN)/python -m pytest -q -n 2 -m "slow or not slow" --timeout 600

test-floor: $(FLOOR)/ready
	$(FLOOR)/bin/python -m pytest -q -n 2 tests/test_acceptance.py tests/test_handle.py tests/test_errors.py \
		tests/test_invariants.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/tokred bench prefill

# For a machine with a GPU: uses the python3 found there, installs nothing.
device:
	bash evals/device.sh

# The pinned torch goes in first, so that no other requirement chooses the version.
$(READY):
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.14.1 torchvision==0.29.1
	$(BIN)/python -m pip install --quiet --editable ".[transformers,vision,evals,dev]"
	rm -f .venv/ready-*
	touch $@

$(FLOOR)/ready: $(READY)
	test -x $(FLOOR)/bin/python || $(BIN)/python -m venv $(FLOOR)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" > \
		"$$($(FLOOR)/bin/python -c 'import site; print(site.getsitepackages()[0])')/newest.pth"
	$(FLOOR)/bin/python -m pip install --quiet --upgrade "$(FLOOR_TRANSFORMERS)"
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
