"""Which mutants are tried: a fixed share of all sites, chosen by a hash, so that an edit moves only its own."""

from __future__ import annotations

import ast
import hashlib
import pathlib

from tests.mutants import operators

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = ("grants", "rules", "signing", "manifest", "decompile", "workspace")
SEED = "covenant-mutants-1"
DRAWN = 2250


def module_name(path: pathlib.Path) -> str:
    """The dotted name of a source file of the clone."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def sources(rooms: tuple[str, ...] = ROOMS) -> dict[str, pathlib.Path]:
    """Dotted name -> file of every module of these rooms of policy."""
    files = [path for room in rooms for path in sorted((ROOT / "policy" / room).rglob("*.py"))]
    return {module_name(path): path for path in files}


def parsed(path: pathlib.Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), filename=str(path))


def all_sites(rooms: tuple[str, ...] = ROOMS) -> list[operators.Site]:
    """Every site of these rooms."""
    return [site for name, path in sources(rooms).items() for site in operators.sites(name, parsed(path))]


def drawn(sites: list[operators.Site], number: int = DRAWN) -> list[operators.Site]:
    """The ``number`` sites that come first by a hash of the seed and their key, in the order of the source."""
    rank = {site.key: hashlib.sha256(f"{SEED}:{site.key}".encode()).digest() for site in sites}
    chosen = set(sorted(rank, key=rank.__getitem__)[:number])
    return [site for site in sites if site.key in chosen]


def mutated(path: pathlib.Path, module: str, key: str) -> ast.Module:
    """The tree of a module with one site changed."""
    tree = parsed(path)
    next(site for site in operators.sites(module, tree) if site.key == key).apply()
    return ast.fix_missing_locations(tree)
