# `make train` and `make test` are all that a newcomer needs; `make help` lists the rest.

SHELL := /bin/bash
VENV ?= .venv
WORKERS ?= 2
BIN = $(VENV)/bin
# Written when the environment is complete; a change of anything that determines it makes it out of date.
READY = $(VENV)/.ready
# Written when the extension is built from csrc/, where there is a toolkit; a change there sets up nothing else.
BUILT = $(VENV)/.built
export PYTHON

SHELL_SCRIPTS = $(wildcard scripts/*.sh) scripts/train.slurm .ci/run
NATIVE_SOURCES = $(shell find csrc examples tests/native -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help train test gpu lint types support versions pages site builds wheel release format setup clean

help:  ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 10
	@echo
	@echo "ARGS=\"...\"  arguments for 'ncclep train', pytest or the script that runs"
	@echo "PYTHON=...  the Python to use: a version such as 3.12, a command or a path"
	@echo "VENV=...    the folder of the virtual environment (default: .venv)"
	@echo "MEGATRON_LM=... a checkout of Megatron-LM's main branch, to test with too"
	@echo "WORKERS=... how many processes share all the tests (default: 2)"

train: ARGS = --ranks 2 --device cpu --compare alltoall --overwrite
train: $(BUILT)  ## train a small mixture-of-experts GPT on this machine's CPU
	$(BIN)/ncclep train $(ARGS)

# The processes share both cores: one process rarely has work for more than one.
# tests/serving needs the servers that scripts/fetch_servers.sh unpacks, 1 GB to download.
# Then the tests that depend on the release of Megatron-Core, with each release that
# scripts/fetch_megatron.sh has unpacked, including MEGATRON_LM's; `make test PYTHON=3.11` runs all
# tests with the oldest one.
# With a '=': pytest would take a folder that exists for tests, and not know its own options.
test: $(BUILT)  ## run the tests; ARGS="-k NAME" picks some
	scripts/fetch_servers.sh $(VENV) || echo "no vLLM or SGLang: tests/serving is left out"
	$(BIN)/python -m pytest $(or $(ARGS),-n $(WORKERS) --ran=runs/ran)
	$(if $(ARGS),,[ ! -d $(VENV)/megatron ] || scripts/fetch_megatron.sh $(VENV))
	$(if $(ARGS),,ls $(VENV)/megatron 2>/dev/null | grep -v '^0\.16' \
	| xargs -r -P $(WORKERS) -I RELEASE $(BIN)/python -m pytest -q --ran=runs/ran --megatron RELEASE)

gpu: $(BUILT)  ## run the tests that need GPUs, into runs/gpu; ARGS="contract faults" picks parts
	$(BIN)/python scripts/gpu.py $(ARGS)

lint: $(READY)  ## check style: Python, shell scripts, workflows, native sources
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck $(SHELL_SCRIPTS)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-actions .github/actions/*/action.yml
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format --dry-run --Werror $(NATIVE_SOURCES))

types: $(READY)  ## check types
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini --cache-dir .mypy_cache/tests

versions: $(READY)  ## write docs/versions.md from what has run; `make test` and CI leave runs/ran/
	$(BIN)/python scripts/versions.py --write $(wildcard runs/ran/*.json)

support: $(BUILT)  ## write the lists of docs/support.md and tested.md from the tests
	$(BIN)/python scripts/support.py --write

pages: $(READY)  ## write generated parts and figures of README.md and docs/
	$(BIN)/python scripts/pages.py --write

site: $(READY)  ## build docs/ as a site in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

builds: $(READY)  ## compile the extension with several CUDA toolkits; ARGS="13.0:90" picks some
	PYTHON=$(BIN)/python scripts/build_matrix.sh $(ARGS)

wheel: $(READY)  ## build the source distribution and the wheel, into dist/ or ARGS
	PYTHON=$(BIN)/python scripts/build_wheel.sh $(ARGS)

release: wheel  ## build a release's files into dist/, check them, and sort them into build/upload
	rm -rf build/upload
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python scripts/check_wheels.py --sort-into build/upload dist

format: $(READY)  ## rewrite all sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format -i $(NATIVE_SOURCES))

setup: $(BUILT)  ## make the virtual environment only

$(READY): pyproject.toml setup.py $(wildcard constraints/*.txt) scripts/setup_venv.sh scripts/fetch_megatron.sh
	NCCLEP_BUILD_EXTENSION=0 scripts/setup_venv.sh $(VENV)
	@touch $@

$(BUILT): $(READY) $(shell find csrc -type f)
	@touch $@.begin  # sources that change meanwhile are newer
	$(BIN)/python setup.py --quiet build_ext --inplace
	@mv $@.begin $@

clean:  ## remove the output of the other targets, including the environments; runs/ stays
	rm -rf .venv* build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
