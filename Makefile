# make caption   set up .venv and describe the sample image and the sample video
# make test      run the tests          make slow   run those that take minutes
# make browser   test the web demo in Chromium (the system's)
# make lint      check style and types  make mutants  mutation score of the core's tests (resumable)
# make clean     remove .venv and caches
#
# Variables: PYTHON (3.11 or newer), TORCH (requirement to install torch by, e.g. TORCH=torch==2.13.0).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SAMPLES := vision/embedded/samples

# Without an NVIDIA driver, gigabytes of CUDA libraries would be of no use. Off Linux the usual build has none.
CPU_TORCH := torch==2.13.0+cpu
TORCH ?= $(if $(filter Linux,$(shell uname -s)),$(if $(shell nvidia-smi -L 2>/dev/null),torch,$(CPU_TORCH)),torch)

# Packages that have code, for mypy.
PACKAGES := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))

.PHONY: caption test slow browser mutants lint types format clean
.DELETE_ON_ERROR:

caption: $(VENV)/.installed
	$(BIN)/mmspec caption $(SAMPLES)/scene.png
	$(BIN)/mmspec caption $(SAMPLES)/clip.mp4

# Tiny models gain nothing from threads, and lose much where several processes share few cores.
test slow browser mutants: export OMP_NUM_THREADS ?= 1

test: $(VENV)/.tested
	$(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist worksteal

slow: $(VENV)/.tested
	$(BIN)/python -m pytest -m slow

# MMSPEC_SCREENSHOTS=DIR keeps pictures of the page.
browser: $(VENV)/.tested
	$(PIP) install --quiet --editable ".[browser]"
	$(BIN)/python -m pytest -n 0 -m browser tests/demos

# FILES=mmspec/verify.py tries that file alone; see tests/mutation.toml.
mutants: $(VENV)/.linted
	$(BIN)/python tests/mutation.py $(FILES)

lint: $(VENV)/.linted types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.linted
	$(BIN)/mypy $(PACKAGES)

format: $(VENV)/.linted
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .mutants .pytest_cache .ruff_cache .mypy_cache

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Python 3.11 or newer is needed: $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.created
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install "$(TORCH)" 2>$(VENV)/torch.log || { \
	  echo "error: pip cannot install $(TORCH) (see $(VENV)/torch.log): point pip at an index that has builds of torch" \
	    "for the CPU, or set TORCH=torch to take the usual, larger build" >&2; exit 2; }
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) install --quiet --editable ".[test]"
	@touch $@

$(VENV)/.linted: $(VENV)/.tested
	$(PIP) install --quiet --editable ".[dev]"
	@touch $@
