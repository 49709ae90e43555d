# Aliases; the scripts are the real thing and need no make.
.PHONY: agents contain cpython crash demo kernel learn longer test lint load undo unit mutants fuzz coverage golden vm year

demo:
	./scripts/demo

# Both groups below.
test:
	./scripts/test

# Lint, unit, property and golden tests; without root.
unit:
	./scripts/test unit

# The tests that start sandboxes, the daemon and set-up. As root.
kernel:
	./scripts/test kernel

# What is left out of `make test` for its length: the hostile probes of the network, and what attackers have tried.
longer:
	./scripts/test longer

# A real machine in software emulation, pure cgroup v2 under systemd: docs/virtual-machine.md.
vm:
	./scripts/vm

# Every hostile agent in every setting, beside its control: docs/containment.md. As root; about three minutes.
contain:
	.venv/bin/python -m tests.containment

# The agents that people use, each beside a model that follows a script: docs/agents.md. As root; installs them first.
agents:
	.venv/bin/python -m tests.agents

# Twenty programs learnt from one run each, and run again by what was learnt: docs/learning.md. As root; ten minutes.
learn:
	.venv/bin/python -m tests.learn

# 150 modules of CPython's own tests, in a session and in plain runsc. As root; downloads them by apt.
cpython:
	.venv/bin/python -m tests.cpython

lint:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# kill -9 of a run and of all below it, a thousand times and at every audit row: docs/operations.md. As root.
crash:
	.venv/bin/python -m tests.crash

# 2,000 intents of 64 clients at once, then the daemon killed in their middle: docs/intents.md.
load:
	.venv/bin/python -m tests.load

# A year of operation under a clock that only its processes see: docs/year.md. As root; under an hour on two cores.
year:
	.venv/bin/python -m tests.year --report year.md

# How good the tests of the deciding half are: docs/mutants.md. Under an hour on two cores.
mutants:
	.venv/bin/python -m tests.mutants

# Every parser, two million inputs: no crash, nothing false accepted.
fuzz:
	.venv/bin/python -m tests.fuzz

# The golden cases anew; git shows what changed.
golden:
	.venv/bin/python -m tests.golden.regenerate

# Which lines of policy no test runs; fails below the floor of pyproject.toml.
coverage:
	.venv/bin/coverage run -m pytest -q -p no:cacheprovider tests/unit tests/property tests/golden
	.venv/bin/coverage report

undo:
	./scripts/undo
