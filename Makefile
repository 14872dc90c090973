# Each target sets up the virtual environment that it needs; a second call installs nothing
# unless pyproject.toml has changed. `make` alone lists the targets.

VENV ?= .venv
PYTHON := $(VENV)/bin/python
ARGS ?=
AFTER := :

# What a shell may carry over that would reach into the environment, or out of it.
unexport PYTHONPATH PYTHONHOME PYTHONOPTIMIZE PYTHONSAFEPATH PYTHONWARNINGS VIRTUAL_ENV
unexport PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.NOTPARALLEL:
.PHONY: help demo test test-full test-matrix test-pax run-pax test-parity run-parity lint format bench docs docs-serve clean

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(VENV)/.installed-demo  ## Train a small classifier on pictures that DALI decodes.
	@$(PYTHON) examples/quickstart.py $(ARGS)

test: $(VENV)/.installed-test  ## Run the tests, on all cores; ARGS='-k epochs' goes to pytest.
	@$(PYTHON) -m pytest -n auto --dist worksteal $(ARGS)

test-full: $(VENV)/.installed-test  ## Run the tests over the whole matrix; it takes over an hour.
	@DALIJAX_FULL=1 $(PYTHON) -m pytest -n auto -o faulthandler_timeout=0 $(ARGS)

# Pax's releases need Python 3.10, and a JAX that the other tests are too new for.
PAX_PYTHON = $(shell .ci/python 3.10 2>/dev/null)

test-pax:  ## Run the tests of the Pax adapter, in .venv-pax, where there is a Python 3.10.
	@$(if $(PAX_PYTHON),$(MAKE) --no-print-directory VENV=$(VENV)-pax BASE=$(PAX_PYTHON) run-pax,$(NO_PAX))

run-pax: $(VENV)/.installed-pax
	@$(PYTHON) -m pytest tests/pax -W ignore::DeprecationWarning $(ARGS)

NO_PAX = for line in "$(RULER)" "THE TESTS OF THE PAX ADAPTER DID NOT RUN: there is no Python 3.10 here" \
    "$(RULER)"; do echo "$$line"; done
RULER = ======================================================================

test-parity:  ## Compare augmentation and the recipe with torchvision, in .venv-parity, of 7 GB.
	@$(MAKE) --no-print-directory VENV=$(VENV)-parity run-parity

run-parity: $(VENV)/.installed-parity
	@$(PYTHON) -m pytest tests/parity $(ARGS)

test-matrix:  ## Run the tests with the oldest and newest versions, on each Python that is there; half an hour.
	@python3 .ci/matrix.py $(ARGS)

lint: $(VENV)/.installed-test  ## Check style, format and types.
	@failed=0; \
	$(PYTHON) -m ruff check . || failed=1; \
	$(PYTHON) -m ruff format --check . || failed=1; \
	$(PYTHON) -m mypy || failed=1; \
	exit $$failed

format: $(VENV)/.installed-test  ## Rewrite the sources in the common format.
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

bench: $(VENV)/.installed-bench  ## Run the benchmarks that need no GPU; ARGS=overhead runs one.
	@$(PYTHON) benchmarks/run.py $(ARGS)

export NO_MKDOCS_2_WARNING := 1

docs: $(VENV)/.installed-docs  ## Build the documentation, site/index.html; a warning fails.
	@$(PYTHON) -m mkdocs build

docs-serve: $(VENV)/.installed-docs  ## Show the documentation at localhost:8000, and build it again as pages change.
	@$(PYTHON) -m mkdocs serve $(ARGS)

clean:  ## Remove what builds and runs leave behind, but not the virtual environment.
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
# DALI's TensorFlow plugin is built from source against the TensorFlow that is there.
$(VENV)/.installed-test $(VENV)/.installed-bench: AFTER = $(PYTHON) -m pip install -qq --no-build-isolation --no-deps \
    nvidia-dali-tf-plugin-cuda120==$$($(PYTHON) -c 'import nvidia.dali; print(nvidia.dali.__version__)') \
    || echo "DALI's TensorFlow plugin could not be built: its tests will be skipped"

# The stamp is made last: after a failed or interrupted install the next call installs again.
$(VENV)/.installed-%: pyproject.toml
	@rm -f $@
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || \
	    { base=$${BASE:-$$(.ci/python)} && "$$base" -m venv --clear $(VENV); }
	@echo "Installing dalijax[$(EXTRAS)] into $(VENV) (once; this takes a minute or two) ..."
	@$(PYTHON) -m pip install -qq -e '.[$(EXTRAS)]'
	@$(AFTER)
	@touch $@
