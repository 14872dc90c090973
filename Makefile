# Each target sets up its virtual environment, and installs again only if pyproject.toml has changed.
# `make` without a target lists the targets.

VENV ?= .venv
PYTHON := $(VENV)/bin/python
ARGS ?=
AFTER := :

# Variables of the shell that would change the virtual environment.
unexport PYTHONPATH PYTHONHOME PYTHONOPTIMIZE PYTHONSAFEPATH PYTHONWARNINGS VIRTUAL_ENV
# Each of hundreds of processes would compile the modules, and rewrite the assertions of all tests.
unexport PYTHONDONTWRITEBYTECODE
unexport PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.NOTPARALLEL:
.PHONY: help demo test test-slow test-full test-matrix test-pax run-pax test-parity run-parity lint format bench docs docs-serve clean

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(VENV)/.installed-demo  ## Train a small classifier on images that DALI decodes.
	@$(PYTHON) examples/quickstart.py $(ARGS)

test: $(VENV)/.installed-test  ## Run the tests on all cores, without slow ones; ARGS='-k epochs' is passed to pytest.
	@$(PYTHON) -m pytest -n auto --dist worksteal -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-test  ## Run the slow tests: whole programs, pages, packaging, Numba, conformance of sources.
	@$(PYTHON) -m pytest -n auto --dist worksteal -m slow $(ARGS)

test-full: $(VENV)/.installed-test  ## Run all combinations of parametrized tests; takes more than an hour.
	@DALIJAX_FULL=1 $(PYTHON) -m pytest -n auto -o faulthandler_timeout=0 $(ARGS)

# Pax's releases need Python 3.10, and an older JAX than the other tests.
PAX_PYTHON = $(shell .ci/python 3.10 2>/dev/null)

test-pax:  ## Run the tests of the Pax adapter in .venv-pax; needs Python 3.10.
	@$(if $(PAX_PYTHON),$(MAKE) --no-print-directory VENV=$(VENV)-pax BASE=$(PAX_PYTHON) run-pax,$(NO_PAX))

run-pax: $(VENV)/.installed-pax
	@$(PYTHON) -m pytest tests/pax -W ignore::DeprecationWarning $(ARGS)

NO_PAX = for line in "$(RULER)" "THE TESTS OF THE PAX ADAPTER DID NOT RUN: there is no Python 3.10 here" \
    "$(RULER)"; do echo "$$line"; done
RULER = ======================================================================

test-parity:  ## Compare augmentation with torchvision in .venv-parity; needs 7 GB.
	@$(MAKE) --no-print-directory VENV=$(VENV)-parity run-parity

run-parity: $(VENV)/.installed-parity
	@$(PYTHON) -m pytest tests/parity $(ARGS)

test-matrix:  ## Run the tests with the oldest and newest versions on each installed Python.
	@python3 .ci/matrix.py $(ARGS)

lint: $(VENV)/.installed-test  ## Check style, format and types.
	@failed=0; \
	$(PYTHON) -m ruff check . || failed=1; \
	$(PYTHON) -m ruff format --check . || failed=1; \
	$(PYTHON) -m mypy || failed=1; \
	exit $$failed

format: $(VENV)/.installed-test  ## Fix style and format.
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

bench: $(VENV)/.installed-bench  ## Run the benchmarks that need no GPU; ARGS=overhead runs one.
	@$(PYTHON) benchmarks/run.py $(ARGS)

export NO_MKDOCS_2_WARNING := 1

docs: $(VENV)/.installed-docs  ## Build the documentation as site/index.html; warnings are errors.
	@$(PYTHON) -m mkdocs build

docs-serve: $(VENV)/.installed-docs  ## Serve the documentation at localhost:8000.
	@$(PYTHON) -m mkdocs serve $(ARGS)

clean:  ## Remove build products and caches, but not the virtual environment.
	rm -rf build dist *.egg-info .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache examples/out site
	find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +

$(VENV)/.installed-demo: EXTRAS := cpu,examples
ALL := test,lint,examples,grain,clu,tf,numba,prometheus
$(VENV)/.installed-test: EXTRAS := $(ALL)
$(VENV)/.installed-bench: EXTRAS := $(ALL),bench
$(VENV)/.installed-docs: EXTRAS := docs
$(VENV)/.installed-pax: EXTRAS := pax
$(VENV)/.installed-parity: EXTRAS := test,examples,parity
# The extras `test`, `examples` and `clu` want a newer JAX.
$(VENV)/.installed-pax: AFTER = $(PYTHON) -m pip install -qq pytest hypothesis cloudpickle clu pillow matplotlib tqdm
# DALI's TensorFlow plugin is built from source against the installed TensorFlow.
$(VENV)/.installed-test $(VENV)/.installed-bench: AFTER = $(PYTHON) -m pip install -qq --no-build-isolation --no-deps \
    nvidia-dali-tf-plugin-cuda120==$$($(PYTHON) -c 'import nvidia.dali; print(nvidia.dali.__version__)') \
    || echo "DALI's TensorFlow plugin could not be built: its tests will be skipped"

# The stamp is written last, so that the next call repeats a failed installation.
$(VENV)/.installed-%: pyproject.toml
	@rm -f $@
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || \
	    { base=$${BASE:-$$(.ci/python)} && "$$base" -m venv --clear $(VENV); }
	@echo "Installing dalijax[$(EXTRAS)] into $(VENV) (once; this takes a minute or two) ..."
	@$(PYTHON) -m pip install -qq -e '.[$(EXTRAS)]'
	@$(AFTER)
	@touch $@
