# make quickstart    set up, then train, translate, measure and draw on real text
# make quickstart-long  longer recipes, in two to three times the time
# make test          set up, then run all tests
# make test-fast     set up, then run the tests that take less than a second each
# make test-studies  set up, then run the tests of the quickstart, the studies and the benchmarks
# make fuzz          set up, then try options, hostile files and kills for MINUTES=60; goes on later
# make matrix        installs and tests many combinations of versions: docs/compatibility.md
# make setup         set up only: everything goes into .venv
# make lint          set up, then style and types
# make docs          set up, then the documentation site in build/site; a warning is an error
# make release       set up, then a wheel and a source archive in dist, checked by twine
# make clean         remove .venv and build outputs; the quickstart's results stay
#
# `make PYTHON=python3.10 setup` chooses the interpreter. With FAIRSEQ=no, and on Python 3.13 and
# later, for which fairseq has no build, the environment has no fairseq: the tests that need it are
# skipped, and there is no quickstart. QUICKSTART_FLAGS and PYTEST_FLAGS are added to the commands.
# Finished steps are not repeated.

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
CONSTRAINTS := constraints.txt
# This file marks an environment that was made here; no other environment is removed.
MARK := $(VENV)/.made-by-make
MADE_HERE = [ -e "$(MARK)" ] || [ -e "$(VENV)/.fairseq" ] || [ -z "$$(ls -A "$(VENV)" 2>/dev/null)" ]
FAIRSEQ ?= yes
VERSION_OK := import sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 13))
HAS_BUILD := import sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 12))
# Searched only when an environment has to be made: first one for which fairseq has a build.
FIND_PYTHON = for fits in '$(HAS_BUILD)' '$(VERSION_OK)'; do \
	for p in python3 python3.11 python3.12 python3.10 python3.9 python3.13; do \
	"$$p" -c "$$fits" 2>/dev/null && { command -v "$$p"; break 2; }; done; done
WANTS_FAIRSEQ = [ "$(FAIRSEQ)" != no ] && $(BIN)/python -c '$(HAS_BUILD)'
LEGACY = $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 11))'

.PHONY: setup same-python quickstart quickstart-long test test-fast test-studies fuzz matrix lint docs release clean
.DELETE_ON_ERROR:

setup: $(VENV)/.installed
	@:

MINOR := import sys; print("%d.%d" % sys.version_info[:2])
same-python:
	@[ -z "$(PYTHON)" ] || [ ! -e "$(VENV)/.fairseq" ] || { \
	  found=$$($(BIN)/python -c '$(MINOR)'); wanted=$$("$(PYTHON)" -c '$(MINOR)'); \
	  [ "$$found" = "$$wanted" ] || { \
	    echo "error: expected $(VENV) to be of Python $$wanted, since PYTHON=$(PYTHON); found Python" \
	      "$$found. Remove it with make clean, or name another: make VENV=.venv-$$wanted" \
	      "PYTHON=$(PYTHON) $(MAKECMDGOALS)" >&2; exit 1; }; }

# fairseq and torch are installed first, because torch is by far the largest package. fairseq 0.12.2
# (Python <= 3.10) needs special care: pip >= 24.1 refuses its metadata, its source is built against
# the numpy and setuptools of its day, and it must be built before torch is installed, because with
# torch it compiles a file that its source archive lacks. The build tools come from the constraints.
# A finished environment is changed in place: something may be running in it.
$(VENV)/.fairseq: $(CONSTRAINTS) | same-python
	@$(MADE_HERE) || { \
	  echo "error: expected $(VENV) to be absent or made by this Makefile; found a folder that it" \
	    "did not make, and would have to replace. Name another: make VENV=.venv-spectral" \
	    "$(MAKECMDGOALS)" >&2; exit 1; }
	@[ ! -e "$@" ] || { echo "[setup 1/3] $(VENV): other versions in $(CONSTRAINTS)"; exit 0; }; \
	python="$(PYTHON)"; [ -n "$$python" ] || python=$$($(FIND_PYTHON)); \
	[ -n "$$python" ] && "$$python" -c '$(VERSION_OK)' || { \
	  echo "error: expected Python 3.9 to 3.13; found $${python:-none}. Install one of them, or" \
	    "name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }; \
	echo "[setup 1/3] $(VENV): an environment of $$("$$python" --version)"; \
	rm -rf "$(VENV)"; mkdir -p "$(VENV)"; touch "$(MARK)"; \
	"$$python" -m venv "$(VENV)" || { \
	  echo "error: expected the venv module of $$python to work; found that it does not (above)." \
	    "On Debian and Ubuntu: apt install python3-venv" >&2; rm -rf "$(VENV)"; exit 1; }
	@echo "[setup 2/3] torch$$($(WANTS_FAIRSEQ) && echo " and fairseq") (some minutes the first time)"
	@if ! { $(WANTS_FAIRSEQ); }; then \
	  $(PIP) install -c $(CONSTRAINTS) setuptools wheel torch; \
	elif $(LEGACY); then \
	  $(PIP) install "pip<24.1" && \
	  $(PIP) install -c $(CONSTRAINTS) setuptools wheel cython numpy && \
	  { [ -e "$@" ] || $(PIP) wheel --no-deps --no-build-isolation -w "$(VENV)/wheels" \
	    fairseq==0.12.2; } && \
	  $(PIP) install -c $(CONSTRAINTS) --no-build-isolation torch torchaudio "$(VENV)"/wheels/*.whl; \
	else \
	  $(PIP) install -c $(CONSTRAINTS) setuptools wheel && \
	  $(PIP) install -c $(CONSTRAINTS) torch && \
	  $(PIP) install -c $(CONSTRAINTS) --no-build-isolation ve-fairseq; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.fairseq setup.py pyproject.toml .ci/groups.py
	@echo "[setup 3/3] spectral_fairseq with the packages of its tests and examples"
	@$(BIN)/python .ci/groups.py test > "$(VENV)/groups.txt"
	@$(PIP) install -c $(CONSTRAINTS) --no-build-isolation -r "$(VENV)/groups.txt" \
	  -e ".[text,plots,export]"
	@touch $@

$(VENV)/.lint: $(VENV)/.installed
	@$(BIN)/python .ci/groups.py lint > "$(VENV)/groups.txt"
	@$(PIP) install -c $(CONSTRAINTS) -r "$(VENV)/groups.txt"
	@touch $@

quickstart: setup
	@[ -e "$(BIN)/fairseq-train" ] || { \
	  echo "error: expected fairseq in $(VENV), to train with; found an environment without it." \
	    "Make another with Python 3.9 to 3.12:" \
	    "make VENV=.venv-fairseq PYTHON=python3.11 quickstart" >&2; exit 1; }
	@$(BIN)/python examples/quickstart/quickstart.py $(QUICKSTART_FLAGS)

quickstart-long:
	@$(MAKE) --no-print-directory quickstart \
	  QUICKSTART_FLAGS="--long --work-dir quickstart-long $(QUICKSTART_FLAGS)"

# The tests of a file share fixtures, so whole files are distributed over the processes, in the order
# of tests/conftest.py: xdist's own would leave files of few but long tests for the end. There is one
# process for each core, and more threads than that wait for each other: they double the time.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile \
	--no-loadscope-reorder

test: setup
	@$(PYTEST) $(PYTEST_FLAGS)

test-fast: setup
	@$(PYTEST) -m "not slow" $(PYTEST_FLAGS)

test-studies: setup
	@$(PYTEST) studies/tests $(PYTEST_FLAGS)

MINUTES ?= 60
fuzz: setup
	@$(BIN)/python -m studies.fuzz --minutes $(MINUTES) --page

# 2 to 8 GB for each combination; MATRIX_FLAGS=--help lists them and says how to keep less.
MATRIX_DIR ?= build/matrix
matrix: setup
	@$(BIN)/python -m studies.matrix --folder "$(MATRIX_DIR)" $(MATRIX_FLAGS)

lint: $(VENV)/.lint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

$(VENV)/.docs: $(VENV)/.installed
	@$(BIN)/python .ci/groups.py docs > "$(VENV)/groups.txt"
	@$(PIP) install -c $(CONSTRAINTS) -r "$(VENV)/groups.txt"
	@touch $@

# Without --quiet, which would hide the warnings and pass in spite of them.
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(VENV)/.release: $(VENV)/.installed
	@$(BIN)/python .ci/groups.py release > "$(VENV)/groups.txt"
	@$(PIP) install -c $(CONSTRAINTS) -r "$(VENV)/groups.txt"
	@touch $@

# Nothing of an earlier version may lie beside what is uploaded, or in what setuptools collects.
release: $(VENV)/.release
	@rm -rf dist build/lib
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/python -m twine check --strict dist/*

clean:
	@if $(MADE_HERE); then rm -rf "$(VENV)"; else \
	  echo "$(VENV) stays: this Makefile did not make it"; fi
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find spectral_fairseq studies tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
