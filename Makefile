# Every target does its own set-up in .venv. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.specprefill
# Extra arguments for pytest: make test PYTEST_ARGS="-k rope -x"
PYTEST_ARGS ?=
# Flags of the server: make serve SERVE_ARGS="--keep-rate 0.1 --port 8080"
SERVE_ARGS ?=
# The interpreter for the peer's environment, which is not ours.
PEER_PYTHON ?= python3.11
# The set-up that all the goals together want: with make -j, nothing runs in .venv while pip still changes it.
READY := $(STAMPS)/$(if $(filter test-ray,$(MAKECMDGOALS)),ray,$(if $(filter test-lm-eval,$(MAKECMDGOALS)),lm-eval,$(if $(filter setup lint format,$(MAKECMDGOALS)),dev,$(if $(filter test test-real test-browser eval-smoke,$(MAKECMDGOALS)),test,base))))

.PHONY: help setup demo serve test test-real test-browser test-ray test-lm-eval eval-smoke lint format bench roofline aot peer clean distclean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY)  ## make .venv with everything that tests, lint and scripts need

demo: $(READY)  ## a real Llama answers a question about a long text, read whole and read sparsely
	@$(PY) scripts/generate.py --main smollm2-135m-deep4 --speculator smollm2-135m --keep-rate 0.15 --compare --file examples/ferry-house.txt --question "What is the code for the cellar door?"

serve: $(STAMPS)/serve  ## serve the demo's pair at http://127.0.0.1:8000 (SERVE_ARGS="--main ..." for others)
	@exec $(PY) scripts/serve.py $(SERVE_ARGS)

test: $(READY)  ## run the tests (PYTEST_ARGS="-k name" to choose)
	@$(PY) -m pytest -n auto --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

test-real: $(READY)  ## SmolLM2-135M against its goldens, and 200 answers that must not be empty; fetches the built-in model where it is not there yet
	@SPECPREFILL_JAX_CACHE="$${SPECPREFILL_JAX_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}}" $(PY) -m pytest -m real tests/test_real_model.py

test-browser: $(READY)  ## the server's page in a headless Chromium, which must be there (or CHROMIUM=path)
	@$(PY) -m pytest -m browser tests/server/test_page.py $(PYTEST_ARGS)

test-ray: $(READY)  ## replicas on a Ray cluster of this machine; installs Ray, a large download, and takes a minute or two
	@$(PY) -m pytest -m ray tests/server/test_ray.py $(PYTEST_ARGS)

test-lm-eval: $(READY)  ## short tasks through lm-eval on data of their own; installs lm-eval, a large download
	@$(PY) -m pytest -m lm_eval tests/evals/test_lm_eval.py $(PYTEST_ARGS)

eval-smoke: $(READY)  ## one sample of every benchmark on a tiny pair that truly retrieves; part of `make test`, too
	@$(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile tests/test_eval_smoke.py tests/test_retrieval_pair.py $(PYTEST_ARGS)

lint: $(READY)  ## ruff, format check, mypy
	@$(PY) -m ruff check specprefill_jax scripts tests
	@$(PY) -m ruff format --check specprefill_jax scripts tests
	@$(PY) -m mypy

format: $(READY)  ## let ruff mend and format the code
	@$(PY) -m ruff check --fix specprefill_jax scripts tests
	@$(PY) -m ruff format specprefill_jax scripts tests

bench: $(READY)  ## prefill rates, times to first token and needles on this machine, into benchmarks/
	@$(PY) scripts/bench_prefill.py --out benchmarks/prefill.json $(if $(wildcard build/peer/.stamp),--peer build/peer/bin/python)
	@$(PY) scripts/bench_ttft.py --out benchmarks/ttft.json
	@$(PY) scripts/bench_kernels.py --out benchmarks/kernels.json
	@$(PY) scripts/bench_load.py --out benchmarks/load.json
	@$(PY) scripts/eval_needle.py --out benchmarks/needle.json

roofline: $(READY)  ## predict times to first token on eight H100s and H200s, into benchmarks/ and docs/
	@$(PY) scripts/roofline.py --out benchmarks/roofline.json --plot docs/roofline.svg

aot: build/aot/.stamp  ## compile kernels and whole models for H100s, H200s and TPUs, which need not be here, and print what they would need
	@build/aot/bin/python scripts/aot_report.py --out benchmarks/aot.json
	@build/aot/bin/python scripts/aot_models.py --out benchmarks/aot_models.json

peer: build/peer/.stamp  ## make build/peer, the environment of the side-by-side benchmark (transformers and torch, CPU)

clean:  ## remove caches and build products; .venv stays
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find specprefill_jax scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	@rm -rf $(VENV)

# Set-up. A stamp for each set of packages, each after the one before, so that no two pips meet in one environment (make -j).
# A .venv made by other means is taken as it is, and completed.
# (pipefail by hand as well: make 3.81, which macOS has, does not know .SHELLFLAGS.)
install = set -o pipefail; $(1) -m pip install $(2) 2>&1 | awk -f scripts/pip_progress.awk

$(PY):
	@python=$$(scripts/find_python.sh) && \
	echo "Making $(VENV) with $$("$$python" --version) ($$python)." && \
	"$$python" -m venv --clear $(VENV)

$(STAMPS)/base: pyproject.toml | $(PY)
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { echo "$(VENV) holds a Python older than 3.12: make distclean, then again." >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null
	@echo "Installing specprefill_jax and what it needs into $(VENV)."
	@$(call install,$(PY),--editable .)
	@mkdir -p $(@D) && touch $@

$(STAMPS)/serve: $(STAMPS)/base
	@echo "Installing what the server needs."
	@$(call install,$(PY),--editable '.[serve]')
	@touch $@

$(STAMPS)/test: $(STAMPS)/base
	@echo "Installing what the tests need."
	@$(call install,$(PY),--editable '.[test]')
	@touch $@

$(STAMPS)/dev: $(STAMPS)/test
	@echo "Installing what lint needs."
	@$(call install,$(PY),--editable '.[dev]')
	@touch $@

# With make -j beside lint or format, their tools are wanted too.
$(STAMPS)/ray: $(STAMPS)/$(if $(filter setup lint format,$(MAKECMDGOALS)),dev,test)
	@echo "Installing Ray. This is a large download."
	@$(call install,$(PY),--editable '.[ray]')
	@touch $@

# After Ray where both are wanted (make -j).
$(STAMPS)/lm-eval: $(STAMPS)/$(if $(filter test-ray,$(MAKECMDGOALS)),ray,$(if $(filter setup lint format,$(MAKECMDGOALS)),dev,test))
	@echo "Installing lm-eval. This is a large download."
	@$(call install,$(PY),--editable '.[lm-eval]')
	@touch $@

build/aot/.stamp: pyproject.toml
	@python=$$(scripts/find_python.sh) && echo "Making build/aot with $$("$$python" --version): the CUDA and TPU compilers. This is a large download." && \
	"$$python" -m venv --clear build/aot
	@$(call install,build/aot/bin/python,--editable '.[aot]')
	@touch $@

build/peer/.stamp:
	@echo "Making build/peer with $(PEER_PYTHON): torch 2.13.0 and transformers. This is a large download."
	@$(PEER_PYTHON) -m venv --clear build/peer
	@$(call install,build/peer/bin/python,'torch==2.13.0' transformers numpy)
	@touch $@
