# What a person types; BUILD.md says what each target prints.
#
# Each environment is made once. Its stamp file is newer than what it was made
# from, so that a second `make test` installs nothing.

PYTHON ?= python3
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
PYTEST_FLAGS ?=
DEMO_FLAGS ?= --experiment=experiments/digits_cnn.py --virtual_devices=2 \
    --precision=mixed_bfloat16 --verify_updates=5

export TF_CPP_MIN_LOG_LEVEL ?= 2

VENV := .venv
OLDEST := .venv-oldest
# With PyTorch in it, that is measured too.
TORCH_PYTHON ?= $(VENV)/bin/python
# With the prepared mnist of TensorFlow Datasets, the wait for it is measured.
MNIST_DIR ?= $(TFACCUM_TEST_DATA)

.PHONY: help demo test test-all test-oldest bench bench-network lint clean

help:
	@echo 'make demo         install into $(VENV) and train the digits on 2 replicas'
	@echo 'make test         install into $(VENV), lint, type-check, run the tests'
	@echo 'make test-all     the same with the slow tests'
	@echo 'make test-oldest  run the tests on the oldest supported versions'
	@echo 'make bench        measure speed and memory, and write docs/performance.md'
	@echo 'make bench-network  measure training over a network, as root'
	@echo 'make clean        remove environments, caches and builds'

demo: $(VENV)/.installed
	$(VENV)/bin/tfaccum-train $(DEMO_FLAGS)

test: lint
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS)

# An empty -m takes back the "not slow" of pyproject.toml.
test-all: lint
	$(VENV)/bin/python -m pytest -m '' $(PYTEST_FLAGS)

# The oldest TensorFlow and Keras run on Python 3.11 and 3.12.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest $(PYTEST_FLAGS)

# What is measured stays in runs/, as lines of JSON. The profile comes last: it
# writes into docs/, and what is measured behind that is of a dirty tree.
BENCH := step_time memory start window_profile input_wait gpu
bench: $(VENV)/.installed
	mkdir -p runs
	$(VENV)/bin/python -m benchmarks.step_time \
	    --torch_python=$(TORCH_PYTHON) > runs/step_time.jsonl
	$(VENV)/bin/python -m benchmarks.step_time --jit >> runs/step_time.jsonl
	for examples in 32 64; do $(VENV)/bin/python -m benchmarks.step_time \
	    --model=cnn --micro_batch=$$examples >> runs/step_time.jsonl; done
	for steps in 2 32 128; do $(VENV)/bin/python -m benchmarks.step_time \
	    --model=mlp --steps=$$steps >> runs/step_time.jsonl; done
	$(VENV)/bin/python -m benchmarks.step_time \
	    --model=mlp --any_rows >> runs/step_time.jsonl
	$(VENV)/bin/python -m benchmarks.memory > runs/memory.jsonl
	$(VENV)/bin/python -m benchmarks.start > runs/start.jsonl
	$(VENV)/bin/python -m benchmarks.input_wait \
	    --data_dir=$(MNIST_DIR) > runs/input_wait.jsonl
	$(VENV)/bin/python -m benchmarks.gpu > runs/gpu.jsonl
	$(VENV)/bin/python -m benchmarks.window_profile \
	    --plot=docs/profile.png > runs/window_profile.jsonl
	$(VENV)/bin/python -m benchmarks.performance_report \
	    $(BENCH:%=runs/%.jsonl)

# Writes what it has measured to runs/network.jsonl too.
bench-network: $(VENV)/.installed
	mkdir -p runs
	$(VENV)/bin/python benchmarks/network.py --json=runs/network.jsonl \
	    --plot=docs/scaling.png

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(VENV)/bin/python $(PIP_INSTALL) --editable '.[test]'
	touch $@

$(OLDEST)/.installed: setup.cfg pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP_INSTALL) \
	    --constraint constraints-oldest.txt --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
