# Aliases; the scripts are the real thing and need no make.
.PHONY: demo test lint undo

demo:
	./scripts/demo

test:
	./scripts/test

lint:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

undo:
	./scripts/undo
