"""`zero_report` writes one page that opens anywhere, whose numbers are those of the run."""

import json
import math
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm.topology import Topology
from hf_zero.core.engine import engine_of
from hf_zero.core.placement import STAGES, Extent
from hf_zero.errors import ZeroConfigError
from hf_zero.integrations import run_report
from hf_zero.integrations.callbacks import ZeroMemoryCallback
from hf_zero.integrations.run_report import Bins, ZeroRunReport, placement
from hf_zero.planning.costs import MachineError
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.trainers import make_trainer


SECTIONS = ["Who keeps what", "Memory", "Communication", "Time", "Timeline of a step", "Loss and skipped steps"]
SECTIONS += ["Configuration"]


class Page(HTMLParser):
    """What a browser would see of a page: headings, drawings, texts, and what it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.headings, self.drawings, self.texts, self.fetched, self.open, self.ids = [], [], [], [], [], []
        self.data = ""
        self.feed(text)
        assert self.open == [], "elements are closed"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.fetched += [attributes[name] for name in ("src", "href", "xlink:href") if name in attributes]
        if tag == "svg":
            self.drawings.append(attributes["id"])

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "br"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.data += data
        elif self.open and self.open[-1] == "h2":
            self.headings.append(data)
        else:
            self.texts.append(data.strip())


class _Poisoned:
    """Makes the second gradient that it sees infinite."""

    seen = 0

    def __call__(self, grad):
        self.seen += 1
        return grad * math.inf if self.seen == 2 else grad


@distributed(world_size=2)
def test_the_page_of_a_run_holds_its_numbers_and_needs_nothing_else(tmp_path):
    pytest.importorskip("matplotlib")
    model = zoo.build("llama")
    if dist.get_rank() == 1:
        model.lm_head.weight.register_hook(_Poisoned())
    certificate = {
        "holds": False,
        "model": "</script>",
        "ranks": 2,
        "verdicts": [{"promise": "losses", "verdict": "fails", "largest": 0.5, "why": "a fault"}],
    }
    (tmp_path / "certificate.json").write_text(json.dumps(certificate))
    page = {"zero_report": True, "zero_report_machine": "tests/data/two_cores.yaml"}
    trainer = make_trainer("llama", 3, tmp_path, model=model, bf16=True, logging_steps=2, **page)
    trainer.train()
    dist.barrier()
    if dist.get_rank():
        return
    page = Page((tmp_path / "report.html").read_text())
    assert page.headings == [*SECTIONS, "Parity certificate"]
    assert page.drawings == ["placement", "memory", "peak", "plan", "bytes", "time", "timeline", "loss"]
    assert len(set(page.ids)) == len(page.ids) and [link for link in page.fetched if not link.startswith("#")] == []
    shown = {"rank 0", "rank 1", "Memory of rank 0, at its peak", "zero_stage", "report", "losses", "fails"}
    assert shown <= set(page.texts)
    assert not list(tmp_path.glob("*.tmp"))

    facts, history = json.loads(page.data), trainer.state.log_history
    assert (facts["stage"], facts["ranks"], len(facts["steps"])) == (3, 2, 6)
    assert sum(step["sent"] for step in facts["steps"]) <= engine_of(trainer.model).comm.traffic.bytes_sent.total()
    logged = [entry for entry in history if "loss" in entry]
    assert facts["losses"] == [[entry["step"], entry["loss"]] for entry in logged]
    assert facts["skipped"] == [{"step": 2, "first_bad": "lm_head.weight"}]
    assert [line["step"] for line in facts["memory"]] == [1, 2, 3, 4, 5, 6]
    assert facts["memory"][-1]["categories"] == hf_zero.memory_report(trainer.model).categories
    assert {peak["rank"] for peak in facts["peaks"]} == {0, 1}
    assert all(peak["moment"] in ("forward", "backward", "the optimizer step") for peak in facts["peaks"])
    assert sum(facts["plan"]["predicted_peak_kinds"].values()) == facts["plan"]["predicted_peak"]
    assert sum(facts["plan"]["measured_kinds"].values()) == facts["plan"]["measured_resident"]
    timeline = facts["timeline"]
    assert [name for name, _ in timeline["parts"]] == ["forward", "backward", "optimizer"]
    assert {"computation", "gathers of ranks 0 to 1", "reductions of ranks 0 to 1"} == set(timeline["lanes"])
    busy = sum(stop - start for start, stop in timeline["lanes"]["computation"])
    assert 0 < timeline["computing"] <= busy * 1.01 <= timeline["seconds"] * 1.01
    traced = json.loads((tmp_path / "zero_memory" / "timeline_trace.json").read_text())["traceEvents"]
    assert len([event for event in traced if event["ph"] == "X"]) > len(timeline["lanes"]["computation"])
    # The same numbers go to TensorBoard and W&B with the logs.
    for name in ("zero/bytes_sent_per_step", "zero_seconds/stall", "zero_memory/optimizer states"):
        assert all(entry[name] > 0 for entry in logged[1:]), (name, logged)
    pairs = zip(facts["steps"][::2], facts["steps"][1::2], strict=True)
    assert [(a["sent"] + b["sent"]) / 2 for a, b in pairs] == [entry["zero/bytes_sent_per_step"] for entry in logged]


def test_where_matplotlib_is_missing_the_run_says_so_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(run_report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ZeroConfigError, match=r"pip install 'hf_zero\[plot\]'"):
        ZeroRunReport(hf_zero.ZeroConfig(), tmp_path)


def test_a_machine_that_nobody_knows_ends_the_run_before_it_begins(tmp_path):
    with pytest.raises(MachineError, match="did you mean 'h100'"):
        ZeroMemoryCallback(tmp_path, "h10")
    gpus = ZeroMemoryCallback(tmp_path, "h100")
    with pytest.raises(MachineError, match="has GPUs, and the ranks are on CPUs.*doctor --calibrate"):
        gpus.on_train_begin(SimpleNamespace(device=torch.device("cpu")), model=torch.nn.Linear(1, 1))


def test_many_steps_take_few_entries_and_keep_their_sums():
    bins = Bins(most=8)
    for step in range(1, 101):
        bins.add(step, {"sent": step, "skipped": int(step == 50)})
    entries = bins.to_list()
    assert len(entries) <= 8 and entries[-1]["step"] == 100
    assert sum(entry["steps"] for entry in entries) == 100
    assert sum(entry["sent"] for entry in entries) == 5050 and sum(entry.get("skipped", 0) for entry in entries) == 1
    assert [entry["step"] for entry in entries] == sorted(entry["step"] for entry in entries)


def _engine(stage, extent=Extent.SHARD, **sizes):
    return SimpleNamespace(
        placements=STAGES[stage].with_extent(extent), mesh=SimpleNamespace(topology=Topology(**sizes))
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_parts_of_all_ranks_make_one_copy_of_what_is_sharded(stage):
    for kind, parts in placement(_engine(stage, local=4)).items():
        whole = getattr(STAGES[stage], kind.removesuffix("s")).value != "sharded"
        assert sorted(parts) == ([(0.0, 1.0)] * 4 if whole else [(rank / 4, 1 / 4) for rank in range(4)]), kind


def test_nodes_keep_all_weights_and_replicas_all_state():
    found = placement(_engine(3, Extent.NODE, nodes=2, local=2))
    assert found["parameters"] == [(0.0, 0.5), (0.5, 0.5), (0.0, 0.5), (0.5, 0.5)]
    assert found["optimizer"] == [(0.0, 0.25), (0.5, 0.25), (0.25, 0.25), (0.75, 0.25)]
    assert placement(_engine(3, replicas=2, local=2))["optimizer"] == [(0.0, 0.5), (0.5, 0.5)] * 2
