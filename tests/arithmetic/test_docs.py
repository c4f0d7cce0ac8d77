"""README and the pages under docs/ keep up with the code: files, layers, stages, links, and code that runs."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from hf_zero.core.placement import STAGES
from tests.arithmetic.test_layers import LAYERS
from tests.support import zoo
from tests.support.harness import distributed


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
