# Every target creates the environment that it needs, once. `make` lists the targets.
# Another interpreter:  make PYTHON=python3.12 test        An existing environment:  make VENV=/path test
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.clipzoo-installed
MKDOCS = NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs
export OMP_NUM_THREADS ?= 1
# Tests and the demo start many processes, which would compile the package again and again.
unexport PYTHONDONTWRITEBYTECODE
# Workers of pytest. Two cores have three where tests wait for processes a quarter of their time; JOBS=N is any number of them.
# The tests of a file share fixtures and run on one worker; tests/conftest.py says which file starts first.
WORKERS = 2
test test-all: WORKERS = 3
PARALLEL = $(PY) -m pytest -n $(or $(JOBS),$(WORKERS)) --dist loadfile --no-loadscope-reorder
NUMERICAL = -m "not slow and not slurm" $(addprefix tests/,encoders evaluation heads objectives ops training)

.PHONY: help install demo emoji hands reproduce-demo test test-fast test-all test-cpus test-slurm test-mteb test-ray lint bench bench-gpu docs docs-serve package studies clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1 \t/' | expand -t 20

# An environment that has another checkout of clipzoo is shared with it: installing here would replace that one in silence.
define OTHER_CHECKOUT
import json, pathlib, sys
from importlib import metadata
found = [d.read_text("direct_url.json") for d in metadata.distributions(name="clipzoo")]
urls = {json.loads(text)["url"] for text in found if text} - {pathlib.Path(sys.argv[1]).as_uri()}
if urls:
    sys.exit(f"{sys.prefix} has clipzoo from {urls.pop()}: give VENV=.venv, or uninstall clipzoo from it first")
endef
export OTHER_CHECKOUT
REFUSE_OTHER_CHECKOUT = $(PY) -I -c "$$OTHER_CHECKOUT" '$(CURDIR)'

# The stamp is written last, so that an interrupted installation is repeated.
$(STAMP): pyproject.toml constraints.txt
	@echo "== environment: $(VENV) (about two minutes the first time)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(REFUSE_OTHER_CHECKOUT)
	@if command -v uv >/dev/null 2>&1; then \
	    VIRTUAL_ENV=$(abspath $(VENV)) uv pip install --quiet -c constraints.txt -e '.[dev,docs,fast]'; \
	else \
	    $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,fast]'; \
	fi
	@touch $@

install: $(STAMP)  ## create the environment .venv

# nproc obeys OMP_NUM_THREADS, which is 1 above.
demo: $(STAMP)  ## generate shards, train, evaluate and report in one go
	@$(PY) -m clipzoo.cli world
	@OMP_NUM_THREADS=$$(env -u OMP_NUM_THREADS nproc) $(PY) train.py experiment=demo/clip

# A finished run says so and is left as it is.
emoji: $(STAMP)  ## fetch emoji of two vendors with npm, train CLIP, WPSE and KME-CLIP on one, compare them on the other
	@$(PY) -m clipzoo.cli emoji
	@for head in clip wpse kme; do \
	    OMP_NUM_THREADS=$$(env -u OMP_NUM_THREADS nproc) $(PY) train.py experiment=emoji/$$head || exit 1; \
	done
	@$(PY) -m clipzoo.cli report runs/emoji/clip runs/emoji/wpse runs/emoji/kme

hands: $(STAMP)  ## fetch drawings by eleven hands with npm and apt-get, train a model on eight of them, judge it on the others
	@$(PY) -m clipzoo.cli hands
	@OMP_NUM_THREADS=$$(env -u OMP_NUM_THREADS nproc) $(PY) train.py experiment=hands/model
	@$(PY) scripts/hands_tables.py runs/hands/model
	@for format in hub onnx; do \
	    test -d dist/hands/$$format || \
	        $(PY) -m clipzoo.cli export runs/hands/model --to $$format --output dist/hands/$$format || exit 1; \
	done

reproduce-demo: $(STAMP)  ## train one row of every paper at demo size (under 45 minutes on two cores)
	@$(PY) -m clipzoo.cli world
	@$(PY) -m clipzoo.lab.reproduce

test: $(STAMP)  ## the test suite (nine to ten minutes on two cores)
	@echo "== tests"
	@$(PARALLEL) -m "not slow and not slurm"

test-fast: $(STAMP)  ## the quick tests of every part of the package (under a minute on two cores)
	@$(PARALLEL) -m "not medium and not slow and not slurm" --durations 5 --durations-min 1.0

test-all: $(STAMP)  ## the test suite with its slow tests, and the tests on a local SLURM
	@$(PARALLEL) -m "not slurm" -rs
	@$(MAKE) --no-print-directory test-slurm

# The numbers must hold on every CPU: the oldest instructions that the libraries can be held to, then AVX2.
test-cpus: $(STAMP)  ## the numerical tests with the instruction sets of two older CPUs
	@echo "== SSE 4.1"
	@ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(PARALLEL) $(NUMERICAL)
	@echo "== AVX2"
	@ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(PARALLEL) $(NUMERICAL)

# As root, and with apt-get where SLURM is not installed; elsewhere these tests are skipped, with the reason.
test-slurm: $(STAMP)  ## test the batch scripts on a local SLURM of two nodes
	@echo "== SLURM"
	@$(PY) -m pytest -m slurm -rs --timeout 1200

# The extra is large (290 MB), so that the other targets do without it and skip these tests.
test-mteb: $(STAMP)  ## install the extra mteb and test the models as its encoders
	@echo "== mteb"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mteb]'
	@$(PY) -m pytest tests/evaluation/test_mteb.py

# The extra is large (240 MB), too.
test-ray: $(STAMP)  ## install the extra ray and test maps over shards on a cluster of this machine
	@echo "== ray"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@$(PY) -m pytest tests/data/maps/test_engines.py -k on_ray

lint: $(STAMP)  ## ruff (lint and format), mypy, and the links of the documentation
	@echo "== lint"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(MKDOCS) build -f .mkdocs.yml --strict --quiet

bench: $(STAMP)  ## benchmarks against peers, interleaved
	@$(PY) scripts/benchmark.py

bench-gpu: $(STAMP)  ## prove the Triton kernels and measure on one GPU, without a network, in at most 9 minutes
	@$(PY) scripts/benchmark.py gpu

studies: $(STAMP)  ## run the papers' small experiments (under forty minutes on two cores)
	@$(PY) -m clipzoo.cli studies

# A warning, such as a dead link, is an error.
docs: $(STAMP)  ## build the documentation into site/, to be opened as site/index.html
	@$(REFUSE_OTHER_CHECKOUT)
	@$(MKDOCS) build -f .mkdocs.yml --strict --quiet

docs-serve: $(STAMP)  ## show the documentation on this machine while it is edited
	@$(MKDOCS) serve -f .mkdocs.yml

package: $(STAMP)  ## build sdist and wheel into dist/, install and try both
	@PYTHON=$(PY) .ci/package dist

clean:  ## remove the environment and the files of `make demo`, `make emoji` and `make hands`
	rm -rf $(VENV) data/demo data/emoji data/hands data/npm runs/demo runs/emoji runs/hands dist/hands
