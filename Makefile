# One door to everything: `make help` lists it. ARGS="…" is passed on: make test ARGS="tests/comm -k gloo".

VENV := .venv
BIN := $(VENV)/bin
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.installed
# The torch pin stands in one place. It goes first and alone, so that nothing else decides which torch is installed.
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
# For example PIP_ARGS="--index-url …" to choose where packages, and which build of torch, come from.
PIP_ARGS ?=
PIP = $(BIN)/python -m pip install --disable-pip-version-check --no-compile
# What pip itself would do on one core. Some packages carry files that are no Python, which is no error.
COMPILE = $(BIN)/python -m compileall -qq -j 0 $(VENV) || true
PYTHON ?= $(or $(firstword $(shell for p in python3 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p; done)),python3)
# Images of containers set it: each of hundreds of processes would compile the modules of this tree anew.
unexport PYTHONDONTWRITEBYTECODE
# One more than the smallest machine has cores: tests wait for processes a third of the time.
WORKERS ?= 3
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Measured: 96 % of lines and branches of the engine and control packages.
ENGINE_COVERAGE := 95
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all soak coverage check format docs docs-blocks docs-refresh bench bench-quick \
    papers-check papers-test package clean gpu

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP)  ## make .venv and install everything the service, the tests and the checks need

# What the service and the commands need; the tests and checks add theirs to the same .venv.
$(SERVING): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed, '$(PYTHON)' is not: install it, or name one with make PYTHON=…" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	    echo "'$(PYTHON) -m venv' failed: on Debian and Ubuntu, install python3-venv" >&2; rm -rf $(VENV); exit 2; }
	@echo "$(VENV): $(TORCH), the largest part"
	$(PIP) $(PIP_ARGS) "$(TORCH)"
	@echo "$(VENV): dist-attn and what it needs to serve"
	$(PIP) $(PIP_ARGS) -c constraints.txt -e .
	@$(COMPILE)
	@touch $@

$(STAMP): $(SERVING) papers/pyproject.toml
	@echo "$(VENV): what tests, checks and documentation need"
	$(PIP) $(PIP_ARGS) -c constraints.txt -e ".[dev,docs]" -e papers
	@# Apart, for its tests alone: transformers takes its kernels wherever it can be imported, also without a GPU.
	$(PIP) $(PIP_ARGS) -c constraints.txt --no-deps --upgrade --target $(VENV)/.fla fla-core einops
	@$(COMPILE)
	@touch $@

# A model by name, of those that `dist-attn models` lists, or a folder; what is not here is fetched once.
MODEL ?=

serve: $(SERVING)  ## start the service on http://127.0.0.1:8000 with the models that ship; MODEL=smollm2 for one that chats
	$(if $(MODEL),@if $(BIN)/python -m dist_attn models show | grep -q "^$(MODEL)  not here"; then \
	    $(PIP) --compile $(PIP_ARGS) -c constraints.txt -e ".[hf,structured]" && $(BIN)/python -m dist_attn models add $(MODEL); fi)
	@exec $(BIN)/python -m dist_attn serve $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: setup  ## run the tests but for the slow ones; what is skipped says why
	$(PYTEST) -m "not slow" $(ARGS)

test-all: setup  ## run every test, with as many examples of each property as it is worth
	$(PYTEST) --hypothesis-profile full $(ARGS)

soak: setup  ## ten minutes of mixed work on a served engine; ARGS="--soak-seconds 60" for less
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/system/test_soak.py -s --soak-seconds 600 -o faulthandler_timeout=900 $(ARGS)

coverage: setup  ## run every test, then list the lines and branches that none reaches
	rm -f .coverage .coverage.*
	$(PYTEST) --hypothesis-profile full --cov --cov-report= $(ARGS)
	$(BIN)/coverage report
	@echo "engine and control by themselves:"
	$(BIN)/coverage report --include='dist_attn/rank/*,dist_attn/rank_link/*,dist_attn/control/*' --fail-under=$(ENGINE_COVERAGE)

check: setup  ## style, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## put the code into its one shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup  ## build the documentation into site/, strictly and without a network
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --strict $(ARGS)

docs-blocks: setup  ## list the code blocks of the pages, and which test runs each or why none can
	@PYTHONPATH=. $(BIN)/python -m tests.docs.blocks

docs-refresh: setup  ## write the pages and figures of docs/ that come from the code
	$(BIN)/python -m docs.making.reference
	$(BIN)/python -m docs.making.figures
	$(BIN)/python -m tests.adapters.supported
	$(BIN)/python -m tests.adapters.context_parallel_table

bench: setup  ## run the benchmarks once their tests are green, and file the results
	PYTHONPATH=papers $(BIN)/python -m dist_attn_papers $(ARGS)

# Without setup: a machine that is lent for minutes may have torch and no network. Its own Python then does.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

gpu:  ## check and measure a GPU; ARGS="--part 1" is six minutes, "--part 2" five more, --tiny shows that all of it runs
	@$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

bench-quick: setup  ## compare a few ratios with the filed ones; fails where more than 15 % were lost
	$(BIN)/python -m benchmarks.guard $(ARGS)

papers-check: setup  ## types of papers/, and that nothing of the product imports it
	MYPYPATH=papers $(BIN)/mypy -p dist_attn_papers
	$(BIN)/python -m pytest -q tests/test_architecture.py -k papers

papers-test: setup  ## the tests of papers/; ARGS="-m 'not slow'" leaves out what starts whole systems
	PYTHONPATH=$(CURDIR)/papers $(PYTEST) papers/tests $(ARGS)

package: setup  ## build the wheels and sdists into dist/, and try each wheel in an environment of its own
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist client
	deploy/try-wheel.sh $(BIN)/python dist/dist_attn-*.whl dist/dist_attn_client-*.whl constraints.txt $(PIP_ARGS)

clean:  ## remove what was built, .venv included
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.* htmlcov
