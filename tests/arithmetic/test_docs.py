"""README and the pages under docs/ keep up with the code: files, layers, stages, links, and code that runs."""

import ast
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml

import hf_zero
from hf_zero.core.placement import STAGES
from hf_zero.integrations import trl
from scripts.docs_links import on_page_markdown
from tests.arithmetic.test_layers import LAYERS
from tests.support import zoo
from tests.support.harness import LIMIT, distributed


DOCS = Path(__file__).parents[2] / "docs"
DESIGN = (DOCS / "design.md").read_text()


def rows(title):
    """The cells of the first table under a heading of the design page."""
    text = DESIGN[DESIGN.index(f"## {title}") :]
    table = text[text.index("\n| ") :].split("\n\n")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table[2:]]


def test_every_file_has_a_line_in_its_layer():
    named = {re.sub(r"`|\.py|/", "", file): int(layer) for layer, file, _ in rows("Layers")}
    assert named == {name: layer for name, layer in LAYERS.items() if name != "__init__"}


def test_every_file_is_in_its_layer_in_readme():
    lines = re.findall(r"^\| (\d) \| (`.*?`) \| ", (DOCS.parent / "README.md").read_text(), re.MULTILINE)
    named = {file: int(layer) for layer, files in lines for file in re.findall(r"`(\w+)(?:\.py|/)`", files)}
    assert named == {name: layer for name, layer in LAYERS.items() if name != "__init__"}


def test_the_placement_table_is_the_one_of_the_code():
    code = [[str(stage), p.parameter.value, p.gradient.value, p.optimizer.value] for stage, p in STAGES.items()]
    assert rows("Placements") == code


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if "://" not in link and not (DOCS / link).exists()] == []


def test_the_site_has_every_page_and_the_reference_every_public_name():
    site = (DOCS.parent / "mkdocs.yml").read_text()
    listed = re.findall(r"([\w/]+\.md)", site[site.index("\nnav:") :])
    pages = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert sorted(listed) == pages, "nav of mkdocs.yml"
    paths = re.findall(r"^::: ([\w.]+)", (DOCS / "reference.md").read_text(), re.MULTILINE)
    found = {pydoc.locate(path) for path in paths}
    assert None not in found, [path for path in paths if pydoc.locate(path) is None]
    names = set(hf_zero.__all__) - {"__version__"}
    missing = [name for name in names if getattr(hf_zero, name) not in found]
    missing += [name for name in trl.__all__ if getattr(trl, name) not in found]
    assert not missing, f"docs/reference.md lacks {missing}"


def _messages():
    """All texts of the package's code, values that are filled in as "..."."""
    for file in (DOCS.parent / "hf_zero").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts)
            yield re.sub(r"%[.\d]*[a-z]", "...", text).replace("%%", "%")


def test_the_messages_of_the_page_by_symptom_are_those_of_the_code():
    text = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `(.*?)`.* \|$", text[text.index("## Errors people see") :], re.MULTILINE)
    of_others = ("No module named 'deepspeed'", "environment variable RANK expected")
    known = "\n".join(_messages())
    assert len(quoted) > 10
    for message in set(quoted) - set(of_others):
        pieces = [piece.strip() for piece in re.split(r"\.\.\.|\d+", message)]
        assert [piece for piece in pieces if piece not in known] == [], message


def test_links_of_the_site_that_leave_its_pages_become_names_of_files():
    pages = [SimpleNamespace(file=SimpleNamespace(src_uri=uri)) for uri in ("a.md", "measurements/README.md")]
    text = "[x](b.md) [recipes/](../recipes) [run](../tests/t.py#L3) [up](../a.md)"
    assert on_page_markdown(text, pages[0]) == "[x](b.md) `recipes` run (`tests/t.py`) up (`a.md`)"
    assert on_page_markdown(text, pages[1]) == text


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=DOCS.parent,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert "ZeroTrainingArguments" in (tmp_path / "reference.html").read_text()


def snippets():
    """The Python of README: the Trainer, Accelerate, the plain loop, a write to a parameter."""
    text = (DOCS.parent / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def reader():
    """What a reader of README has at hand."""
    model = zoo.build("llama")
    batches = [zoo.batch("llama", dist.get_rank(), number) for number in range(4)]
    rows = [{key: value[0] for key, value in zoo.batch("llama", 0, number).items()} for number in range(4)]
    optimizer = torch.optim.AdamW(model.parameters())
    return {"torch": torch, "model": model, "optimizer": optimizer, "loader": batches, "dataset": rows}


@distributed(world_size=2)
@pytest.mark.slow
def test_the_snippet_of_the_trainer_writes_a_whole_model(tmp_path):
    os.chdir(tmp_path)
    exec(snippets()[0], reader())
    dist.barrier()
    assert (tmp_path / "out" / "model.safetensors").is_file(), list(tmp_path.rglob("*"))


@distributed(world_size=2)
def test_the_snippet_of_accelerate_prepares_a_model():
    names = reader()
    names["loader"] = torch.utils.data.DataLoader(names["dataset"], batch_size=2)
    exec(snippets()[1], names)
    for batch in names["loader"]:
        names["accelerator"].backward(names["model"](**batch).loss)
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    assert names["model"].lm_head.weight.dtype == torch.bfloat16


@distributed(world_size=2)
def test_the_snippets_of_the_plain_loop_train_save_and_write(tmp_path):
    os.chdir(tmp_path)
    names = reader()
    before = names["model"].lm_head.weight.detach().clone()
    loop, write = snippets()[2:]
    exec(loop, names)
    assert names["epoch"] == 1 and (tmp_path / "out/model.safetensors").is_file()
    after = names["model"].lm_head.weight.detach().float()
    assert 0 < (after - before).abs().max() < 0.1, (after - before).abs().max()
    exec(write, names)
    assert not names["model"].lm_head.weight.any()


def test_the_models_of_the_examples_are_at_the_readers_hand():
    """Names on the hub whose architecture the tests know, or a folder that the demo makes."""
    root = DOCS.parent
    text = "\n".join(page.read_text() for page in (root / "README.md", *DOCS.glob("*.md")))
    known = set(yaml.safe_load((root / "tests/data/models.yaml").read_text()))
    known |= {yaml.safe_load((root / "recipes/demo/sft/config_demo.yaml").read_text())["model_name_or_path"], "MODEL"}
    named = set(re.findall(r"hf-zero plan (\w[\w./-]*)|compare_stages\.py --model ([\w./-]+)", text))
    assert len(named) > 2 and {name for pair in named for name in pair if name} - known == set()
