# `make run` and `make test` do all the set-up there is on a fresh machine with Python 3.11 and make.
PYTHON ?= python3
PY := .venv/bin/python
PORT ?= 5000
export MLFLOW_DISABLE_TELEMETRY := true

.PHONY: run test test-long golden bench docs test-browser test-gpu gpu-kernels test-ray lint setup ui clean

run: setup
	$(PY) train.py --algo fedem --dataset filmtrust --alpha 0.9

test: setup lint
	$(PY) -m pytest -n auto --dist worksteal

# further cases, most of them with kernels of their own to compile
test-long: setup
	$(PY) -m pytest -m long -n auto --dist worksteal

# every method computes what it did: all cases of tests/golden.py; the tests run some of them
golden: setup
	$(PY) -m tests.golden

# measures this machine (a quarter of an hour) and writes the table of docs/performance.md
bench: setup
	$(PY) -m fedbench bench --all --json docs/results/bench.json --page docs/performance.md

# the site of docs/ in site/; `$(PY) -m mkdocs serve` shows it while you write
docs: setup
	$(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements-docs.txt
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# needs Chromium from the system's packages, such as `apt-get install chromium`
test-browser: setup
	$(PY) -m pytest -m browser tests/test_browser.py tests/test_report_browser.py tests/test_site.py

# needs no GPU: Triton's interpreter runs the kernels, its compiler makes machine code of them
test-gpu: setup
	$(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements-gpu.txt
	$(PY) -m pytest tests/test_derived_gpu.py -m gpu

# compiles the kernels for GPUs without one and writes their table in docs/performance.md
gpu-kernels: setup
	$(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements-gpu.txt
	$(PY) -m fedbench.commands.gpu_kernels

test-ray: setup
	$(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements-ray.txt
	$(PY) -m pytest tests/test_ray_pool.py -m ray

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

ui: setup
	@$(PY) -m fedbench ui --port $(PORT)

setup: .venv/ready

.venv/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	-$(PY) -m fedbench fetch filmtrust ml-100k ml-1m lastfm-2k
	touch $@

clean:
	rm -rf .venv fedbench/__pycache__ runs site mlflow.db mlartifacts .pytest_cache .mypy_cache .ruff_cache .hypothesis
