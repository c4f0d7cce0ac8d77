"""The shape of the package: imports lead downwards, collectives stay in one package, files stay short."""

import ast
import re
from pathlib import Path

import pytest

from tests.support import imports


PACKAGE = Path(__file__).parents[2] / "hf_zero"
MAX_LINES = 400

# Each file or folder directly under hf_zero/ belongs to one layer and imports only from the layers below it.
LAYERS = {
    "errors": 0,
    "command_line": 0,
    "releases": 0,
    "config": 1,
    "comm": 1,
    "core": 2,
    "launcher": 2,
    "checkpoint": 3,
    "lazy_init": 3,
    "parallel": 3,
    "tools": 3,
    "planning": 4,
    "convert": 5,
    "integrations": 6,
    "deepspeed": 7,
    "verify": 7,
    "trl": 7,
    "adopt": 7,
    "cli": 7,
    "run": 8,
    "__init__": 9,
}

# Inside these packages the same holds for files: a file imports only from rungs before its own.
LADDERS = {
    "comm": """topology watchdog peer_memory codec process_groups local_part gloo_threads | dtensors | feedback |
        meter traffic work | sums | transport | transport.alone transport.group | transport.nccl transport.messages |
        transport.reads | transport.counting | communicator | mesh""",
    "core": """wrappers |
        placement courier direct_file disk_failures layout guard heap hooks outputs loss_scale twins
        partition buffers | precision packed extents codecs disk_home deferred grad_norm elementwise ownership
        gradient_shard gradient_sums step_place | homes | tensor_parts gradient_route node_slice |
        first_values master | skipped_params resting owned | flat_buffer | whole_gradients | gradients |
        unit binding step | rebuild | optimizer | optimizer_set stepping | order reductions | schedule |
        build activations sequence tiled_loss tiled_mlp | prepared structure | engine | drift""",
}

# What files outside of comm/ may take from torch.distributed: questions and types, nothing that moves data.
HARMLESS = {
    "ProcessGroup",
    "get_backend",
    "get_rank",
    "get_world_size",
    "group",
    "is_available",
    "is_initialized",
    "is_torchelastic_launched",
    "elastic",  # torchrun's launcher
    "fsdp",  # a system that verify can take in our place
}

# Calls that would lead upwards without an import.
REACHING = {
    r"\b(engine|owner): (object|Any)\b": "give the argument a Protocol or the class",
    r"\.schedule\.": "ask the engine, which owns its schedule",
}
OWNERS = {"core/engine.py", "core/structure.py"}


def layer_faults(package):
    """Every import that does not lead to a lower layer, and every file that the table does not know."""
    faults = []
    for file in imports.files(package):
        mine, name = imports.module(package, file)[0], file.relative_to(package)
        if mine not in LAYERS:
            faults.append(f"{name}: '{mine}' is in no layer; add it to LAYERS in {Path(__file__).name}")
            continue
        for line, dotted in imports.found_in(package, file):
            target = imports.target(package, dotted)
            if target is None or target[0] == mine:
                continue
            if target[0] not in LAYERS:
                faults.append(f"{name}:{line}: imports '{target[0]}', which is in no layer; add it to LAYERS")
            elif LAYERS[target[0]] >= LAYERS[mine]:
                faults.append(
                    f"{name}:{line}: layer {LAYERS[mine]} imports {dotted} of layer {LAYERS[target[0]]}, not below it"
                )
    return faults


def ladder_faults(package):
    """The same inside the packages that have a ladder."""
    faults = []
    for room, text in LADDERS.items():
        rungs = {name: number for number, rung in enumerate(text.split("|")) for name in rung.split()}
        for file in imports.files(package / room):
            mine = ".".join(imports.module(package, file)[1:])
            if not mine:
                continue  # the package itself
            if mine not in rungs:
                faults.append(f"{room}/{mine}: is on no rung; add it to LADDERS in {Path(__file__).name}")
                continue
            for line, dotted in imports.found_in(package, file):
                target = imports.target(package, dotted)
                if target is None or target[0] != room or len(target) == 1:
                    continue
                other = ".".join(target[1:])
                if rungs.get(other, 99) >= rungs[mine]:
                    faults.append(f"{room}/{mine}:{line}: imports {other}, which is not below it")
    return faults


def circle_faults(package):
    """Every file whose import would import it again, by way of others of its package."""
    graph = {}
    for file in imports.files(package):
        mine = imports.module(package, file)
        targets = {imports.target(package, dotted) for _, dotted in imports.found_in(package, file, at_import=True)}
        graph[mine] = {target for target in targets if target and target[0] == mine[0] and target != mine}
    faults = []
    for start in graph:
        seen, todo = set(), list(graph[start])
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo.extend(graph.get(at, ()))
        if start in seen:
            faults.append(f"{'/'.join(start)}: imports itself by way of others")
    return faults


def reaching_faults(package):
    """Every call that leads upwards through an argument without a type, or around its owner."""
    faults = []
    for file in imports.files(package):
        name = file.relative_to(package)
        if str(name) in OWNERS:
            continue
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            for pattern, advice in REACHING.items():
                if re.search(pattern, line):
                    faults.append(f"{name}:{number}: {line.strip()}: {advice}")
    return faults


def distributed_faults(package):
    """Every use of torch.distributed outside of comm/ that is more than a question."""
    faults = []
    for file in imports.files(package):
        if imports.module(package, file)[0] == "comm":
            continue
        name = file.relative_to(package)
        aliases = {"torch.distributed"}
        for line, dotted in imports.found_in(package, file):
            if dotted.startswith("torch.distributed.") and dotted.split(".")[2] not in HARMLESS:
                faults.append(f"{name}:{line}: imports {dotted}; only comm/ talks to torch.distributed")
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                aliases |= {a.asname or a.name for a in node.names if prefix + a.name == "torch.distributed"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases and node.attr not in HARMLESS:
                faults.append(f"{name}:{node.lineno}: uses torch.distributed.{node.attr}; call it through comm/")
    return faults


def length_faults(package):
    lengths = {file: len(file.read_text().splitlines()) for file in imports.files(package)}
    return [
        f"{file.relative_to(package)}: {lines} lines, at most {MAX_LINES}; split it by noun"
        for file, lines in lengths.items()
        if lines > MAX_LINES
    ]


CHECKS = [layer_faults, ladder_faults, circle_faults, reaching_faults, distributed_faults, length_faults]


@pytest.mark.parametrize("faults", CHECKS)
def test_the_package_keeps_its_shape(faults):
    assert imports.files(PACKAGE), f"no files under {PACKAGE}"
    found = faults(PACKAGE)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "path, source, faults, words",
    [
        ("comm/work.py", "from hf_zero.core.unit import Unit", layer_faults, "layer 1 imports hf_zero.core.unit.Unit"),
        ("comm/work.py", "from ..core.unit import Unit", layer_faults, "layer 1 imports hf_zero.core.unit.Unit"),
        ("comm/work.py", "from .. import core", layer_faults, "layer 1 imports hf_zero.core"),
        ("comm/work.py", "import hf_zero.core", layer_faults, "of layer 2"),
        ("comm/work.py", "def f():\n    from hf_zero import core", layer_faults, "work.py:2"),
        ("comm/work.py", "from hf_zero import shard", layer_faults, "hf_zero.shard"),
        ("config/reader.py", "from ..comm import work", layer_faults, "not below"),
        ("attic.py", "", layer_faults, "add it to LAYERS"),
        ("core/unit.py", "from hf_zero.core.engine import Engine", ladder_faults, "not below it"),
        ("core/unit.py", "from hf_zero.core import gradients, unit", ladder_faults, "imports unit"),
        ("core/attic.py", "", ladder_faults, "add it to LADDERS"),
        ("config/reader.py", "from hf_zero.config import schema", circle_faults, "config/reader"),
        ("core/unit.py", "def f(owner: object): ...", reaching_faults, "Protocol"),
        ("comm/work.py", "engine.schedule.sync = False", reaching_faults, "owns its schedule"),
        ("core/unit.py", "import torch.distributed as dist\ndist.all_reduce(x)", distributed_faults, "unit.py:2"),
        ("core/unit.py", "import torch\ntorch.distributed.barrier()", distributed_faults, "unit.py:2"),
        ("core/unit.py", "from torch import distributed as d\nd.broadcast(x)", distributed_faults, "broadcast"),
        ("core/unit.py", "from torch.distributed import all_gather", distributed_faults, "all_gather"),
        ("core/unit.py", "x = 1\n" * (MAX_LINES + 1), length_faults, "at most"),
    ],
)
def test_each_fault_is_found(tmp_path, path, source, faults, words):
    package = tmp_path / "hf_zero"
    for name in ("comm", "core", "config"):
        (package / name).mkdir(parents=True)
    names = ["__init__", "comm/__init__", "comm/work", "core/__init__", "core/engine", "core/gradients", "core/unit"]
    for name in names:
        (package / f"{name}.py").write_text("")
    (package / "config" / "__init__.py").write_text("")
    (package / "config" / "schema.py").write_text("from hf_zero.config import reader")
    (package / "config" / "reader.py").write_text("")
    assert faults(package) == []
    (package / path).write_text(source)
    found = faults(package)
    assert any(words in fault for fault in found), found


def test_what_is_allowed_is_not_a_fault(tmp_path):
    package = tmp_path / "hf_zero"
    for name in ("comm", "core", "config"):
        (package / name).mkdir(parents=True)
    (package / "__init__.py").write_text("from .core.engine import Engine\nfrom hf_zero.config import ZeroConfig")
    (package / "config" / "__init__.py").write_text("from .reader import read\nfrom hf_zero.errors import Fault")
    (package / "config" / "reader.py").write_text("import torch")
    (package / "errors.py").write_text("x = 1\n" * MAX_LINES)
    (package / "comm" / "work.py").write_text("import torch.distributed as dist\ndist.all_reduce(1)")
    (package / "core" / "engine.py").write_text("import torch.distributed as dist\nfrom . import unit\ndist.group")
    (package / "core" / "unit.py").write_text("from hf_zero.comm import work")
    assert [fault for check in CHECKS for fault in check(package)] == []
