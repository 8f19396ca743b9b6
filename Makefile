# Two commands do all on a fresh machine with CPython 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FAST := -m 'not slow and not real'
# With AGAIN=1, tests that failed run once more, one at a time on an otherwise idle machine; the output names them.
RETRY = $(if $(AGAIN),$(BIN)/pytest $(1) --last-failed --last-failed-no-failures none -rA,false)

.PHONY: install fmt lint type test test-all test-real bench fuzz mutants demo docs proto check clean

install: $(STAMP) ## set up .venv with Penstock, its engines and the tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Penstock needs Python 3.11 or newer; set PYTHON=python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench,openvino]'
	touch $(STAMP)

demo: $(STAMP) ## build, serve and measure the digits example
	$(BIN)/python examples/digits/demo.py

test: lint type ## all checks and all tests but the slow ones
	$(BIN)/pytest $(FAST) -n 2 || $(call RETRY,$(FAST))

test-all: lint type ## the slow tests too, and those with real peers
	$(BIN)/pytest -n 2

test-real: $(STAMP) ## tests with real peers: Redis, Prometheus, curl, nghttp2, wrk, Chromium; one that is not installed skips its tests
	$(BIN)/pytest -m real -rs || $(call RETRY,-m real)

lint: $(STAMP) ## style, import layers, size gates
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/lint-imports
	$(BIN)/python tests/size_gates.py

type: $(STAMP)
	$(BIN)/mypy

fmt: $(STAMP) ## bring the code into shape
	$(BIN)/ruff format src tests examples benchmarks
	$(BIN)/ruff check --fix src tests examples benchmarks

fuzz: $(STAMP) ## mutated messages for every decoder and state machine, random models for the offline half, on all cores; MINUTES=5, SEED=number
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED))

mutants: $(STAMP) ## change each decision of the deciding code, and report the changes that no test notices; FILE=path below src/penstock, JOBS=1
	$(BIN)/python -m tests.mutation $(FILE) --jobs $(or $(JOBS),1)

bench: $(STAMP) ## SCENARIO=name for one of them, QUICK=1 for a rough figure within a minute
	$(BIN)/python -m benchmarks $(if $(SCENARIO),--scenario $(SCENARIO)) $(if $(QUICK),--quick)

peers: $(STAMP) ## environments for the servers that the serving benchmark compares with, in .peers
	$(BIN)/python -m benchmarks.peers.install

docs: $(STAMP) ## check that every link between the documents leads somewhere
	$(BIN)/python docs/check_links.py

proto: $(STAMP) ## compile proto/*.proto to the descriptors that the package loads
	$(BIN)/python -m grpc_tools.protoc --proto_path=proto --descriptor_set_out=src/penstock/protocol/descriptors.binpb proto/*.proto

check: test docs ## what CI runs

clean:
	rm -rf $(VENV) demo .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
