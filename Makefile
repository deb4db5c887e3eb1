# Everything runs inside $(VENV), which is made on first use.
PYTHON ?= python3
VENV ?= .venv
DEMO_BUDGET ?= 3m
# Installed before the extras, which would bring gigabytes of CUDA. Where the package index has no
# CPU build: TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# Folder of the published operator tables, for the report.
PUBLISHED ?= $(or $(OPCAST_PUBLISHED_DATA),../shared/data)
BIN := $(VENV)/bin
export MYPYPATH := $(VENV)/typing

# Compilers of GPUs and TPUs that are not here: about 850 and 700 MB.
export OPCAST_COMPILERS ?= $(CURDIR)/$(VENV)/compilers

# Tests start many processes: with this set, each of them would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Processes that run tests, of one thread each: one more than two cores, since many tests wait for
# servers, browsers and processes of their own.
JOBS ?= 3
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests --ignore=tests/bench --durations 40 \
	--numprocesses $(JOBS) --dist loadgroup --no-loadscope-reorder

.PHONY: demo test test-all clients golden golden-diff lint bench report clean compilers docs browser

# Byte code of the few modules that are imported is written then: of all, it takes a minute.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV) || { echo "python venv is missing: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	mkdir -p $(VENV)/typing && ln -sfn '$(CURDIR)' $(VENV)/typing/opcast
	touch $@

## Predict a step for absent chips, calibrate to this machine, predict programs and run them, track in MLflow.
demo: $(VENV)/.installed
	$(BIN)/opcast demo --out demo-out --budget $(DEMO_BUDGET)

$(VENV)/.compilers: $(VENV)/.installed
	$(BIN)/opcast compilers install gpu tpu
	touch $@

## Compilers of absent GPUs and TPUs, for tests and predictions.
compilers: $(VENV)/.compilers

## A browser for the tests of pages, if there is none and we may install one; else they skip.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || [ -n "$$OPCAST_BROWSER" ] || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	|| echo "no browser: tests of pages will be skipped; install chromium or set OPCAST_BROWSER" >&2

## All but the exhaustive tests; those that need a GPU skip themselves. What the
## compilers of absent devices answer is kept in $OPCAST_TEST_CACHE (~/.cache/opcast-tests; empty: not).
test: $(VENV)/.installed $(VENV)/.compilers browser
	$(PYTEST) -m "not exhaustive"

## All tests: every case of the matrices of which `test` takes one, long fuzzing, the docs site.
test-all: $(VENV)/.installed $(VENV)/.compilers browser
	$(PYTEST)

## Reads files that opcast exports with the tools they are for; prints client, version, outcome. Needs PyPI.
clients: $(VENV)/.installed $(VENV)/.compilers
	$(BIN)/python tests/clients/run.py

## What moved since tests/golden/answers.jsonl was written: ONLY='serving/*' for some of the cases.
golden-diff: $(VENV)/.installed $(VENV)/.compilers
	OMP_NUM_THREADS=1 $(BIN)/python -m opcast.tests.golden.run --only '$(or $(ONLY),*)'

## Writes these predictions as the ones to keep; say in the commit why they moved.
golden: $(VENV)/.installed $(VENV)/.compilers
	OMP_NUM_THREADS=1 $(BIN)/python -m opcast.tests.golden.run --only '$(or $(ONLY),*)' --write

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2 -p opcast

## Speed figures, each beside a baseline measured in the same run.
bench: $(VENV)/.installed
	$(BIN)/python tests/bench/run_all.py

## Accuracy figures on the committed dataset and, if PUBLISHED is there, on published operator tables
## (it may take an hour, and resumes), with splits and label noise; steps, programs, regions and serving; what is predicted for devices that
## are not here (half an hour the first time, and resumes); faults with their outcomes; clusters:
## collectives, cost and error of the composition, scaling, best plans (ten minutes, and resumes); the
## server under load; traces of a partitioned program.
report: $(VENV)/.installed $(VENV)/.compilers
	$(BIN)/opcast report accuracy
	$(BIN)/opcast report devices
	$(BIN)/opcast report pages --out docs/accuracy
	$(BIN)/python tests/bench/trust_report.py --quick --minutes 2
	@if [ -d '$(PUBLISHED)' ]; then $(BIN)/opcast report operators --published '$(PUBLISHED)'; \
	else echo "operators: no published tables at $(PUBLISHED); make report PUBLISHED=DIR"; fi
	@if [ -d '$(PUBLISHED)/published-xla' ]; then \
	$(BIN)/opcast data import published '$(PUBLISHED)/published-xla' --out report-out/xla-rows \
	&& $(BIN)/opcast train --data report-out/xla-rows --out report-out/xla-products --no-track \
	&& $(BIN)/opcast calibrate-collectives '$(PUBLISHED)/published-xla/collectives.csv.gz' --join --out report-out/collectives.json \
	&& $(BIN)/opcast evaluate --published '$(PUBLISHED)/published-xla' --out report-out/xla.parquet; fi
	@if [ -d '$(PUBLISHED)/published-steps' ]; then \
	$(BIN)/opcast train --steps '$(PUBLISHED)/published-steps/steps.csv.gz' --out report-out/steps.json \
	&& $(BIN)/opcast evaluate --steps '$(PUBLISHED)/published-steps/steps.csv.gz' --out report-out/steps.parquet \
	&& $(BIN)/opcast evaluate --programs '$(PUBLISHED)/published-programs' --lowering fused --out report-out/programs.parquet \
	&& $(BIN)/opcast evaluate --regions '$(PUBLISHED)/published-regions' --lowering fused --out report-out/regions.parquet; fi
	@if [ -d '$(PUBLISHED)/published-serving' ]; then \
	$(BIN)/opcast train --serving '$(PUBLISHED)/published-serving/serving.csv.gz' \
	--serving '$(PUBLISHED)/published-energy/mlenergy-llm.parquet' --from default --out report-out/serving.json \
	&& $(BIN)/opcast evaluate --serving '$(PUBLISHED)/published-serving/serving.csv.gz' --out report-out/serving.parquet; fi
	$(BIN)/python tests/bench/bench_serving.py
	@if [ -d '$(PUBLISHED)/published-jax-steps' ]; then \
	$(BIN)/opcast evaluate --programs '$(PUBLISHED)/published-jax-steps' --out report-out/jax-steps.parquet; fi
	@if [ -d '$(PUBLISHED)' ]; then $(BIN)/opcast report clusters --published '$(PUBLISHED)'; \
	else $(BIN)/opcast report clusters; fi
	$(BIN)/python tests/bench/load_server.py
	$(BIN)/opcast zoo export llama --set layers=2 --set mode=train --mesh fsdp=4 --out report-out/llama-fsdp4.mlir
	$(BIN)/opcast export chakra report-out/llama-fsdp4.mlir --cluster h100-sxm-x4 --lowering fused --out report-out/chakra

## The docs site, in site/.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info demo-out report-out site
