"""The shape of the repository: which room may import which, how long a file may be, what text may not hold."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Lowest first. A module imports from its own floor and from those beneath.
FLOORS = (
    {"errors", "placement", "cluster", "workload", "program", "plan", "plan_file", "schedule", "version"},
    {"rules", "cost"},
    {"passes"},
    {"compiler", "plan_check", "plan_price"},
    {"api", "loading", "compiled", "parallelize", "parallel_model", "ranks", "report", "demo", "demo_model"}
    | {
        "verify",
        "verify_divergence",
        "verify_folder",
        "verify_watch",
        "verify_program",
        "verify_reference",
        "verify_twin",
        "verify_twin_plan",
    },
    {""},  # autoshard/__init__.py: the public names
    {"cli", "__main__"},
)
# Copied into what is emitted, so it stands on nothing of ours; the floors from "api" up may run it.
ALONE = "runtime"
LINES = 400
# Files beyond that many lines because they are tables, a row an operator, and reading them is looking a row up.
TABLES = {"tests/rules/samples.py": "sample operands, one row an operator"}
TEXT = {".py", ".toml", ".md", ".jinja", ".html", ".css", ".js", ".json", ""}


def product_files() -> dict[str, Path]:
    """Module name -> file. The passes are read from their real folder, not through the link."""
    files = {}
    for folder, package in (("autoshard", "autoshard"), ("passes", "autoshard.passes")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "autoshard" and inside[0] == "passes":
                continue
            parts = inside[:-1] if inside[-1] == "__init__" else inside
            files[".".join((package, *parts))] = path
    return files


def repository_files() -> Iterator[Path]:
    """Every text file that is kept, each once."""
    for path in sorted(ROOT.iterdir()):
        if path.is_file() and (path.suffix in TEXT - {""} or path.name in {"Makefile", "LICENSE", ".gitignore"}):
            yield path
    for folder in ("autoshard", "passes", "models", "tests", "docs", ".ci"):
        for path in sorted((ROOT / folder).rglob("*")):
            through_link = folder == "autoshard" and path.relative_to(ROOT).parts[1] == "passes"
            if path.is_file() and path.suffix in TEXT and not through_link:
                yield path


FILES = product_files()
TREES = {module: ast.parse(path.read_text(), str(path)) for module, path in FILES.items()}


def imported(tree: ast.AST, module: str) -> Iterator[tuple[str, int]]:
    """Names that a tree imports, with lines: modules of ours in full, `from package import module` resolved."""
    package = module if FILES.get(module, Path()).name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*above, *filter(None, (node.module,))))
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield (name if name in FILES else base), node.lineno


def own(name: str) -> bool:
    return name == "autoshard" or name.startswith("autoshard.")


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def floor(module: str) -> int:
    for height, rooms in enumerate(FLOORS):
        if room(module) in rooms:
            return height
    raise AssertionError(f"{module} has no floor: add its room '{room(module)}' to FLOORS in tests/test_floors.py")


@pytest.mark.parametrize("module", [module for module in FILES if room(module) != ALONE])
def test_imports_go_down(module):
    for name, line in imported(TREES[module], module):
        if not own(name):
            continue
        if room(name) == ALONE:
            assert floor(module) >= floor("autoshard.api"), f"{module}:{line} imports {name}, which is emitted text"
        else:
            assert floor(name) <= floor(module), f"{module}:{line} imports {name} from a floor above"


@pytest.mark.parametrize("module", [module for module in FILES if room(module) == ALONE])
def test_runtime_stands_alone(module):
    for name, line in imported(TREES[module], module):
        allowed = name.split(".")[0] in {"torch", *sys.stdlib_module_names} or (own(name) and room(name) == ALONE)
        assert allowed, f"{module}:{line} imports {name}: the runtime is copied out and has torch and Python only"


def test_no_cycles():
    edges = {module: {name for name, _ in imported(TREES[module], module) if name in FILES} for module in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "import cycle: " + " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for name in sorted(edges[module] - {module}):
                visit(name, (*path, module))
            done.add(module)

    for module in FILES:
        visit(module, ())


@pytest.mark.parametrize("module", FILES)
def test_own_imports_stand_at_the_top(module):
    functions = [node for node in ast.walk(TREES[module]) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = [f"{name} (line {line})" for node in functions for name, line in imported(node, module) if own(name)]
    assert inner == []


def test_one_name_for_each_module():
    """`import passes` would make a second copy of every class in it; `models` is not installed."""
    for module, tree in TREES.items():
        tops = {name.split(".")[0] for name, _ in imported(tree, module)}
        assert not tops & {"passes", "models", "tests"}, module
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tops = {name.split(".")[0] for name, _ in imported(ast.parse(path.read_text()), "")}
        assert "passes" not in tops, path


def test_models_need_torch_and_workload_only():
    for path in sorted((ROOT / "models").glob("*.py")):
        for name, line in imported(ast.parse(path.read_text()), ""):
            allowed = {"torch", "autoshard", *sys.stdlib_module_names}
            assert name.split(".")[0] in allowed, f"{path.name}:{line} imports {name}"


def test_files_are_short():
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in repository_files()
        if path.suffix == ".py"
    }
    assert {name: lines for name, lines in lengths.items() if lines > LINES and name not in TABLES} == {}
    assert [name for name in TABLES if lengths.get(name, 0) <= LINES] == [], "short now: take them off the list"


def test_unwanted_text():
    # Written in pieces, so that this file may be read too.
    unwanted = re.compile(
        r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"
        r"|(?<![\w.~*])/(work|root|home|Users)/\w"  # a path of one machine
        r"|\b(py" + r"pi\.org|python" + r"hosted|npm" + r"js\.org|down" + r"load\.pytorch)"  # a host of a package index
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in repository_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := unwanted.search(line))
    ]
    assert found == []


def test_own_checks_can_fail():
    """The readers above see relative, aliased, nested and submodule imports."""
    text = "def f():\n    from autoshard.cost import prices as p\n    import autoshard.api as a\nfrom . import plan\n"
    names = [name for name, _ in imported(ast.parse(text), "autoshard.compiler")]
    assert sorted(names) == ["autoshard.api", "autoshard.cost.prices", "autoshard.plan"]
    assert floor("autoshard.api") > floor("autoshard.compiler") > floor("autoshard.cost.prices")
