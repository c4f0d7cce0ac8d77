"""The public names of the package: the same for `dir`, for type checkers and editors, and when they are used."""

import ast
import subprocess
import sys
from pathlib import Path

import hf_zero
from tests.support.harness import LIMIT


def _shown_to_type_checkers():
    """Module of every name that `if TYPE_CHECKING` imports."""
    tree = ast.parse(Path(hf_zero.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    return {alias.name: node.module for node in block.body for alias in node.names}


def test_type_checkers_see_the_names_where_they_come_from():
    assert _shown_to_type_checkers() == hf_zero._HOMES
    assert set(hf_zero.__all__) == {*hf_zero._HOMES, "__version__"}
    assert (Path(hf_zero.__file__).parent / "py.typed").is_file()


def test_dir_shows_every_public_name_without_importing_torch():
    code = "import sys, hf_zero; names = dir(hf_zero); assert 'torch' not in sys.modules; print(*names)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT)
    assert set(hf_zero.__all__) <= set(shown.stdout.split())


def test_every_public_name_can_be_used():
    for name in hf_zero.__all__:
        assert getattr(hf_zero, name) is not None
