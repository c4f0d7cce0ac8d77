"""The package installs as it says: metadata, pins, entry points, files; and it never needs DeepSpeed or a compiler."""

import ast
import configparser
import contextlib
import email
import functools
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hf_zero
from benchmarks import version_table
from hf_zero.tools.requirements import check_release
from tests.support.harness import LIMIT


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_zero"
# Files that are imported only where an extra is wanted.
NEEDS_EXTRA = {"integrations/trl.py": ("trl",), "tools/run_charts.py": ("plot",)}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@functools.cache
def read_setup():
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read(ROOT / "setup.cfg")
    return parser


def lines(text):
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def requirements(section):
    return [Requirement(line) for line in lines(section)]


def all_requirements():
    setup = read_setup()
    texts = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    return [found for text in texts for found in requirements(text) if canonicalize_name(found.name) != "hf-zero"]


def pins(python):
    """The pinned versions that pip would take on this Python."""
    found = {}
    for pin in requirements((ROOT / "constraints.txt").read_text()):
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert canonicalize_name(pin.name) not in found, f"{pin.name} is pinned twice for Python {python}"
            (specifier,) = pin.specifier
            assert specifier.operator == "==", pin
            found[canonicalize_name(pin.name)] = specifier.version
    return found


def python_files():
    for folder in ("hf_zero", "scripts", "tests", "recipes"):
        yield from (ROOT / folder).rglob("*.py")


def imports_in(nodes):
    """Top-level names of all modules that some syntax nodes import, by statement or by name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value.split(".")[0]


@functools.cache
def imported_modules(path):
    """The modules that a file imports, anywhere in it."""
    return set(imports_in(ast.walk(ast.parse(path.read_text()))))


# Reads the metadata of everything that is installed, so once is enough.
packages_distributions = functools.cache(importlib.metadata.packages_distributions)


def distributions_of(modules):
    """The installed distributions behind some modules of other people; a module that is not installed is its own."""
    known = packages_distributions()
    others = modules - set(sys.stdlib_module_names) - {"hf_zero"}
    return {module: {canonicalize_name(name) for name in known.get(module, [module])} for module in others}


def test_metadata_is_complete_and_has_one_version():
    metadata = read_setup()["metadata"]
    assert metadata["name"] == "hf_zero" and metadata["license"] == "Apache-2.0"
    assert metadata["version"] == "attr: hf_zero.__version__"
    assert importlib.metadata.version("hf_zero") == hf_zero.__version__
    assert "Apache License" in (ROOT / metadata["license_files"]).read_text()
    assert set(read_setup()["options.extras_require"]) == {"trl", "peft", "math", "plot", "docs", "dev"}


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_pin_every_requirement_inside_its_range(python):
    pinned = pins(python)
    for requirement in all_requirements():
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} does not admit the pinned {version}"


def test_pins_name_no_build_and_no_place():
    text = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"\+(cpu|cu\d+)|://|^\s*-", text, re.MULTILINE)


def declared(*extras):
    setup = read_setup()
    texts = [setup["options"]["install_requires"], *(setup["options.extras_require"][extra] for extra in extras)]
    return {canonicalize_name(found.name) for text in texts for found in requirements(text)}


def test_the_package_imports_only_what_it_declares():
    """What stands at the top of a file must always be installed; an extra may be imported where it is used."""
    undeclared = []
    for path in PACKAGE.rglob("*.py"):
        at_import = set(imports_in(ast.parse(path.read_text()).body))
        always = declared(*NEEDS_EXTRA.get(str(path.relative_to(PACKAGE)), ()))
        for module, names in distributions_of(imported_modules(path)).items():
            if not names & (always if module in at_import else declared("trl", "peft", "plot")):
                undeclared.append(f"{path.relative_to(ROOT)}: {module}")
    assert not undeclared, "not in setup.cfg"


def test_every_declared_dependency_is_imported():
    programs = [path for path in python_files() if path.parent != ROOT / "tests"]
    used = {name for path in programs for names in distributions_of(imported_modules(path)).values() for name in names}
    # hf_zero writes the safetensors format itself; transformers needs the library to read what was written.
    unused = declared() - used - {"safetensors"}
    assert not unused, f"declared and never imported: {unused}"


def test_nothing_imports_deepspeed():
    assert [path for path in python_files() if "deepspeed" in imported_modules(path)] == []


def test_the_page_on_installation_names_every_extra_and_the_sets_of_pins():
    page = (ROOT / "docs/installation.md").read_text()
    assert [extra for extra in read_setup()["options.extras_require"] if f"| `{extra}` |" not in page] == []
    assert version_table.table() in page, "python -m benchmarks.version_table docs/installation.md"
    oldest = version_table.pins("constraints-oldest.txt", "3.11")
    for wanted in all_requirements():
        pinned = oldest.get(canonicalize_name(wanted.name))
        assert pinned is None or wanted.specifier.contains(pinned), f"{wanted} does not admit the oldest {pinned}"


@pytest.mark.parametrize(
    "name, found, works",
    [
        ("transformers", "5.2.0", False),
        ("transformers", "5.3.0", True),
        ("transformers", "5.99.0", True),
        ("transformers", "6.0.0", False),
        ("torch", "2.9.1", False),
        ("torch", "2.10.0a0+vendor.25.11", True),
        ("torch", "2.15.1+cu130", True),
        ("torch", "2.16.0", False),
        ("torch", "2.16.0.dev20261122", False),
    ],
)
def test_a_release_outside_of_the_range_is_told_with_the_range(monkeypatch, name, found, works):
    needed = lines(read_setup()["options"]["install_requires"])
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with contextlib.nullcontext() if works else pytest.raises(ImportError) as raised:
        check_release(name)
    (wanted,) = [each.specifier for each in all_requirements() if each.name == name]
    told = f"{name} {found} is installed, and hf_zero works with {name}{wanted}"
    assert works or told in str(raised.value)


def test_what_importing_checks_has_an_end():
    """Private names that we use may move in any release: one that no test has seen is not taken, and not run."""
    bounds = {each.name: {part.operator for part in each.specifier} for each in all_requirements()}
    assert [name for name in ("torch", "accelerate", "transformers", "trl") if "<" not in bounds[name]] == []
    source = (PACKAGE / "integrations/__init__.py").read_text()
    assert '("torch", "accelerate", "transformers")' in source


def test_entry_points_lead_to_something():
    for text in read_setup()["options.entry_points"].values():
        for line in lines(text):
            module, attribute = line.split("=")[1].strip().split(":")
            assert callable(getattr(importlib.import_module(module), attribute)), line


def test_no_public_name_is_that_of_a_module():
    """Importing a module sets its name on the package, where it would hide what the package answers lazily."""
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert modules & set(hf_zero.__all__) == set()


def test_every_folder_of_the_package_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source archive, and the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(PACKAGE, source / "hf_zero", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # A compiler that fails at once: building must not even ask for one.
    without = {**os.environ, "CC": "false", "CXX": "false"}
    make = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run(
        [sys.executable, "-c", make], cwd=source, check=True, env=without, timeout=LIMIT, capture_output=True
    )
    (archive,) = folder.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder]
    subprocess.run([*command, archive], check=True, env=without, timeout=LIMIT)
    (wheel,) = folder.glob("*.whl")
    return archive, wheel


@pytest.mark.slow
def test_archive_and_wheel_hold_the_whole_package_and_nothing_compiled(built):
    archive, wheel = built
    assert wheel.name == f"hf_zero-{hf_zero.__version__}-py3-none-any.whl"
    written = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("hf_zero/")}
    assert written == shipped
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert written | {"LICENSE", "README.md", "setup.cfg", "pyproject.toml"} <= names


@pytest.mark.slow
def test_the_wheel_says_what_it_needs_and_brings_its_commands(built):
    with zipfile.ZipFile(built[1]) as wheel:
        (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
        said = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        points = configparser.ConfigParser(delimiters=("=",))
        points.read_string(wheel.read(f"{info}/entry_points.txt").decode())
        assert any(name.endswith("LICENSE") for name in wheel.namelist())
    assert set(said.get_all("Provides-Extra")) == set(read_setup()["options.extras_require"])
    assert said["Requires-Python"] == ">=3.10" and "Apache-2.0" in (said["License-Expression"], said["License"])
    assert said["Description-Content-Type"] == "text/markdown" and "hf-zero launch" in said.get_payload()
    assert points["console_scripts"]["hf-zero"] == "hf_zero.cli:main"
    assert set(points["torch.backends"]) == {"hf_zero", "hf_zero_adopt"}


@pytest.mark.exhaustive
def test_the_wheel_installs_in_an_empty_environment_and_trains(built, tmp_path):
    """Downloads everything: minutes."""
    venv.create(tmp_path / "env", with_pip=True)
    commands = tmp_path / "env/bin"
    install = [commands / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    subprocess.run([*install, f"{built[1]}[trl]"], check=True, timeout=1500, cwd=tmp_path)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command, says in (
        (["hf-zero", "--version"], f"hf-zero {hf_zero.__version__}"),
        (["hf-zero", "launch", "--num_processes", "2", ROOT / "examples/trainer.py"], "train_loss"),
    ):
        done = subprocess.run(
            [commands / command[0], *command[1:]],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0 and says in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "outputs/trainer/model.safetensors").is_file()


def test_make_demo_runs_the_literal_command():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    planned = subprocess.run(
        ["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=LIMIT
    ).stdout
    command = (
        "accelerate launch --config_file recipes/accelerate_configs/zero3.yaml --num_processes 2 "
        "scripts/sft.py --config recipes/demo/sft/config_demo.yaml"
    )
    assert command in re.sub(r"\s*\\\n\s*", " ", planned)
    assert command in re.sub(r"\s*\\\n\s*", " ", (ROOT / "README.md").read_text())


def test_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 200
    assert text.index("make demo") < 800 and text.index("make test") < 800
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links and [link for link in links if not (ROOT / link).exists()] == []
    tour = re.findall(r"`([a-z_]+(?:\.py|/))`", text[text.index("## A tour") : text.index("## Tests")])
    missing = [name for name in tour if not (PACKAGE / name).exists() and not (ROOT / name).exists()]
    assert set(missing) <= {"accelerate_configs/"}


def test_the_tour_leaves_out_no_file():
    text = (ROOT / "README.md").read_text()
    parts = [path.name for path in PACKAGE.iterdir() if path.suffix == ".py" and path.name != "__init__.py"]
    parts += [f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")]
    missing = [name for name in parts if f"`{name}`" not in text]
    assert not missing, f"give these a word in README's tour of the files: {missing}"
