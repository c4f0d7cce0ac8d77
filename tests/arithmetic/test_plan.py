"""`hf-zero plan`: its table, files and errors, and the choice that it makes."""

import contextlib
import json
from xml.etree import ElementTree

import psutil
import pytest
import transformers
import yaml

from hf_zero import cli
from hf_zero.config import ZeroConfig
from hf_zero.planning import units
from hf_zero.planning.model import BatchShape, PlanError, build, read_config
from hf_zero.planning.plan import Request, Row, make_plan, recommend
from hf_zero.planning.trace import Footprint, Scenario, trace
from tests.support import zoo
from tests.support.tensor_models import needs_shared_layers


PLAIN = "--no-gradient-checkpointing"  # half the rows, where checkpointing plays no part


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A local model folder with nothing but a configuration."""
    path = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        **{**zoo._DECODER, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 4096},
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(path)
    return path


def plan(capsys, *words):
    status = cli.main(["plan", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def plan_json(capsys, *words):
    status, out, err = plan(capsys, *words, "--json")
    assert status == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_the_table_and_the_picture_have_a_row_for_every_stage(folder, tmp_path, capsys):
    status, out, _ = plan(capsys, folder, "--seq-len", "64", "--gpus", "2", "--plot", tmp_path / "plan.svg")
    assert status == 0
    for stage in range(4):
        assert f"\n{stage} " in out and f"\n{stage} + checkpointing" in out, out
    assert "Recommended: stage 1: peak" in out, out
    texts = [each.text for each in ElementTree.parse(tmp_path / "plan.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert {f"stage {stage} + checkpointing" for stage in range(4)} < set(texts) and texts.count("optimizer") == 1
    # 80 GB beside bars of megabytes would leave nothing to see of them.
    assert "MB at the peak (of 80,000 MB)" in texts and "memory" not in texts


def test_memory_is_drawn_where_the_bars_are_seen_beside_it():
    run_charts = pytest.importorskip("hf_zero.tools.run_charts")
    assert ">memory<" in run_charts.stages({"stage 1": {"params": 2e9}}, 4 * 10**9, "a model")


def test_state_bytes_follow_the_formulas(folder, capsys):
    result = plan_json(capsys, folder, "--gpus", "4", "--nodes", "2", "--seq-len", "16")
    ranks, numel = 8, result["parameters"]
    assert result["world_size"] == ranks
    per_parameter = {0: 2 + 12, 1: 2 + 12 / ranks, 2: 2 + 12 / ranks, 3: 12 / ranks}
    for row in result["rows"]:
        # Every parameter and slice starts on 256 bytes, which a model this small feels.
        assert row["resident_bytes"] == pytest.approx(per_parameter[row["stage"]] * numel, rel=0.05)
        assert row["peak_bytes"] == sum(row["peak"].values()) >= row["resident_bytes"]
        assert sum(row["sent"].values()) == row["sent_bytes_per_step"]


@needs_shared_layers
def test_ranks_that_share_layers_or_sequences_are_planned_as_they_are_asked_for(folder, capsys, tmp_path):
    base = (folder, "--gpus", "4", "--seq-len", "64", PLAIN)
    whole = plan_json(capsys, *base)["rows"]
    layers = plan_json(capsys, *base, "--tp", "2", "--write", tmp_path / "tp.yaml")
    sequences = plan_json(capsys, *base, "--sp", "2")["rows"]
    for one, part, tokens in zip(whole, layers["rows"], sequences, strict=True):
        # Whole kinds of state are halved; what is shared out is, over half as many ranks.
        halved = 0.5 * one["resident"].get("parameters", 0) + sum(
            one["resident"].get(kind, 0) for kind in ("master weights", "optimizer states")
        ) * (1.0 if one["stage"] else 0.5)
        assert part["resident_bytes"] == pytest.approx(halved, rel=0.05)
        assert part["sent"]["tensor parallelism"] > 0 and part["activation_bytes"] < one["activation_bytes"]
        assert tokens["resident_bytes"] == pytest.approx(one["resident_bytes"], rel=0.01)
        assert tokens["sent"]["sequences"] > 0
        assert tokens["activation_bytes"] == pytest.approx(one["activation_bytes"] / 2, rel=0.15)
    written = ZeroConfig.from_any(str(tmp_path / "tp.yaml"))
    assert written.tp_size == 2 and layers["tp_size"] == 2
    _, out, _ = plan(capsys, *base, "--tp", "2")
    assert "4 ranks, 2 of which share layers" in out and "of it for layers" in out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--gpus", "2", "--tp", "4"), "tp_size is 4, and a node has 2 rank(s)"),
        (("--gpus", "2", "--sp", "4"), "sp_size is 4, which does not divide the 2 ranks"),
        (("--tp", "2", "--sp", "2"), "sp_size"),
    ],
)
def test_ranks_that_cannot_share_are_refused(folder, capsys, words, what):
    status, _, err = plan(capsys, folder, *words)
    assert status == 2 and what in err, err


def test_ring_attention_is_not_planned(folder, capsys, tmp_path):
    file = tmp_path / "cp.yaml"
    file.write_text("distributed_type: DEEPSPEED\nparallelism_config:\n  parallelism_config_cp_size: 4\n")
    status, _, err = plan(capsys, folder, "--config", file)
    assert status == 2 and "Plan with --sp 4" in err, err


@pytest.mark.slow
def test_checkpointing_keeps_fewer_activations(folder, capsys):
    rows = plan_json(capsys, folder, "--seq-len", "2048")["rows"]
    kept = {(row["stage"], row["gradient_checkpointing"]): row["activation_bytes"] for row in rows}
    for stage in range(4):
        assert kept[stage, True] < 0.5 * kept[stage, False]
    only = plan_json(capsys, folder, "--gradient-checkpointing")["rows"]
    assert [row["gradient_checkpointing"] for row in only] == [True] * 4


@pytest.mark.slow
def test_activations_grow_with_tokens_not_with_their_square(folder, capsys):
    short, long = (
        plan_json(capsys, folder, "--seq-len", length, PLAIN)["rows"][0]["activation_bytes"] for length in (1024, 2048)
    )
    assert long == pytest.approx(2 * short, rel=0.01)


@pytest.mark.slow
def test_accumulation_costs_wire_at_stage_2_only(folder, capsys):
    one = plan_json(capsys, folder, PLAIN)["rows"]
    three = plan_json(capsys, folder, PLAIN, "--gradient-accumulation-steps", "3")["rows"]
    for row, more in zip(one[:3], three[:3], strict=True):
        ratio = more["sent"].get("reduce_scatter", 1) / row["sent"].get("reduce_scatter", 1)
        assert ratio == (3 if row["stage"] == 2 else 1), row["stage"]


@pytest.mark.slow
def test_lora_trains_adapters_only(folder, capsys):
    result = plan_json(capsys, folder, "--lora", "4", "--lora-targets", "q_proj", "v_proj")
    assert 0 < result["trained"] < 0.2 * result["parameters"]
    by_stage = {row["stage"]: row for row in result["rows"] if not row["gradient_checkpointing"]}
    frozen = result["parameters"] - result["trained"]
    assert by_stage[3]["resident"]["parameters"] == pytest.approx(2 * frozen / 8, rel=0.1)


def test_one_process_has_nothing_to_shard(folder, capsys):
    result = plan_json(capsys, folder, "--gpus", "1", PLAIN)
    assert [row["stage"] for row in result["rows"]] == [0]
    assert result["rows"][0]["sent_bytes_per_step"] == 0
    assert "nothing to shard" in result["reason"]


def test_a_small_model_is_shown_in_small_units(folder, capsys):
    _, out, _ = plan(capsys, folder, "--gpus", "2", "--seq-len", "64", PLAIN)
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert len(rows) == 4 and "MB (1,000,000 bytes) of each rank" in out, out
    for row in rows:
        peak, at_rest, sent = row[-4:-1]
        assert 0.1 < float(peak) < 1000 and float(at_rest) >= 0.1 and float(sent) >= 0.1, row
        assert "0.0" not in row and "0.0000" not in row
    assert " B parameters" not in out and " of 80.0 GB" in out


@pytest.mark.slow
def test_cpu_ranks_share_this_machines_memory(folder, capsys):
    share = psutil.virtual_memory().total // 2
    words = (folder, "--gpus", "2", "--seq-len", "64", "--cpu", PLAIN)
    assert plan_json(capsys, *words)["gpu_memory"] == share
    _, out, _ = plan(capsys, *words)
    assert f"10% of {share / 1e9:.1f} GB left free (this machine's memory, shared by its ranks)" in out, out
    assert "80" not in out.split("Fits:")[1]
    assert plan_json(capsys, *words, "--gpu-memory", "3GB")["gpu_memory"] == 3 * 10**9


@pytest.mark.parametrize("until_the_end", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_what_it_works_on_is_told(folder, until_the_end):
    request = Request(
        name="a",
        config=ZeroConfig(mixed_precision="bf16"),
        gpus=2,
        nodes=1,
        gpu_memory=6 * 10**5,
        batch=BatchShape(rows=1, length=16),
        accumulation=1,
        optimizer="adamw",
        backend="nccl",
    )
    told = []

    def tell(*what):
        told.append(what)
        if what[0].startswith("nothing fits; ") and not until_the_end:
            raise LookupError

    with contextlib.nullcontext() if until_the_end else pytest.raises(LookupError):
        make_plan(build(read_config(str(folder))), request, tell)
    assert told[:2] == [("training stage 0 without values", 1, 8), ("training stage 1 without values", 2, 8)]
    assert told[7] == ("training stage 3 with checkpointing without values", 8, 8)
    assert told[8] == ("nothing fits; training stage 1 in tiles without values",)
    if until_the_end:
        tiled = [one for one in told if "tiles" in one[0]]
        assert told[8 + len(tiled)] == ("training stage 1 with offload without values", 1, 8)
        assert told[16 + len(tiled)] == ("nothing fits; training stage 3 on 4 GPUs without values",)


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(46.04e9, "46.0 GB"), (147e9, "147 GB"), (8.7e6, "8.7 MB"), (999e6, "999 MB"), (1500, "1.5 kB"), (0, "0 B")],
)
def test_sizes_have_a_unit_that_fits_them(nbytes, shown):
    assert units.size(nbytes) == shown


def test_counts_and_cells():
    assert [units.count(n) for n in (8_030_000_000, 12_345_678, 631_488)] == ["8.03 B", "12.3 M", "631,488"]
    assert [units.cell(n, "GB") for n in (0, 13_000, 1.06e9)] == ["-", "<0.1", "1.1"]


@pytest.mark.slow
def test_what_it_writes_is_a_configuration(folder, tmp_path, capsys):
    target = tmp_path / "zero.yaml"
    words = ("--nodes", "2", "--gpus", "4", PLAIN)
    status, *_ = plan(capsys, folder, *words, "--write", target)
    assert status == 0
    config, content = ZeroConfig.from_any(str(target)), yaml.safe_load(target.read_text())
    assert (config.zero_stage, config.mixed_precision) == (1, "bf16")
    assert (content["num_processes"], content["num_machines"]) == (8, 2)
    again = plan_json(capsys, folder, "--config", target, PLAIN)
    assert again["world_size"] == 8


def test_a_configured_stage_that_does_not_fit_is_named(folder, tmp_path, capsys):
    config = tmp_path / "zero.yaml"
    config.write_text("deepspeed_config:\n  zero_stage: 3\nmixed_precision: fp16\nnum_processes: 4\n")
    words = ("--gpu-memory", "10kB", PLAIN)
    status, out, _ = plan(capsys, folder, "--config", config, *words)
    assert status == 0
    assert "fp16" in out and "1 x 4 ranks" in out, out
    assert "The configured stage 3 does not fit." in out and "Nothing fits" in out, out


@pytest.mark.parametrize(
    "words, says",
    [
        (["no/such/folder"], "'no/such/folder' does not exist"),
        (["{tmp}"], "holds no config.json"),
        (["{tmp}/odd.json"], "model_type 'martian' is unknown to transformers"),
        (["{tmp}/broken.json"], "is not a readable JSON file"),
        (["{folder}", "--gpu-memory", "lots"], "write a size such as 80GB"),
        (["{folder}", "--plot", "plan.png"], "--plot writes SVG: name the file .svg"),
        (["{folder}", "--plot", "plan.svg", "--time"], "leave it or them out"),
        (["{folder}", "--seq-len", "100000"], "takes at most 4096 tokens"),
        (["{folder}", "--config", "{tmp}/none.yaml"], "there is no such file"),
        (["{folder}", "--gpu-memory", "1kB", PLAIN, "--write", "{tmp}/zero.yaml"], "nothing fits"),
        (["{folder}", PLAIN, "--write", "{tmp}/none/zero.yaml"], "No such file or directory"),
        (["{folder}", PLAIN, "--measure", "{tmp}/none.py"], "there is no script"),
        (["{folder}", "--lora", "4", "--lora-targets", "nothing_like_it"], "LoRA: "),
    ],
)
def test_mistakes_are_told_in_one_line(words, says, folder, tmp_path, capsys):
    (tmp_path / "odd.json").write_text('{"model_type": "martian"}')
    (tmp_path / "broken.json").write_text("{")
    status, _, err = plan(capsys, *(word.format(tmp=tmp_path, folder=folder) for word in words))
    assert status == 2
    lines = [line for line in err.splitlines() if "without values" not in line]  # what it was at
    assert says in err and len(lines) == 1, err


def test_a_hub_name_without_a_network(monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, _, err = plan(capsys, "someone/some-model-that-nobody-has")
    assert status == 2
    assert "could not be read from the hub" in err and len(err.splitlines()) == 1, err


QUICK = ("llama", "t5", "mixtral")  # a decoder, an encoder with a decoder, experts


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in zoo.NAMES]
)
def test_every_family_can_be_traced(name):
    model_class, config_class, settings = zoo._MODELS[name]
    config = config_class(**settings)
    config.architectures = [model_class.__name__]
    model = build(config)
    before = {key: (value.shape, value.dtype, type(value)) for key, value in model.named_parameters()}
    scenario = Scenario(
        config=ZeroConfig(zero_stage=3, mixed_precision="bf16"),
        world_size=4,
        batch=BatchShape(rows=zoo.ROWS, length=zoo.LENGTH),
        checkpointing=True,
    )
    footprint = trace(model, scenario)
    assert footprint.peak_bytes > footprint.resident_bytes > 0
    after = {key: (value.shape, value.dtype, type(value)) for key, value in model.named_parameters()}
    assert after == before, "the model is not what it was"


def test_an_architecture_that_needs_values_is_refused():
    model = build(transformers.LlamaConfig(**zoo._DECODER))
    model.register_forward_pre_hook(lambda module, args: [1, 2][model.lm_head.weight.sum().int().tolist()])
    scenario = Scenario(config=ZeroConfig(zero_stage=3), world_size=2, batch=BatchShape(rows=1, length=4))
    with pytest.raises(PlanError, match="cannot be traced without values"):
        trace(model, scenario)


def test_read_config_takes_a_file(folder):
    assert read_config(str(folder / "config.json")).num_hidden_layers == 2


def rows(*peaks, checkpointing=False, sent=(50, 40, 40, 60)):
    made = []
    for stage, peak in enumerate(peaks):
        footprint = Footprint(
            resident={"parameters": peak // 2},
            peak={"parameters": peak},
            sent={"all_gather": sent[stage]},
            calls={},
            largest_unit=1,
            gradients=0,
            activations=1,
            logits=1,
        )
        made.append(Row(stage=stage, checkpointing=checkpointing, footprint=footprint, fits=peak <= 72))
    return made


@pytest.mark.parametrize(
    "found, stage, checkpointing, words",
    [
        (rows(60, 50, 45, 30), 1, False, "the lowest stage that fits, and stage 3 would send 1.5 times as much"),
        (rows(90, 80, 70, 30), 2, False, "the lowest stage that fits"),
        (rows(95, 90, 85, 70), 3, False, "the lower stages do not fit"),
        (rows(99, 98, 97, 96) + rows(80, 70, 60, 50, checkpointing=True), 1, True, "only with gradient checkpointing"),
        (rows(99, 98, 97, 96), None, None, "nothing fits: stage 3 needs the least"),
    ],
)
def test_the_recommendation(found, stage, checkpointing, words):
    request = Request(
        name="m",
        config=ZeroConfig(),
        gpus=8,
        nodes=1,
        gpu_memory=80,
        batch=BatchShape(rows=1, length=1),
        accumulation=1,
        optimizer="adamw",
        backend="nccl",
    )
    best, reason = recommend(found, request)
    assert (best and best.stage, best and best.checkpointing) == (stage, checkpointing)
    assert words in reason, reason


_SCRIPT = """
import sys

import transformers

from hf_zero import ZeroTrainer, ZeroTrainingArguments


model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(sys.argv[1]))
rows = list({"input_ids": list(range(32)), "labels": list(range(32))} for _ in range(12))
arguments = ZeroTrainingArguments(output_dir=sys.argv[2], max_steps=3, report_to=[], save_strategy="no")
ZeroTrainer(model=model, args=arguments, train_dataset=rows).train()
"""


@pytest.mark.slow
@pytest.mark.exhaustive  # tests/integration/test_plan_measured.py compares runs with their plans without a launcher
def test_a_script_is_measured(folder, tmp_path, capsys):
    script, config = tmp_path / "train.py", tmp_path / "zero3.yaml"
    script.write_text(_SCRIPT)
    config.write_text(
        "deepspeed_config:\n  zero_stage: 3\ndistributed_type: DEEPSPEED\nnum_processes: 2\nuse_cpu: true\n"
    )
    words = ["--config", config, "--cpu", "--dtype", "fp32", "--measure", script, folder, tmp_path / "out"]
    found = plan_json_with(capsys, folder, words)["measured"]
    assert (found["stage"], found["world_size"]) == (3, 2)
    assert found["measured_resident"] == pytest.approx(found["predicted_resident"], rel=0.01)
    assert found["measured_peak"] == pytest.approx(found["predicted_peak"], rel=0.10)


def plan_json_with(capsys, folder, words):
    status, out, err = plan(capsys, folder, "--json", *words)
    assert status == 0, err
    return json.loads(out)
