# make quickstart    set up, then train, translate, measure and draw on real text
# make test          set up, then run the tests
# make setup         set up only: everything goes into .venv
# make lint          set up, then style and types
# make docs          set up, then the documentation site in build/site; a warning is an error
# make clean         remove .venv and build outputs; the quickstart's results stay
#
# PYTHON=python3.10 make setup chooses the interpreter; QUICKSTART_FLAGS and PYTEST_FLAGS are passed
# on. What was done already is not done again.

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
CONSTRAINTS := constraints.txt
# Stands in an environment that was made here, from before its first file: no other is removed.
MARK := $(VENV)/.made-by-make
MADE_HERE = [ -e "$(MARK)" ] || [ -e "$(VENV)/.host" ] || [ -z "$$(ls -A "$(VENV)" 2>/dev/null)" ]
VERSION_OK := import sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 12))
# Only looked for where an environment has to be made.
FIND_PYTHON = for p in python3 python3.11 python3.12 python3.10 python3.9; do \
	"$$p" -c '$(VERSION_OK)' 2>/dev/null && { command -v "$$p"; break; }; done
# Where the examples' scripts find each other; two folders have a methods.py, so mypy runs twice.
EXAMPLES := examples/common:examples
LEGACY = $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 11))'

.PHONY: setup quickstart test lint docs clean
.DELETE_ON_ERROR:

setup: $(VENV)/.installed
	@:

# The host is installed first, torch being the larger part of it. fairseq 0.12.2 (Python <= 3.10)
# has three troubles: its metadata is refused by pip >= 24.1, its source is built against the
# numpy and setuptools of its day, and it must be built while torch is absent, or it compiles a
# file that its source archive lacks. The build tools come from the constraints in either case.
$(VENV)/.host: $(CONSTRAINTS)
	@$(MADE_HERE) || { \
	  echo "error: expected $(VENV) to be absent or made by this Makefile; found a folder that it" \
	    "did not make, and would have to replace. Name another: make VENV=.venv-spectral" \
	    "$(MAKECMDGOALS)" >&2; exit 1; }
	@python="$(PYTHON)"; [ -n "$$python" ] || python=$$($(FIND_PYTHON)); \
	[ -n "$$python" ] && "$$python" -c '$(VERSION_OK)' || { \
	  echo "error: expected Python 3.9 to 3.12; found $${python:-none}. Install one of them, or" \
	    "name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }; \
	echo "[setup 1/3] $(VENV): an environment of $$("$$python" --version)"; \
	rm -rf "$(VENV)"; mkdir -p "$(VENV)"; touch "$(MARK)"; \
	"$$python" -m venv "$(VENV)" || { \
	  echo "error: expected the venv module of $$python to work; found that it does not (above)." \
	    "On Debian and Ubuntu: apt install python3-venv" >&2; rm -rf "$(VENV)"; exit 1; }
	@echo "[setup 2/3] torch and fairseq (some minutes the first time)"
	@if $(LEGACY); then \
	  $(PIP) install "pip<24.1" && \
	  $(PIP) install -c $(CONSTRAINTS) setuptools wheel cython numpy && \
	  $(PIP) wheel --no-deps --no-build-isolation -w "$(VENV)/wheels" fairseq==0.12.2 && \
	  $(PIP) install -c $(CONSTRAINTS) --no-build-isolation torch torchaudio "$(VENV)"/wheels/*.whl; \
	else \
	  $(PIP) install -c $(CONSTRAINTS) setuptools wheel && \
	  $(PIP) install -c $(CONSTRAINTS) torch && \
	  $(PIP) install -c $(CONSTRAINTS) --no-build-isolation ve-fairseq; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.host setup.py
	@echo "[setup 3/3] spectral_fairseq with what its tests and pictures need"
	@$(PIP) install -c $(CONSTRAINTS) --no-build-isolation -e ".[text,plots,export,test]"
	@touch $@

$(VENV)/.lint: $(VENV)/.installed
	@$(PIP) install -c $(CONSTRAINTS) ruff mypy
	@touch $@

quickstart: setup
	@$(BIN)/python examples/quickstart/quickstart.py $(QUICKSTART_FLAGS)

# A file's tests share trained models, so that files are what processes share out among them.
test: setup
	@$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile $(PYTEST_FLAGS)

lint: $(VENV)/.lint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@MYPYPATH=$(EXAMPLES) $(BIN)/mypy examples/common examples/quickstart examples/tables.py \
	  examples/translation_opendocs_de_en
	@MYPYPATH=$(EXAMPLES) $(BIN)/mypy examples/lm_sotu

$(VENV)/.docs: $(VENV)/.installed
	@$(PIP) install -c $(CONSTRAINTS) --no-build-isolation -e ".[docs]"
	@touch $@

# Without --quiet, which would hide the warnings and pass in spite of them.
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	@if $(MADE_HERE); then rm -rf "$(VENV)"; else \
	  echo "$(VENV) stays: this Makefile did not make it"; fi
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find spectral_fairseq tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
