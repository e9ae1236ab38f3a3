# Everything runs in a virtual environment; nothing is required but make and
# Python 3.11 or newer (PYTHON=… names one).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := cli,proxy,embedded
EVERYTHING := $(RUNTIME),fast,relay,spark,postgres,mariadb,tracing,dev
# Installs the extras $(1): a line a package and a large download, a dot for every two seconds without.
define install
	@echo "installing txbroker[$(1)] into $(VENV)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt \
		-e '.[$(1)]' | while code=0; IFS= read -r -t 2 line || code=$$?; test $$code != 1; do \
		if test $$code != 0; then printf .; continue; fi; \
		case "$$line" in \
			"Collecting "*) line=$${line#* }; echo "  $${line%%[<>=!~; ]*}";; \
			*"Downloading "*" MB)") echo "    $${line##* (}" | tr -d ')';; \
			"Installing collected "*) printf '  writing files ';; \
			"Successfully installed "*) echo;; \
		esac; done
endef
# Programs that some tests call, each named like its Debian package, or with that behind `=`.
TOOLS := chromedriver=chromium-driver chromium curl debootstrap go=golang-go javac=default-jdk-headless kcat \
	mariadbd=mariadb-server node=nodejs openssl postgres=postgresql prometheus
# In no release of Debian, so Go builds it. The newest that Debian 12's Go can; without optimizations,
# which would cost most of the time.
HELM := helm.sh/helm/v3/cmd/helm@v3.12.3
HELM_KEPT := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/txbroker/tools/$(subst /,_,$(HELM))
# While this says 101, Debian's packages start no service: the tests run the servers themselves.
POLICY := /usr/sbin/policy-rc.d
PYTEST := $(BIN)/python -m pytest
# Test processes at the same time; 0: in this one.
JOBS ?= 2

.PHONY: help
help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or set PYTHON=" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "the venv module is needed (Debian: python3-venv)" >&2; exit 1; }

# What runs txbroker with its own Kafka, and no more.
$(VENV)/.runtime: $(BIN)/python setup.cfg constraints.txt
	$(call install,$(RUNTIME))
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(call install,$(EVERYTHING))
	@touch $@

.PHONY: install
install: $(VENV)/.dev ## Install txbroker and its development tools into .venv

.PHONY: dev
dev: $(VENV)/.runtime ## Start a proxy with its own Kafka, to try with curl
	@$(BIN)/txbroker dev

.PHONY: demo
demo: $(VENV)/.runtime ## Watch transactional messages work on a real Kafka
	@$(BIN)/txbroker demo

.PHONY: test
test: $(VENV)/.dev ## Run the quick tests: everything in memory, and the main job on a real Kafka
	@$(PYTEST) tests -m "not full" -n $(JOBS)

.PHONY: test-all
test-all: lint ## Check style and types, and run all tests but the long ones
	@$(PYTEST) tests -n $(JOBS)

.PHONY: test-long
test-long: $(VENV)/.dev ## Run the long tests too: outages, audits, the simulator's mutants, other Kafka versions
	@TXBROKER_TEST_LONG=1 $(PYTEST) tests --timeout 900
	@for version in 3.9.1 4.3.1; do \
		TXBROKER_TEST_KAFKA_VERSION=$$version $(PYTEST) tests/contract tests/kafka; done

# Of each series, a release whose Kafka connector Maven Central has.
SPARKS ?= 4.0.0 4.1.1 4.2.0
.PHONY: spark-matrix
spark-matrix: $(VENV)/.dev ## Run the audit's tests with each of SPARKS (4.0.0 4.1.1 4.2.0)
	@for version in $(SPARKS); do spark=$(VENV)-spark/$$version; \
		test -d $$spark/pyspark || $(BIN)/python -m pip install -q --no-deps --target $$spark pyspark==$$version; \
		echo "Spark $$version"; PYTHONPATH=$$PWD/$$spark $(PYTEST) tests/spark; done

.PHONY: mutants
mutants: $(VENV)/.dev ## Take out each rule of the log protocol, and see its test fail (20 minutes or more)
	@$(BIN)/python -m tests.rules.mutants

.PHONY: test-faults
test-faults: $(VENV)/.dev ## An hour of crashes at every moment, of faults on three brokers, of consumers in all modes and of relays
	@$(BIN)/python -m tests.faults.crash_run
	@$(BIN)/python -m tests.faults.cluster.soak_faults --minutes 15
	@$(BIN)/python -m tests.faults.cluster.soak_faults --minutes 4 --protocol 1 --only \
		"end of a turn late" "end of a turn late, connection reset" "end of a turn unanswered"
	@$(BIN)/python -m tests.faults.consuming.soak
	@$(BIN)/python -m tests.faults.relays.soak

.PHONY: soak-faults
soak-faults: $(VENV)/.dev ## Break brokers, proxies and links under load, for MINUTES (10)
	@$(BIN)/python -m tests.faults.cluster.soak_faults --minutes $(MINUTES)

SEEDS ?= 1000
.PHONY: simulate
simulate: $(VENV)/.dev ## Try SEEDS (1000) seeds of faults on simulated proxies, consumers and relays, or of one ROOM, or one: SEED=n
	@$(BIN)/python -m tests.simulator.simulate $(if $(ROOM),--room $(ROOM)) \
		$(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

.PHONY: bench
bench: $(VENV)/.dev ## Measure complete transactions per second
	@$(BIN)/txbroker bench

.PHONY: compare
compare: $(VENV)/.dev ## Compare with RocketMQ, outboxes, dtm and raw Kafka; writes docs/comparison.*
	@$(BIN)/python -m benchmarks.compare

.PHONY: bench-footprint
bench-footprint: $(VENV)/.dev ## Measure what a transaction leaves in Kafka, and how many requests it takes
	@$(BIN)/python -m benchmarks.footprint

.PHONY: bench-settled
bench-settled: $(VENV)/.dev ## Measure what a settled transaction costs a proxy: memory, time, snapshots
	@$(BIN)/python -m benchmarks.settled

.PHONY: bench-protocols
bench-protocols: $(VENV)/.dev ## Compare both versions of Kafka's transaction protocol
	@$(BIN)/python -m benchmarks.protocols

.PHONY: bench-recovery
bench-recovery: $(VENV)/.dev ## Measure restarts, and what a million undecided transactions cost
	@$(BIN)/python -m benchmarks.recovery

.PHONY: bench-checks
bench-checks: $(VENV)/.dev ## Measure 100,000 check-backs that are all due, over sessions and over HTTP
	@$(BIN)/python -m benchmarks.checks

.PHONY: bench-crowd
bench-crowd: $(VENV)/.dev ## Measure what 1,000 connected producers cost that do nothing
	@$(BIN)/python -m benchmarks.crowd

.PHONY: bench-consumers
bench-consumers: $(VENV)/.dev ## Measure consumers against their aims, and beside other clients (12 minutes)
	@$(BIN)/python -m benchmarks.consuming

.PHONY: bench-exactly-once
bench-exactly-once: $(VENV)/.dev ## Measure exactly-once consumers against their aims (20 minutes)
	@$(BIN)/python -m benchmarks.exactly_once

.PHONY: bench-relays
bench-relays: $(VENV)/.dev ## Measure relays and captures against their aims (15 minutes)
	@$(BIN)/python -m benchmarks.relays

.PHONY: bench-endurance
bench-endurance: $(VENV)/.dev ## Measure whether ten million transactions slow down or grow (an hour)
	@$(BIN)/python -m benchmarks.endurance

COUNT ?= 800000
.PHONY: bench-audit
bench-audit: $(VENV)/.dev ## Measure audits of COUNT transactions (800000) against their aims
	@$(BIN)/python -m benchmarks.audit --count $(COUNT)

MINUTES ?= 10
.PHONY: soak
soak: $(VENV)/.dev ## Kill one of three proxies every few seconds under load, for MINUTES (10)
	@$(BIN)/python -m tests.faults.cluster.soak_faults --minutes $(MINUTES) --only \
		"proxy killed" "proxy bounced" "proxy stopped"

.PHONY: lint
lint: $(VENV)/.dev ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

.PHONY: check
check: $(VENV)/.dev ## Check limits, words, links, docs and the public surface (10 seconds)
	@$(PYTEST) -q tests/lint -p no:schemathesis --ignore tests/lint/test_rules_table.py

.PHONY: docs
docs: $(VENV)/.dev ## Renew the reference pages, the dashboard, and schema and table of the chart's values, which code makes
	@$(BIN)/python -m txbroker.cli.api_reference
	@$(BIN)/python docs/states.py
	@$(BIN)/python docs/diagnoses.py
	@$(BIN)/python docs/verdicts.py
	@$(BIN)/python -m txbroker.cli.reference > docs/reference/cli.md
	@$(BIN)/python -m tests.faults.crash_cases > docs/reference/failpoints.md
	@$(BIN)/python -m tests.faults.cluster.runs_table docs/reference/fault-runs.jsonl > docs/reference/fault-runs.md
	@$(BIN)/python -m tests.faults.relays.soak --table
	@$(BIN)/python -m tests.lint.test_surface > tests/lint/surface.txt
	@$(BIN)/python charts/dashboard.py > charts/txbroker/files/dashboard.json
	@$(BIN)/python charts/schema.py > charts/txbroker/values.schema.json
	@$(BIN)/python charts/readme.py > charts/txbroker/README.md

.PHONY: security-table
security-table: $(VENV)/.dev ## Run the security tests, and write what came of each case
	@TXBROKER_SECURITY_TABLE=1 $(PYTEST) tests/security

.PHONY: tools
tools: ## Install the system tools that some tests need (Debian, as root)
	@missing=; for folder in /usr/sbin /usr/lib/postgresql/*/bin; do PATH=$$PATH:$$folder; done; \
	for tool in $(TOOLS); do command -v $${tool%%=*} >/dev/null || missing="$$missing $${tool#*=}"; done; \
	test -n "$$missing" || exit 0; \
	if test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null; then \
		echo "make tools needs Debian and root; install these yourself:$$missing" >&2; exit 1; fi; \
	echo "installing$$missing" >&2; apt-get update -qq; \
	if ! test -e $(POLICY); then trap 'rm -f $(POLICY)' EXIT; \
		printf '#!/bin/sh\nexit 101\n' >$(POLICY); chmod 755 $(POLICY); fi; \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	for package in mariadb-server postgresql prometheus; do \
		case "$$missing " in *" $$package "*) update-rc.d $${package%-server} disable;; esac; done
	@command -v helm >/dev/null || $(MAKE) --no-print-directory $(HELM_KEPT)
	@command -v helm >/dev/null || install $(HELM_KEPT) /usr/local/bin/helm

$(HELM_KEPT):
	@echo "building $(HELM), which takes some minutes" >&2
	@build=$$(mktemp -d); trap 'rm -rf "$$build"' EXIT; \
	GOPATH=$$build GOCACHE=$$build/cache GOBIN=$$build/bin GOFLAGS=-modcacherw CGO_ENABLED=0 \
		go install -ldflags '-s -w' -gcflags 'all=-N -l' $(HELM) 2>$$build/log \
		|| { cat $$build/log >&2; exit 1; }; \
	mkdir -p $(@D); install $$build/bin/helm $@

.PHONY: lock
lock: ## Renew constraints.txt with the newest versions that setup.cfg allows
	@rm -rf $(VENV)-lock && $(PYTHON) -m venv $(VENV)-lock
	@$(VENV)-lock/bin/python -m pip install --quiet '.[$(EVERYTHING)]' pyspark==$(lastword $(SPARKS))
	@{ echo "# Every version that the tests ran with. Renewed by: make lock"; \
		$(VENV)-lock/bin/python -m pip freeze --exclude txbroker --exclude pip --all; \
		} > constraints.txt
	@rm -rf $(VENV)-lock

.PHONY: clean
clean: ## Remove what was made here
	@rm -rf $(VENV) $(VENV)-spark build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
