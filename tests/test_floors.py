"""The shape of the package: imports lead downwards, collectives live in one file, files stay short."""

import ast
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parent.parent / "hf_zero"
MAX_LINES = 400

# Each file or folder directly under hf_zero/ stands on one floor and imports from the floors below it.
ROOF = 7
FLOORS = {
    "errors": 0,
    "command_line": 0,
    "config": 0,
    "placement": 0,
    "layout": 0,
    "outputs": 0,
    "hang": 0,
    "hooks": 0,
    "pending": 0,
    "peer_transport": 0,
    "peer_memory": 0,
    "elementwise": 1,
    "comm": 1,
    "access": 1,
    "masters": 1,
    "loss_scale": 1,
    "checksum": 1,
    "precision": 1,
    "provenance": 1,
    "recipe": 1,
    "deferred": 1,
    "background": 2,
    "buffers": 2,
    "failures": 2,
    "flat_buffer": 2,
    "sliced_file": 2,
    "slice_writer": 2,
    "recorder": 2,
    "staging": 3,
    "committed": 3,
    "state_checks": 3,
    "saving_plan": 3,
    "gradients": 3,
    "grad_norm": 3,
    "unit": 3,
    "whole_gradients": 3,
    "order": 4,
    "reductions": 4,
    "schedule": 4,
    "optimizer": 4,
    "step": 4,
    "build": 4,
    "partition": 4,
    "prepared": 4,
    "saving": 4,
    "loading": 4,
    "model_folder": 4,
    "checkpoint": 4,
    "building": 4,
    "engine": 5,
    "memory": 6,
    "doctor": 6,
    "plain_values": 3,
    "training_state": 6,
    "plain_checkpoints": 6,
    "plain_loop": 6,
    "profiler": 6,
    "integrations": 6,
    "planning": 6,
    "trl": 6,
    "launcher": 6,
    "convert": 6,
    "cli": 6,
    "_launch_hook": 6,
    "__init__": ROOF,
}

# Imports along a floor, (importer, imported), that are meant. Never both ways.
SIDEWAYS = {
    ("config", "errors"),
    ("config", "command_line"),
    ("placement", "errors"),
    ("layout", "errors"),
    ("hang", "errors"),
    ("pending", "hang"),
    ("peer_transport", "peer_memory"),
    ("peer_transport", "pending"),
    ("config", "placement"),
    ("gradients", "whole_gradients"),
    ("unit", "gradients"),
    ("unit", "whole_gradients"),
    ("deferred", "access"),
    ("slice_writer", "sliced_file"),
    ("model_folder", "saving"),
    ("checkpoint", "optimizer"),
    ("saving_plan", "unit"),
    ("schedule", "order"),
    ("schedule", "reductions"),
    ("build", "partition"),
    ("build", "schedule"),
    ("prepared", "build"),
    ("prepared", "model_folder"),
    ("profiler", "memory"),
    ("planning", "memory"),
    ("convert", "planning"),
    ("integrations", "convert"),
    ("integrations", "memory"),
    ("integrations", "plain_loop"),
    ("integrations", "training_state"),
    ("plain_checkpoints", "training_state"),
    ("plain_loop", "plain_checkpoints"),
    ("integrations", "planning"),
    ("trl", "integrations"),
    ("integrations", "launcher"),
    ("cli", "launcher"),
    ("_launch_hook", "launcher"),
}

# What files other than comm may take from torch.distributed: questions and types, nothing that moves data.
HARMLESS = {
    "ProcessGroup",
    "ReduceOp",
    "Work",
    "elastic",  # torchrun: how ranks have ended
    "get_backend",
    "get_rank",
    "get_world_size",
    "group",
    "is_available",
    "is_initialized",
    "is_torchelastic_launched",
}


def _files(package):
    return sorted(package.rglob("*.py"))


def _module(package, file):
    """`hf_zero/config/reader.py` as ("config", "reader"); a package's `__init__.py` as the package itself."""
    parts = file.relative_to(package).with_suffix("").parts
    return parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts


def _imports(package, file):
    """Yield (line, dotted name) of everything that a file imports, inside functions too."""
    home = (package.name, *_module(package, file))
    if file.name != "__init__.py":
        home = home[:-1]
    elif len(home) == 2 and home[1] == "__init__":
        home = home[:1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = list(home[: len(home) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def _entry(package, dotted):
    """The table's name for an imported module of ours; None for other people's modules."""
    parts = dotted.split(".")
    if parts[0] != package.name:
        return None
    inside = len(parts) > 1 and ((package / parts[1]).is_dir() or (package / f"{parts[1]}.py").is_file())
    return parts[1] if inside else "__init__"


def floor_faults(package):
    """Every import that does not lead downwards, and every file that the table does not know."""
    faults = []
    for file in _files(package):
        mine = _module(package, file)[0]
        name = file.relative_to(package)
        if mine not in FLOORS:
            faults.append(f"{name}: '{mine}' stands on no floor; add it to FLOORS in tests/test_floors.py")
            continue
        for line, dotted in _imports(package, file):
            other = _entry(package, dotted)
            if other is None or other == mine:
                continue
            if other not in FLOORS:
                faults.append(f"{name}:{line}: imports '{other}', which stands on no floor; add it to FLOORS")
            elif FLOORS[other] > FLOORS[mine]:
                faults.append(f"{name}:{line}: floor {FLOORS[mine]} imports upwards from {dotted} ({FLOORS[other]})")
            elif FLOORS[other] == FLOORS[mine] and (mine, other) not in SIDEWAYS:
                faults.append(f"{name}:{line}: imports {dotted} from its own floor; move it or mark it in SIDEWAYS")
    return faults


def distributed_faults(package):
    """Every use of torch.distributed outside comm that is more than a question, and any use on the ground floor."""
    faults = []
    for file in _files(package):
        mine = _module(package, file)[0]
        if mine == "comm":
            continue
        allowed = HARMLESS if FLOORS.get(mine) != 0 else set()
        name = file.relative_to(package)
        aliases = {"torch.distributed"}
        for line, dotted in _imports(package, file):
            if dotted.startswith("torch.distributed.") and dotted.split(".")[2] not in allowed:
                faults.append(f"{name}:{line}: imports {dotted}; only comm.py talks to torch.distributed")
            elif dotted == "torch.distributed" and not allowed:
                faults.append(f"{name}:{line}: the ground floor must not import torch.distributed")
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                aliases |= {a.asname or a.name for a in node.names if prefix + a.name == "torch.distributed"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases and node.attr not in allowed:
                faults.append(f"{name}:{node.lineno}: uses torch.distributed.{node.attr}; call it through comm.py")
    return faults


def length_faults(package):
    lengths = {file: len(file.read_text().splitlines()) for file in _files(package)}
    return [
        f"{file.relative_to(package)}: {lines} lines, at most {MAX_LINES}; split it by noun"
        for file, lines in lengths.items()
        if lines > MAX_LINES
    ]


@pytest.mark.parametrize("faults", [floor_faults, distributed_faults, length_faults])
def test_the_package_keeps_its_shape(faults):
    assert _files(PACKAGE), f"no files under {PACKAGE}"
    found = faults(PACKAGE)
    assert not found, "\n".join(found)


def test_sideways_imports_never_go_both_ways():
    assert not {pair for pair in SIDEWAYS if pair[::-1] in SIDEWAYS}
    assert not {pair for pair in SIDEWAYS if FLOORS[pair[0]] != FLOORS[pair[1]]}


@pytest.mark.parametrize(
    "path, source, faults, words",
    [
        ("unit.py", "from hf_zero.engine import Engine", floor_faults, "upwards from hf_zero.engine"),
        ("unit.py", "from .engine import Engine", floor_faults, "upwards from hf_zero.engine"),
        ("unit.py", "from . import engine", floor_faults, "upwards from hf_zero.engine"),
        ("unit.py", "import hf_zero.engine", floor_faults, "upwards from hf_zero.engine"),
        ("unit.py", "def f():\n    from hf_zero import engine", floor_faults, "unit.py:2"),
        ("unit.py", "from hf_zero import shard", floor_faults, "upwards from hf_zero.shard"),
        ("unit.py", "from hf_zero import grad_norm", floor_faults, "own floor"),
        ("config/reader.py", "from ..comm import all_gather", floor_faults, "upwards from hf_zero.comm"),
        ("attic.py", "", floor_faults, "add it to FLOORS"),
        ("unit.py", "import torch.distributed as dist\ndist.all_reduce(x)", distributed_faults, "unit.py:2"),
        ("unit.py", "import torch\ntorch.distributed.barrier()", distributed_faults, "unit.py:2"),
        ("unit.py", "from torch import distributed as d\nd.broadcast(x)", distributed_faults, "broadcast"),
        ("unit.py", "from torch.distributed import all_gather", distributed_faults, "all_gather"),
        ("layout.py", "import torch.distributed", distributed_faults, "ground floor"),
        ("layout.py", "import torch.distributed as dist\ndist.get_rank()", distributed_faults, "get_rank"),
        ("unit.py", "x = 1\n" * (MAX_LINES + 1), length_faults, "at most"),
    ],
)
def test_each_fault_is_found(tmp_path, path, source, faults, words):
    package = tmp_path / "hf_zero"
    (package / "config").mkdir(parents=True)
    for name in ("__init__.py", "engine.py", "comm.py", "grad_norm.py", "config/__init__.py"):
        (package / name).write_text("")
    assert faults(package) == []
    (package / path).write_text(source)
    found = faults(package)
    assert any(words in fault for fault in found), found


def test_what_is_allowed_is_not_a_fault(tmp_path):
    package = tmp_path / "hf_zero"
    (package / "config").mkdir(parents=True)
    (package / "__init__.py").write_text("from .engine import Engine\nfrom hf_zero.config import ZeroConfig")
    (package / "config" / "__init__.py").write_text("from .reader import read\nfrom hf_zero.errors import Fault")
    (package / "config" / "reader.py").write_text("from . import reader\nimport torch")
    (package / "errors.py").write_text("x = 1\n" * MAX_LINES)
    (package / "comm.py").write_text("import torch.distributed as dist\ndist.all_reduce(1)")
    (package / "engine.py").write_text("import torch.distributed as dist\nfrom . import comm\ndist.get_rank()")
    assert floor_faults(package) + distributed_faults(package) + length_faults(package) == []
