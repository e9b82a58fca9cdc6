# make demo    runs the example end to end (embedded SQLite; DATABASE_URL=… for a server, EVENTS=… for less)
# make pipeline-demo  archives, reports on and replays it with Spark (needs Java 17; installs it on Debian)
# make test    runs the whole test suite, servers included
# make test-slow  runs what takes too long for that: kills of the archive, server settings, declarative pipelines
# make explore runs every pair of operations under all schedules with at most BOUND=n preemptions (ENGINE= STATISTICS= JOBS=)
# make soak    breaks everything for MINUTES=n while it works, and proves that nothing is lost (ENGINE=mariadb|mysql SEED=n)
# make serve   serves the example project's site with the admin
# make lint    ruff, mypy and the import contracts
# make docs    builds the documentation into .test/docs
# make reference  writes signatures and docstrings into the reference's pages
# make wheel   builds the wheel and the sdist into dist/

SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EVENTS ?=
DATABASE_URL ?=
PORT ?= 8000
MINUTES ?= 10
ENGINE ?= mariadb
SEED ?=
REPORT ?= .test/soak
BOUND ?= 2
STATISTICS ?= small
JOBS ?= 1

export DATABASE_URL

.PHONY: help demo pipeline-demo serve test test-slow soak explore lint docs reference wheel check-python clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

check-python:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON): install Python 3.11 or later (Debian: apt install python3 python3-venv make)."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: name a later one, make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv: install it (Debian: apt install python3-venv)."; exit 1; }

$(VENV)/installed: pyproject.toml constraints.txt | check-python
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[example]'
	@touch $@

# The driver is compiled against MariaDB's client library; SQLite needs none of it.
$(VENV)/installed-mysql: $(VENV)/installed
	$(PYTHON) tools/servers.py install driver
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[example,mysql]'
	@touch $@

ifneq ($(filter mysql%,$(DATABASE_URL)),)
INSTALLED := $(VENV)/installed-mysql
else
INSTALLED := $(VENV)/installed
endif

demo: $(INSTALLED)
	$(BIN)/python manage.py migrate -v 0
	$(BIN)/python manage.py demo $(if $(EVENTS),--events $(EVENTS))

pipeline-demo: $(INSTALLED)
	$(PYTHON) tools/servers.py install java
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[example,spark]'
	$(BIN)/python manage.py migrate -v 0
	$(BIN)/python manage.py pipelinedemo $(if $(EVENTS),--events $(EVENTS))

serve: $(INSTALLED)
	$(BIN)/python manage.py migrate -v 0
	$(BIN)/python manage.py demouser
	$(BIN)/python manage.py runserver $(PORT)

test: check-python
	$(PYTHON) tools/run_tests.py

test-slow: check-python
	$(PYTHON) tools/run_tests.py --slow

soak: check-python
	$(PYTHON) tools/run_soak.py --minutes $(MINUTES) --engine $(ENGINE) --report $(REPORT) $(if $(SEED),--seed $(SEED))

explore: check-python
	$(PYTHON) tools/run_explore.py --engine $(ENGINE) --bound $(BOUND) --statistics $(STATISTICS) --jobs $(JOBS) \
		$(if $(ONLY),--only "$(ONLY)") $(if $(REPLAY),--replay "$(REPLAY)") $(if $(RECORD),--record)

lint: check-python
	$(PYTHON) tools/run_tests.py --only lint
	$(PYTHON) tools/run_tests.py --only format
	$(PYTHON) tools/run_tests.py --only types
	$(PYTHON) tools/run_tests.py --only imports

docs: check-python
	$(PYTHON) tools/run_tests.py --only docs
	@echo "Open .test/docs/index.html."

# The package itself is parsed, not imported, and need not be installed.
reference: check-python
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt griffelib ruff
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/guarantee_tests.py

wheel: check-python
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt build
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf build dist $(VENV) .test .mypy_cache .ruff_cache .pytest_cache demo-output
