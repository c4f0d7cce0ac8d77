"""`hf-zero plan` with offload: rows that the engine was run for, equal to the formulas, shown and never chosen."""

import contextlib
import functools
import io
import json
from collections import Counter
from pathlib import Path

import pytest
import transformers
import yaml

from benchmarks.zero_formulas import offloaded_bytes
from hf_zero import cli
from hf_zero.config import ZeroConfig
from hf_zero.core.placement import Place
from hf_zero.planning.homes import ELSEWHERE
from hf_zero.planning.meter import ACTIVATIONS, Peak
from hf_zero.planning.model import BatchShape, build
from hf_zero.planning.places import ON_DEVICE, Places, offloaded_places
from hf_zero.planning.plan import Request
from hf_zero.planning.trace import Footprint, Scenario, trace
from tests.support import zoo


pytestmark = pytest.mark.slow  # plans of whole models

HOST, DISK = Place.HOST, Place.DISK
SHORT = ["--no-gradient-checkpointing", "--seq-len", "16"]
PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
OPTIMIZER_ON_HOST = Places(optimizer=HOST)
ALL_ON_HOST = Places(optimizer=HOST, parameters=HOST)
ALL_ON_DISK = Places(optimizer=DISK, parameters=DISK)


@pytest.mark.parametrize(
    "stage, ranks, disk, expected",
    [
        (0, 8, True, []),  # nothing is sharded, nothing moves
        (1, 8, False, [(HOST, Place.DEVICE)]),
        (2, 8, True, [(HOST, Place.DEVICE), (DISK, Place.DEVICE)]),
        (3, 8, False, [(HOST, Place.DEVICE), (HOST, HOST)]),
        (3, 8, True, [(HOST, Place.DEVICE), (HOST, HOST), (DISK, Place.DEVICE), (DISK, HOST), (DISK, DISK)]),
        (3, 1, True, [(HOST, HOST), (DISK, HOST), (DISK, DISK)]),
    ],
)
def test_what_may_rest_where(stage, ranks, disk, expected):
    assert [(places.optimizer, places.parameters) for places in offloaded_places(stage, ranks, disk)] == expected


def test_the_peak_of_the_device_leaves_out_what_is_elsewhere():
    peak, device = Peak(), Peak([ELSEWHERE])
    for seen, live in ((1, {ACTIVATIONS: 70, ELSEWHERE: 10}), (2, {ACTIVATIONS: 40, ELSEWHERE: 50})):
        for each in (peak, device):
            each.record(seen, Counter(live))
    assert (peak.nbytes, device.nbytes) == (90, 70)


def test_a_tensor_whose_owner_comes_late_does_not_hide_a_moment_of_before():
    device = Peak([ELSEWHERE])
    device.record(1, Counter({ACTIVATIONS: 70}))
    device.record(2, Counter({ACTIVATIONS: 90}))  # 40 of it are a gradient that nobody has taken yet
    device.relabel(2, 40, ELSEWHERE)
    assert device.nbytes == 70


# -- a real model ---------------------------------------------------------------------------------------------------


CONFIG = transformers.LlamaConfig(
    **{
        **zoo._DECODER,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
    },
    architectures=["LlamaForCausalLM"],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(path)
    return path


def traced(places, *, stage=3, ranks=4, accumulation=1, **config):
    config = ZeroConfig(
        zero_stage=stage, mixed_precision="bf16", stage3_param_persistence_threshold=0, **places.options(), **config
    )
    batch = BatchShape(rows=1, length=8)
    model = build(CONFIG)
    footprint = trace(model, Scenario(config=config, world_size=ranks, batch=batch, accumulation=accumulation))
    return footprint, sum(param.numel() for param in model.parameters())


# Buffers: four of 16 MiB for what crosses the bus, and for each kind on disk four of its largest shelf.
BUS = 4 * 16 * 2**20


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_inputs_of_checkpoints_are_planned_elsewhere(device):
    rows, length = 4, 512
    config = ZeroConfig(zero_stage=2, mixed_precision="bf16")
    away = config.replace(offload_activations_device=device, offload_activations_nvme_path="/tmp")
    found = {}
    for name, each in (("here", config), ("away", away)):
        scenario = Scenario(config=each, world_size=2, batch=BatchShape(rows=rows, length=length), checkpointing=True)
        found[name] = trace(build(CONFIG), scenario)
    kept = CONFIG.num_hidden_layers * rows * length * CONFIG.hidden_size * 2
    resting = found["away"].host if device == "cpu" else found["away"].disk
    assert resting["activations"] == kept
    assert found["here"].activations - found["away"].activations == pytest.approx(kept, rel=0.05)
    assert found["away"].pcie_bytes == 2 * kept, "down and up"
    assert found["away"].disk_traffic == (0 if device == "cpu" else pytest.approx(2 * kept, rel=0.5))
    plain = Scenario(config=away, world_size=2, batch=BatchShape(rows=rows, length=length))
    assert trace(build(CONFIG), plain).activations > found["here"].activations, "there is nothing to be taken"


@pytest.mark.parametrize("stage, ranks", [(1, 4), (2, 1), (2, 4), (3, 1), (3, 4)])
def test_traced_bytes_follow_the_formula(stage, ranks):
    on_device, numel = traced(ON_DEVICE, stage=stage, ranks=ranks)
    assert not on_device.host and not on_device.disk and not on_device.pcie_bytes and not on_device.disk_traffic
    for places in offloaded_places(stage, ranks, disk=True):
        found, _ = traced(places, stage=stage, ranks=ranks)
        wanted = offloaded_bytes(numel, ranks, stage, places)
        on_host = found.host_bytes - found.host["buffers"]
        near = functools.partial(pytest.approx, rel=0.01, abs=4096)
        assert found.resident_bytes == near(wanted[Place.DEVICE]), places
        # Masters of fewer than 64 Ki elements stay in host memory, whatever is asked for.
        assert on_host + found.disk_bytes == near(wanted[HOST] + wanted[DISK]), places
        assert 0.9 * wanted[DISK] <= found.disk_bytes <= wanted[DISK] * 1.001, places
        assert found.host["buffers"] >= BUS and (found.disk or found.host["buffers"] == BUS)
        assert found.resident_bytes < found.peak_bytes < on_device.peak_bytes
        # Sums of gradients go down in fp32, one rank's own in bf16. Weights go up in bf16: new ones once, or a slice
        # for each gather.
        down, gathers = (2 if ranks == 1 else 4), (1 if places.parameters is Place.DEVICE else 2)
        assert (down + 2) * numel / ranks * 0.999 <= found.pcie_bytes <= (down + 2 * gathers) * numel / ranks * 1.001
        # Masters and states are read and written; weights are written once, and read once, in backward.
        moved = (24 * (places.optimizer is DISK) + 4 * (places.parameters is DISK)) * numel / ranks
        still_there = min(moved / 2, 2 * (found.host["buffers"] - BUS))  # read in neither pass, as a buffer has it
        assert 0.85 * (moved - still_there) <= found.disk_traffic <= moved, places
        for kind in ("all_gather", "reduce_scatter"):
            assert found.sent.get(kind) == on_device.sent.get(kind), "what is sent between ranks stays as it is"


def test_gradients_go_down_as_often_as_they_are_reduced():
    for stage, config, times in ((1, {}, 1), (2, {}, 3), (3, {"no_sync": "local"}, 1)):
        found, numel = traced(OPTIMIZER_ON_HOST, stage=stage, accumulation=3, **config)
        assert found.pcie_bytes == pytest.approx((4 * times + 2) * numel / 4, rel=0.01), stage
    # Sums are made in fp32 on the device, whatever is sent, and are not rounded on their way down.
    found, numel = traced(OPTIMIZER_ON_HOST, communication_data_type="bf16")
    assert found.pcie_bytes == pytest.approx(6 * numel / 4, rel=0.01)


def test_what_is_on_its_way_down_takes_memory_of_the_device():
    found, numel = traced(OPTIMIZER_ON_HOST, stage=2)
    assert 0 < found.peak["transfers"] <= BUS and "gradients" not in found.peak


@pytest.mark.parametrize(
    "billions, ranks, stage, places, device, host, disk",
    [
        (13, 1, 2, OPTIMIZER_ON_HOST, 26, 208, 0),  # the size that is known to train on one GPU of 32 GB
        (70, 8, 3, OPTIMIZER_ON_HOST, 17.5, 140, 0),
        (70, 8, 3, ALL_ON_HOST, 0, 157.5, 0),
        (1000, 16, 3, ALL_ON_DISK, 0, 250, 875),
    ],
)
def test_known_cases(billions, ranks, stage, places, device, host, disk):
    held = offloaded_bytes(billions, ranks, stage, places)
    assert list(held.values()) == [device, host, disk]
    on_node = [f"{min(ranks, 8) * count:,g}" for count in (host, disk)]
    row = [line for line in PAGE.splitlines() if line.startswith(f"| {billions:,}B | {ranks} | {stage} ")]
    assert any(line.endswith(f" | {device:,g} | {' | '.join(on_node)} |") for line in row), row


# -- the command ----------------------------------------------------------------------------------------------------


def plan(capsys, *words):
    status = cli.main(["plan", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def plan_json(capsys, *words):
    status, out, err = plan(capsys, *words, "--json", *SHORT)
    assert status == 0, err
    return json.loads(out)


def test_offload_is_shown_on_request_only(folder, capsys):
    rows = plan_json(capsys, folder)["rows"]
    assert [row["stage"] for row in rows] == [0, 1, 2, 3] and not any(row["offloads"] for row in rows)
    host = plan_json(capsys, folder, "--host-memory", "1TB")["rows"]
    assert {row["optimizer_home"] for row in host if row["offloads"]} == {"host"} and len(host) == 4 + 4
    both = plan_json(capsys, folder, "--nvme", "1TB")["rows"]
    assert {row["optimizer_home"] for row in both if row["offloads"]} == {"host", "disk"}
    assert len(both) == 4 + 2 + 2 + 5


def test_a_node_holds_the_state_of_its_ranks(folder, capsys):
    result = plan_json(capsys, folder, "--gpus", "2", "--nodes", "4", "--nvme", "1TB")
    rows = {(row["stage"], row["optimizer_home"], row["parameter_home"]): row for row in result["rows"]}
    numel = result["parameters"]
    # Masters of fewer than 64 Ki elements stay in memory: of so small a model on 8 ranks, many.
    assert 0.5 < rows[3, "disk", "disk"]["disk_bytes_per_node"] / (2 * 14 * numel / 8) <= 1
    gradients = rows[3, "host", "host"]["host"]["gradients"]
    assert gradients == pytest.approx(4 * numel / 8, rel=0.01)
    assert rows[3, "host", "device"]["host_bytes_per_node"] == pytest.approx(2 * (16 * numel / 8 + BUS), rel=0.01)
    assert rows[3, "host", "device"]["pcie_bytes_per_step"] == pytest.approx(6 * numel / 8, rel=0.01)


@pytest.mark.parametrize(
    "limits, fits",
    [
        ({"gpu_memory": 100}, True),  # 90 of 100 bytes
        ({"gpu_memory": 99}, False),
        ({"gpu_memory": 100, "host_memory": 445, "nvme": 60}, True),  # two ranks: 400 bytes, 60 bytes
        ({"gpu_memory": 100, "host_memory": 444, "nvme": 60}, False),
        ({"gpu_memory": 100, "host_memory": 445, "nvme": 59}, False),
    ],
)
def test_every_limit_counts(limits, fits):
    request = Request(
        name="m",
        config=ZeroConfig(),
        gpus=2,
        nodes=4,
        batch=BatchShape(rows=1, length=1),
        accumulation=1,
        optimizer="adamw",
        backend="nccl",
        **limits,
    )
    kept = {"host": {"gradients": 200}, "disk": {"master weights": 30}}
    counts = dict.fromkeys(["largest_unit", "gradients", "activations", "logits"], 0)
    found = Footprint(resident={}, peak={"activations": 90}, sent={}, calls={}, **kept, **counts)
    assert request.fits(found) is fits


@pytest.fixture(scope="module")
def tight(folder):
    """Words for a GPU that is too small for every stage, and large enough with the optimizer state elsewhere."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(["plan", str(folder), "--gpus", "2", "--offload", "--json", *SHORT])
    rows = json.loads(out.getvalue())["rows"]
    least = min(row["peak_bytes"] for row in rows if not row["offloads"])
    moved = min(row["peak_bytes"] for row in rows if row["optimizer_home"] == "host")
    assert moved < 0.8 * least
    return ["--gpu-memory", f"{int((moved + least) / 2 / 0.9)}B"]


def test_what_only_offload_would_fit_is_said_and_not_recommended(folder, tight, capsys):
    result = plan_json(capsys, folder, *tight, "--gpus", "2")
    assert result["recommended"] is None and not any(row["offloads"] for row in result["rows"])
    reason = result["reason"]
    assert "nothing fits: stage 3 needs the least" in reason
    assert "With the optimizer state in host memory, stage" in reason, reason
    assert reason.endswith("offload has not been run on a GPU yet, see docs/offload.md"), reason
    number = int(reason.split("more GPUs (")[1].split()[0])
    assert number > 2 and plan_json(capsys, folder, *tight, "--gpus", number)["recommended"] is not None


def test_it_is_never_written(folder, tight, tmp_path, capsys):
    target = tmp_path / "zero.yaml"
    status, _, err = plan(capsys, folder, *SHORT, *tight, "--gpus", "2", "--offload", "--write", target)
    assert status == 2 and "--write: nothing fits" in err and "not been run on a GPU" in err and not target.exists()


def test_what_would_not_fit_either_is_not_offered(folder, tight, capsys):
    none = plan_json(capsys, folder, *tight, "--gpus", "2", "--host-memory", "1kB")
    assert none["recommended"] is None and "offload" not in none["reason"], none["reason"]
    hopeless = plan_json(capsys, folder, "--gpu-memory", "10kB", "--gpus", "2")["reason"]
    assert "more GPUs" not in hopeless and "a shorter sequence" in hopeless and "offload" not in hopeless


def test_a_recommended_stage_is_one_that_runs(folder, tmp_path, capsys):
    target = tmp_path / "zero.yaml"
    status, out, _ = plan(capsys, folder, *SHORT, "--offload", "--gpus", "2", "--write", target)
    assert status == 0 and "Recommended: stage 1" in out, out
    heading = out.index("Offload, predicted and not run on a GPU yet")
    assert out.index("Recommended") < heading < out.index("would fit", heading) < out.index("host memory", heading)
    assert "offload" not in target.read_text()
    assert yaml.safe_load(target.read_text())["deepspeed_config"]["zero_stage"] == 1


@pytest.mark.parametrize(
    "words, says",
    [
        (["--host-memory", "lots"], "--host-memory lots: write a size such as 80GB"),
        (["--host-memory", "0GB"], "--host-memory 0GB: write a size"),
        (["--nvme", "1e999GB"], "--nvme 1e999GB: write a size"),
        (["--nvme", "2 parsecs"], "--nvme 2 parsecs: write a size"),
        (["--nvme", ""], "--nvme : write a size"),
        (["--cpu", "--host-memory", "64GB"], "is in host memory already"),
        (["--cpu", "--offload"], "is in host memory already"),
    ],
)
def test_mistakes_are_told_in_one_line(words, says, folder, capsys):
    status, _, err = plan(capsys, folder, *words)
    assert status == 2 and says in err and len(err.splitlines()) == 1, err
