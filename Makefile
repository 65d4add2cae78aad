# Every target works first on a fresh clone: it makes .venv and installs the pinned set into it.
PYTHON ?= python3
BIN = .venv/bin

# The oldest and the newest release that pyproject.toml allows.
TRANSFORMERS = 5.17.0 5.24.0

.PHONY: setup demo quick test test-transformers released check format bench fuzz
setup: .venv/.ready

NATIVE = $(wildcard src/secondguess/runtime/cpu/*.h src/secondguess/runtime/cpu/*.cpp)

.venv/.ready: pyproject.toml setup.py constraints.txt $(NATIVE)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,quant,serve,gguf]'
	touch $@

demo: setup
	$(BIN)/secondguess generate "def count_words(text):" --max-tokens 200
	$(BIN)/python benchmarks/demo.py
	$(BIN)/secondguess verify

# Structure, the decoding loop, verification and drafters; and what TESTS names, as in `make quick TESTS=tests/server`.
quick: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/test_layout.py tests/test_core.py \
	    tests/test_decode.py tests/verifiers tests/sampling tests/drafters/test_every_drafter.py $(TESTS)

# Without network the tests of the released model are skipped.
test: setup
	-$(BIN)/python tools/released smollm2 --folders
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

released: setup
	$(BIN)/python tools/released all --folders
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m released --released smollm2 gemma qwen-0.5b qwen-1.5b

test-transformers: $(TRANSFORMERS:%=test-transformers-%)

test-transformers-%: .venv-transformers-%/.ready
	OMP_NUM_THREADS=1 .venv-transformers-$*/bin/python -m pytest -n 2 --dist worksteal -m transformers

# Packages that are not installed here are those of .venv.
.PRECIOUS: .venv-transformers-%/.ready
.venv-transformers-%/.ready: .venv/.ready
	$(PYTHON) -m venv --clear .venv-transformers-$*
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)/src", sep="\n")' \
	    > $$(.venv-transformers-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	.venv-transformers-$*/bin/python -m pip install -q transformers==$*
	touch $@

check: setup
	$(BIN)/ruff format --check src tests tools examples benchmarks setup.py
	$(BIN)/ruff check src tests tools examples benchmarks setup.py
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format src tests tools examples benchmarks setup.py
	$(BIN)/ruff check --fix src tests tools examples benchmarks setup.py

bench: setup
	$(BIN)/secondguess bench --against transformers --output benchmarks/results

# The documentation as a site, in site/; a dead link ends the build.
.PHONY: docs
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.ready: constraints.txt
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install -q -c constraints.txt mkdocs-material
	touch $@

fuzz: setup
	$(BIN)/python tests/fuzz_kernels.py --minutes 10
