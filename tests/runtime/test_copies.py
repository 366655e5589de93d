"""The runtime's files as they lie beside an emitted program: no autoshard, flat names."""

import ast
import subprocess
import sys
from pathlib import Path

import autoshard.runtime

FOLDER = Path(autoshard.runtime.__file__).parent
FILES = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")


def test_imports_are_torch_and_the_standard_library() -> None:
    allowed = {"torch", *sys.stdlib_module_names}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module]
            for name in names:
                assert name.startswith("autoshard.runtime.") or name.split(".")[0] in allowed


def test_copies_run_without_autoshard(tmp_path: Path) -> None:
    for path in FILES:
        (tmp_path / path.name).write_text(path.read_text().replace("from autoshard.runtime.", "from "))
        assert "import autoshard" not in (tmp_path / path.name).read_text()
    modules = ", ".join(path.stem for path in FILES)
    code = f"import sys, {modules}; assert 'autoshard' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PATH": ""}, check=True, timeout=120)
