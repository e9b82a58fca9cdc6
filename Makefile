# make demo           run the example end to end on SQLite (DATABASE_URL=… for a server, EVENTS=n for fewer events)
# make pipeline-demo  run the example on a temporary MariaDB server, then archive, report on and replay its messages, and open the archive with DuckDB, Polars and Spark (needs Java 17; installs it on Debian)
# make serve          serve the example project with the admin and the dashboard at http://127.0.0.1:8000/ (PORT=n)
# make check          run ruff, mypy, the import contracts and the tests that matter most on SQLite, in about three minutes
# make test           run the test suite on temporary MariaDB and MySQL servers and on SQLite
# make coverage       run the same and measure the coverage of the package, branches included
# make test-slow      run the slow tests: the archive under SIGKILL, server settings, rolling upgrades, the declarative pipeline
# make explore        run every pair of operations under every schedule with at most BOUND=n preemptions (ENGINE= STATISTICS= JOBS= ONLY= REPLAY= RECORD= STATEMENTS=)
# make soak           kill, freeze and disconnect a running queue for MINUTES=n, then account for every message (ENGINE=mariadb|mysql SEED=n REPORT=folder)
# make conformance    test backends for django.tasks in throw-away environments, and write docs/reference/task-backends.md
# make lint           run ruff, mypy and the import contracts, and compare the modules that both packages have
# make docs           build the documentation into .test/docs
# make reference      update the generated parts of the documentation, and the modules that Spark's package has too
# make wheel          build the wheels and the sdists into dist/
# make clean          delete .venv, .test, demo-output, build products and caches

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

.PHONY: help demo pipeline-demo serve check test coverage test-slow soak explore conformance lint docs reference wheel check-python clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

check-python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found. Install Python 3.11 or later (Debian: apt install python3 python3-venv make)."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11. Use a newer interpreter: make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module. Install it (Debian: apt install python3-venv)."; exit 1; }

$(VENV)/installed: pyproject.toml constraints.txt | check-python
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[example]'
	@touch $@

# mysqlclient is compiled against MariaDB's client library. SQLite does not need it.
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

# Without DATABASE_URL, on a temporary MariaDB server.
pipeline-demo: $(VENV)/installed-mysql
	$(PYTHON) tools/servers.py install java $(if $(DATABASE_URL),,mariadb)
	$(BIN)/python -m pip install -q -c constraints.txt -e ./spark -e '.[example,mysql,report,spark]' polars
	$(if $(DATABASE_URL),,$(PYTHON) tools/servers.py run mariadb --) sh -c '\
		$(BIN)/python manage.py migrate -v 0 && \
		$(BIN)/python manage.py pipelinedemo $(if $(EVENTS),--events $(EVENTS))'

serve: $(INSTALLED)
	$(BIN)/python manage.py migrate -v 0
	$(BIN)/python manage.py demouser
	$(BIN)/python manage.py runserver $(PORT)

check: check-python
	$(PYTHON) tools/run_tests.py --check

test: check-python
	$(PYTHON) tools/run_tests.py

coverage: check-python
	$(PYTHON) tools/run_tests.py --coverage

test-slow: check-python
	$(PYTHON) tools/run_tests.py --slow

soak: check-python
	$(PYTHON) tools/run_soak.py --minutes $(MINUTES) --engine $(ENGINE) --report $(REPORT) $(if $(SEED),--seed $(SEED))

explore: check-python
	$(PYTHON) tools/run_explore.py --engine $(ENGINE) --bound $(BOUND) --statistics $(STATISTICS) --jobs $(JOBS) \
		$(if $(ONLY),--only "$(ONLY)") $(if $(REPLAY),--replay "$(REPLAY)") $(if $(RECORD),--record) $(if $(STATEMENTS),--statements)

conformance: check-python
	$(PYTHON) tools/conformance.py run
	$(PYTHON) tools/conformance.py own-tests

lint: check-python
	$(PYTHON) tools/run_tests.py --only lint
	$(PYTHON) tools/run_tests.py --only format
	$(PYTHON) tools/run_tests.py --only types
	$(PYTHON) tools/run_tests.py --only imports
	$(PYTHON) tools/shared_modules.py --check

docs: check-python
	$(PYTHON) tools/run_tests.py --only docs
	@echo "Open .test/docs/index.html."

# reference.py parses the package without importing it, so the package need not be installed.
reference: check-python
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt griffelib ruff
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/guarantee_tests.py
	$(PYTHON) tools/shared_modules.py

wheel: check-python
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt build
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m build -o dist spark

clean:
	rm -rf build dist $(VENV) .test .mypy_cache .ruff_cache .pytest_cache demo-output
