"""`hf-zero plan` with offload: rows by home with hand-computed bytes, marked as predictions and never chosen."""

import contextlib
import io
import json
from collections import Counter
from pathlib import Path

import pytest
import transformers
import yaml

from hf_zero import cli
from hf_zero.config import ZeroConfig
from hf_zero.planning.formulas import offloaded_bytes
from hf_zero.planning.homes import Home, Homes, offloaded_homes
from hf_zero.planning.meter import ACTIVATIONS, Peak
from hf_zero.planning.model import BatchShape, build
from hf_zero.planning.offload import PIECE, offload
from hf_zero.planning.plan import Request
from hf_zero.planning.trace import Footprint, Scenario, trace
from tests.support import zoo


HOST, DISK = Home.HOST, Home.DISK
SHORT = ["--no-gradient-checkpointing", "--seq-len", "16"]
OPTIMIZER_ON_HOST = Homes(optimizer=HOST)
ALL_ON_HOST = Homes(optimizer=HOST, parameters=HOST)
PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
ALL_ON_DISK = Homes(optimizer=DISK, parameters=DISK)


@pytest.mark.parametrize(
    "stage, ranks, disk, expected",
    [
        (0, 8, True, []),  # nothing is sharded, nothing moves
        (1, 8, False, [(HOST, Home.DEVICE)]),
        (2, 8, True, [(HOST, Home.DEVICE), (DISK, Home.DEVICE)]),
        (3, 8, False, [(HOST, Home.DEVICE), (HOST, HOST)]),
        (3, 8, True, [(HOST, Home.DEVICE), (HOST, HOST), (DISK, Home.DEVICE), (DISK, HOST), (DISK, DISK)]),
        (3, 1, True, [(HOST, HOST), (DISK, HOST), (DISK, DISK)]),
    ],
)
def test_what_may_rest_where(stage, ranks, disk, expected):
    assert [(homes.optimizer, homes.parameters) for homes in offloaded_homes(stage, ranks, disk)] == expected


def footprint(**changes):
    """1000 trained and 400 frozen parameters in bf16 on 4 ranks at stage 3, each gathered twice but the last 200."""
    values = {
        "resident": {"master weights": 1000, "optimizer states": 2000, "parameters": 200},
        "peak": {"activations": 5000, "gradients": 1000, "master weights": 1000, "optimizer states": 2000},
        "peak_without_optimizer": {"activations": 5600, "parameters": 200},
        "sent": {"all_gather": 3 * (2 * 2 * 1400 - 2 * 200) // 4, "reduce_scatter": 3000},
        "calls": {},
        "largest_unit": 600,
        "gradients": 1000,
        "activations": 1,
        "logits": 1,
        "trained_slices": 500,
        "frozen_slices": 200,
    }
    return Footprint(**{**values, **changes})


def moved(homes, traced=None, stage=3, ranks=4, accumulation=1, **config):
    config = ZeroConfig(zero_stage=stage, mixed_precision="bf16", **config)
    return offload(traced or footprint(), homes, stage=stage, ranks=ranks, config=config, accumulation=accumulation)


def test_the_optimizer_on_the_host():
    found = moved(OPTIMIZER_ON_HOST)
    # 12 / N of state and 4 / N of gradients leave the device, 2 / N of weights come to rest there.
    assert found.resident == {"parameters": 200 + 500}
    assert found.host == {"master weights": 1000, "optimizer states": 2000, "gradients": 1000, "buffers": 2000}
    assert found.disk == {} and found.disk_traffic == 0
    # The worst moment of what stays, two pieces of the gradient on their way, and the slice.
    assert found.peak == {"activations": 5600, "parameters": 700, "transfers": 2000}
    assert found.pcie_bytes == 1000 + 500  # fp32 gradients down, 16-bit weights up
    assert found.sent == footprint().sent, "what is sent between ranks stays as it is"


def test_the_weights_on_the_host_too():
    found = moved(ALL_ON_HOST)
    assert found.resident == {} and found.host["parameters"] == 700
    assert found.peak == {"activations": 5600, "transfers": 2000}
    assert found.pcie_bytes == 1000 + (2 * 2 * 1400 - 2 * 200) // 4  # a slice of each gather goes up


def test_all_on_disk():
    found = moved(ALL_ON_DISK)
    assert found.host == {"gradients": 1000, "buffers": 2000 + 3 * 3000}
    assert found.disk == {"master weights": 1000, "optimizer states": 2000, "parameters": 700}
    # The optimizer state is read and written, weights are read for each gather and written once.
    assert found.disk_traffic == 2 * 3000 + (2 * 2 * 1400 - 2 * 200) // 4 + 500


def test_one_rank_keeps_two_units_on_its_device():
    alone = footprint(
        resident={"master weights": 4000, "optimizer states": 8000, "parameters": 2800},
        peak_without_optimizer={"activations": 5600, "parameters": 2800},
        gradients=4000,
        sent={},
        trained_slices=2000,
        frozen_slices=800,
    )
    found = moved(ALL_ON_HOST, alone, ranks=1)
    assert found.resident == {} and found.host["parameters"] == 2800
    assert found.peak == {"activations": 5600, "unsharded parameters": 1200, "transfers": 8000}
    assert found.pcie_bytes == 4000 + 2 * 2800
    assert moved(OPTIMIZER_ON_HOST, alone, stage=2, ranks=1).resident == {"parameters": 2800}


def test_gradients_go_down_as_often_as_they_are_reduced():
    for stage, times in ((1, 1), (2, 4), (3, 4)):
        assert moved(OPTIMIZER_ON_HOST, stage=stage, accumulation=4).pcie_bytes == times * 1000 + 500, stage
    assert moved(OPTIMIZER_ON_HOST, accumulation=4, no_sync="local").pcie_bytes == 1000 + 500
    assert moved(OPTIMIZER_ON_HOST, communication_data_type="bf16").pcie_bytes == 500 + 500


def test_buffers_are_bounded():
    large = footprint(gradients=10**9, resident={"master weights": 10**9})
    found = moved(Homes(optimizer=DISK), large)
    assert found.peak["transfers"] == 2 * PIECE and found.host["buffers"] == (2 + 3) * PIECE


def test_the_peak_of_what_stays_is_not_the_whole_peak():
    peak, gone = Peak(), Peak(["gradients"])
    for seen, live in ((1, {ACTIVATIONS: 70, "gradients": 10}), (2, {ACTIVATIONS: 40, "gradients": 50})):
        for each in (peak, gone):
            each.record(seen, Counter(live))
    assert (peak.nbytes, gone.nbytes) == (90, 70)


def test_a_tensor_whose_owner_comes_late_does_not_hide_a_moment_of_before():
    gone = Peak(["gradients"])
    gone.record(1, Counter({ACTIVATIONS: 70}))
    gone.record(2, Counter({ACTIVATIONS: 90}))  # 40 of it are a gradient that nobody has taken yet
    gone.relabel(2, 40, "gradients")
    assert gone.nbytes == 70


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


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_traced_bytes_follow_the_formula(stage, ranks):
    model = build(CONFIG)
    config = ZeroConfig(zero_stage=stage, mixed_precision="bf16", stage3_param_persistence_threshold=0)
    traced = trace(model, Scenario(config=config, world_size=ranks, batch=BatchShape(rows=1, length=8)))
    numel = sum(param.numel() for param in model.parameters())
    for homes in offloaded_homes(stage, ranks, disk=True):
        found = offload(traced, homes, stage=stage, ranks=ranks, config=config, accumulation=1)
        wanted = offloaded_bytes(numel, ranks, stage, homes)
        on_host = found.host_bytes - found.host["buffers"]
        got = {Home.DEVICE: found.resident_bytes, HOST: on_host, DISK: found.disk_bytes}
        for home, count in wanted.items():
            assert got[home] == pytest.approx(count, rel=0.01, abs=4096), (homes, home)
        assert found.peak_bytes > found.resident_bytes


@pytest.mark.parametrize(
    "billions, ranks, stage, homes, device, host, disk",
    [
        (13, 1, 2, OPTIMIZER_ON_HOST, 26, 208, 0),  # the size that is known to train on one GPU of 32 GB
        (70, 8, 3, OPTIMIZER_ON_HOST, 17.5, 140, 0),
        (70, 8, 3, ALL_ON_HOST, 0, 157.5, 0),
        (1000, 16, 3, ALL_ON_DISK, 0, 250, 875),
    ],
)
def test_known_cases(billions, ranks, stage, homes, device, host, disk):
    held = offloaded_bytes(billions, ranks, stage, homes)
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
    assert [row["stage"] for row in rows] == [0, 1, 2, 3] and all(row["available"] for row in rows)
    host = plan_json(capsys, folder, "--host-memory", "1TB")["rows"]
    assert {row["optimizer_home"] for row in host if not row["available"]} == {"host"} and len(host) == 4 + 4
    for words in (["--nvme", "1TB"], ["--offload"]):
        both = plan_json(capsys, folder, *words)["rows"]
        assert {row["optimizer_home"] for row in both if not row["available"]} == {"host", "disk"}
        assert len(both) == 4 + 2 + 2 + 5


def test_a_node_holds_the_state_of_its_ranks(folder, capsys):
    result = plan_json(capsys, folder, "--gpus", "2", "--nodes", "4", "--nvme", "1TB")
    rows = {(row["stage"], row["optimizer_home"], row["parameter_home"]): row for row in result["rows"]}
    numel = result["parameters"]
    assert rows[3, "disk", "disk"]["disk_bytes_per_node"] == pytest.approx(2 * 14 * numel / 8, rel=0.01)
    gradients = rows[3, "host", "host"]["host"]["gradients"]
    assert gradients == pytest.approx(4 * numel / 8, rel=0.01)
    assert rows[3, "host", "device"]["host_bytes_per_node"] == pytest.approx(
        2 * (16 * numel / 8 + 2 * gradients), rel=0.01
    )
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
    found = footprint(peak={"activations": 90}, host={"gradients": 200}, disk={"master weights": 30})
    assert request.fits(found) is fits


@pytest.fixture(scope="module")
def tight(folder):
    """Words for a GPU that is too small for every stage, and large enough with the optimizer state elsewhere."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(["plan", str(folder), "--gpus", "2", "--offload", "--json", *SHORT])
    rows = json.loads(out.getvalue())["rows"]
    least = min(row["peak_bytes"] for row in rows if row["available"])
    moved = min(row["peak_bytes"] for row in rows if row["optimizer_home"] == "host")
    assert moved < 0.8 * least
    return ["--gpu-memory", f"{int((moved + least) / 2 / 0.9)}B"]


def test_what_only_offload_would_fit_is_said_and_not_recommended(folder, tight, capsys):
    result = plan_json(capsys, folder, *tight, "--gpus", "2")
    assert result["recommended"] is None and all(row["available"] for row in result["rows"])
    reason = result["reason"]
    assert "nothing fits: stage 3 needs the least" in reason
    assert "With the optimizer state in host memory, stage" in reason, reason
    assert reason.endswith("but this version does not offload yet"), reason
    number = int(reason.split("more GPUs (")[1].split()[0])
    assert number > 2 and plan_json(capsys, folder, *tight, "--gpus", number)["recommended"] is not None


def test_it_is_never_written(folder, tight, tmp_path, capsys):
    target = tmp_path / "zero.yaml"
    status, _, err = plan(capsys, folder, *SHORT, *tight, "--gpus", "2", "--offload", "--write", target)
    assert status == 2 and "--write: nothing fits" in err and "does not offload yet" in err and not target.exists()


def test_what_would_not_fit_either_is_not_offered(folder, tight, capsys):
    none = plan_json(capsys, folder, *tight, "--gpus", "2", "--host-memory", "1kB")
    assert none["recommended"] is None and "offload" not in none["reason"], none["reason"]
    hopeless = plan_json(capsys, folder, "--gpu-memory", "10kB", "--gpus", "2")["reason"]
    assert "more GPUs" not in hopeless and "a shorter sequence" in hopeless and "offload" not in hopeless


def test_a_recommended_stage_is_one_that_runs(folder, tmp_path, capsys):
    target = tmp_path / "zero.yaml"
    status, out, _ = plan(capsys, folder, *SHORT, "--offload", "--gpus", "2", "--write", target)
    assert status == 0 and "Recommended: stage 1" in out, out
    heading = out.index("Offload, not in this version, predicted")
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
