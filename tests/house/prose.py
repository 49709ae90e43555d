"""Find prose that breaks the rules of writing: docstrings, comments, class names and commit subjects.

`python -m tests.house.prose` prints each finding with its place.
"""

from __future__ import annotations

import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = ("policy", "sandbox", "covenant")
FOLDERS = (*ROOMS, "agents", "benchmarks", "scripts", "tests", "vagrant")

# Rule 1: a sentence names its subject.
VAGUE = re.compile(r"\b(whoever|whatever|somebody|nobody|such a one|that one)\b", re.IGNORECASE)
# Rule 12: a docstring begins with what the thing is or does.
OPENING = re.compile(r"(What|Who|Whether|Of)\b")
SUBJECT_CHARACTERS = 72
SUBJECT = re.compile(r"[a-z0-9_./-]+(,? [a-z0-9_./-]+){0,3}: [A-Za-z`]")
# The first commit that the rules hold for comes after this one.
RULES_SINCE = "94b57d5bb90bb5f02a890e7ef0714c1834ed14aa"


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield each bare string with its line and whether a predicate has it: rule 12 lets predicates say "Whether"."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        predicate = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_bool(node.returns)
        for index, statement in enumerate(body):
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                before = body[index - 1] if index else None
                field = isinstance(before, ast.AnnAssign) and _is_bool(before.annotation)
                yield statement.lineno, value.value, field or (predicate and index == 0)


def _is_bool(annotation: ast.expr | None) -> bool:
    return annotation is not None and bool(re.search(r"\b(bool|TypeGuard|TypeIs)\b", ast.unparse(annotation)))


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def findings(source: str) -> list[tuple[int, str, str]]:
    """Return the line, the rule and the words of each finding in the docstrings and comments of a module."""
    found = []
    for line, text, predicate in _docstrings(ast.parse(source)):
        found += [(line, "vague", match.group()) for match in VAGUE.finditer(text)]
        opening = OPENING.match(text.strip())
        if opening and not (predicate and opening.group() == "Whether"):
            found.append((line, "opening", opening.group()))
    for line, text in _comments(source):
        found += [(line, "vague", match.group()) for match in VAGUE.finditer(text)]
    return sorted(found)


def all_findings() -> list[str]:
    """Return each finding of the project as ``file:line: rule: words``."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {rule}: {words}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, rule, words in findings(path.read_text())
    ]


def twins(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return each public top-level class name that two modules define, with these modules."""
    places: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    return {name: modules for name, modules in places.items() if len(modules) > 1}


def twins_of(room: str) -> dict[str, list[str]]:
    """Return each public class name that a room defines more than once, with the modules."""
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / room).rglob("*.py"))}
    return twins(sources)


def wrong_subjects(subjects: list[str]) -> list[str]:
    """Return the commit subjects that are too long or do not read `area: imperative`."""
    return [
        subject
        for subject in subjects
        if not subject.startswith(("Merge ", "Revert "))
        and (len(subject) > SUBJECT_CHARACTERS or not SUBJECT.match(subject))
    ]


def subjects_since_the_rules() -> list[str]:
    """Return the subjects of the commits after RULES_SINCE; of a shallow clone, none."""
    command = ["git", "-c", "safe.directory=*", "log", "--format=%s", f"{RULES_SINCE}..HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def main() -> int:
    """Print the findings. Returns 1 where there is one."""
    found = [
        *all_findings(),
        *(f"{room}: class {name}: {twins_of(room)[name]}" for room in ROOMS for name in twins_of(room)),
    ]
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
