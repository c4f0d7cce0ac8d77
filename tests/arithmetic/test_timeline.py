"""Predicted step times: the longest path through what the engine enqueues."""

import json
import math
from dataclasses import replace

import pytest
import torch
import transformers

from hf_zero import ZeroConfig
from hf_zero.cli import main
from hf_zero.planning import enqueued
from hf_zero.planning.enqueued import Behind, Enqueued, Mark, Move, Read, Wait
from hf_zero.planning.model import BatchShape, PlanError, build
from hf_zero.planning.optimizers import kept_by
from hf_zero.planning.plan import Request
from hf_zero.planning.progress import silent
from hf_zero.planning.search import compare, fastest
from hf_zero.planning.step_time import Run, whole_run
from hf_zero.planning.time_report import write_best
from hf_zero.planning.timeline import replay
from hf_zero.planning.trace import Scenario, trace
from hf_zero.tools.operations import Operation
from tests.support.machines import plain_machine
from tests.support.tensor_models import needs_shared_layers


STEP = Mark("step")


def _operation(seconds):
    return Operation("add", 0, int(seconds * 1e9), torch.float32)


def _move(seconds, by="messages", members=(0, 1), channel="gathers"):
    return Move("all-gather", "a layer", int(seconds * 1e9), members, channel, by)


def _step(*events, **numbers):
    return replay([STEP, *events, STEP], plain_machine(**numbers))


# -- the longest path -------------------------------------------------------------------------------------------------


def test_operations_run_one_after_another():
    assert _step(_operation(1), _operation(2)).seconds == pytest.approx(3)


def test_a_collective_behind_operations_costs_nothing():
    move = _move(2)
    found = _step(move, _operation(3), Wait(move))
    assert found.seconds == pytest.approx(3)
    assert not found.exposed
    assert found.moving["all-gather"] == pytest.approx(2)


def test_what_is_left_of_a_collective_is_waited_for():
    move = _move(5)
    found = _step(_operation(1), move, _operation(3), Wait(move))
    assert found.seconds == pytest.approx(6)
    assert found.exposed["all-gather", "a layer"] == pytest.approx(2)


def test_collectives_of_one_channel_and_of_one_link_run_one_after_another():
    one, other = _move(2), _move(3, channel="reductions")
    assert _step(one, other, Wait(one), Wait(other)).seconds == pytest.approx(5)


def test_links_inside_and_between_nodes_work_at_the_same_time():
    near, far = _move(2), _move(0.3, members=(0, 2), channel="between")
    assert _step(near, far, Wait(near), Wait(far)).seconds == pytest.approx(3)


def test_reads_of_other_ranks_memory_take_the_readers_own_time():
    move = _move(2, by="reads")
    found = _step(move, _operation(3), Wait(move), read_rate=1e9, host_computes=True)
    assert found.seconds == pytest.approx(5)


def test_a_host_that_launches_too_slowly_is_waited_for():
    found = _step(_operation(1), *[_operation(0.1)] * 10, launch=0.5)
    assert found.seconds == pytest.approx(5.6)
    assert found.launching == pytest.approx(5.6 - 2)


def test_a_host_that_reads_a_value_launches_nothing_ahead():
    slow = [_operation(2), _operation(2)]
    assert _step(*slow, _operation(1), launch=1.0).seconds == pytest.approx(6)
    assert _step(*slow, Read(), _operation(1), launch=1.0).seconds == pytest.approx(7)


def test_operations_slow_down_beside_a_collective():
    move = _move(2)
    assert _step(move, _operation(4), Wait(move), contention=0.5).seconds == pytest.approx(5)


def _copy(seconds, kind="upload", by="bus"):
    return Move(kind, "state", int(seconds * 1e9), (0,), kind if by == "bus" else by, by)


def test_copies_run_beside_operations_and_hold_up_what_waits_for_them():
    up, down = _copy(2), _copy(3, "download")
    rates = {"bus_rate": 1e9, "host_rate": 1e9}
    assert _step(up, down, _operation(4), Wait(up), **rates).seconds == pytest.approx(4)
    found = _step(up, _operation(1), Wait(up), _operation(1), **rates)
    assert found.seconds == pytest.approx(3) and found.exposed["upload", "state"] == pytest.approx(1)
    last = _copy(1)
    assert _step(_copy(2), _copy(2), last, Wait(last), **rates).seconds == pytest.approx(5), "one lane"


def test_a_collective_behind_a_copy_begins_when_it_has_come_up():
    up, move = _copy(2), _move(3)
    assert _step(up, Behind(up), move, Wait(move), bus_rate=1e9).seconds == pytest.approx(5)


def test_a_step_on_the_host_takes_its_own_time_and_launches_nothing_meanwhile():
    step = replace(_operation(2), on_host=True)
    found = _step(_operation(1), step, _operation(1), host_rate=0.5e9)
    assert found.seconds == pytest.approx(5) and found.exposed["step on the host", "state"] == pytest.approx(3)


def test_a_node_has_one_disk():
    read = _copy(1, "disk read", "disk")
    assert _step(read, Wait(read, host=True), _operation(1), disk_rate=1e9).seconds == pytest.approx(3)


def test_the_last_step_pays_for_what_the_one_before_has_begun():
    move = _move(4)
    found = replay([STEP, _operation(1), move, STEP, _operation(1), Wait(move), STEP], plain_machine())
    assert found.seconds == pytest.approx(4)


def test_a_drawing_has_a_lane_for_each_stream_and_no_gaps_that_nobody_sees():
    move = _move(2)
    parts = [_operation(1), Mark("forward"), _operation(1), move, Mark("backward"), _operation(1), _operation(1)]
    found = _step(*parts, _operation(0.5), Wait(move), _operation(1)).to_dict()
    assert found["lanes"] == {"computation": [[0, 1], [1, 2], [2, 5.5]], "gathers": [[2, 4]]}
    assert found["parts"] == [("forward", 1), ("backward", 2)]
    assert (found["seconds"], found["waits"]) == (5.5, {})


def test_a_groups_ranks_are_listed_shortly_and_told_apart():
    names = [enqueued._listed(members) for members in ((0, 1), (0, 1, 2, 3), (0, 2), (0, 2, 4, 6), (0, 8, 16, 24))]
    assert names == ["0 to 1", "0 to 3", "0, 2", "0, 2, ... 6", "0, 8, ... 24"]


# -- the engine's own log ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return build(
        transformers.LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=500,
            architectures=["LlamaForCausalLM"],
        )
    )


def _request(**changes):
    plain = {
        "name": "a decoder",
        "config": ZeroConfig(mixed_precision="bf16"),
        "gpus": 2,
        "nodes": 2,
        "gpu_memory": 8 * 10**9,
        "batch": BatchShape(rows=1, length=64),
        "accumulation": 1,
        "optimizer": "adamw",
        "backend": "nccl",
    }
    return Request(**{**plain, **changes})


def _log(model, stage, backend="nccl", **config):
    log = Enqueued()
    zero = ZeroConfig(zero_stage=stage, mixed_precision="bf16", **config)
    batch = BatchShape(rows=1, length=64)
    found = trace(model, Scenario(config=zero, world_size=4, batch=batch, backend=backend), log=log)
    return log, found


def _last_step(log):
    marks = [number for number, event in enumerate(log.events) if event == STEP]
    return log.events[marks[-2] : marks[-1]]


@pytest.mark.parametrize("optimizer, times", [("adamw", 0), ("sgd", 1)])
def test_a_step_of_fused_adam_in_bf16_never_waits_for_the_device(model, optimizer, times):
    """Whether a gradient is inf or nan stays there. SGD has no such step, so the host asks."""
    log, batch = Enqueued(), BatchShape(rows=1, length=8)
    config = ZeroConfig(zero_stage=3, mixed_precision="bf16")
    trace(model, Scenario(config=config, world_size=4, batch=batch, kept=kept_by(optimizer)), log=log)
    events = _last_step(log)
    # (In forward, transformers asks whether a mask has any padding.)
    assert sum(isinstance(event, Read) for event in events[events.index(Mark("optimizer")) :]) == times


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_moves_of_a_step_carry_the_bytes_that_are_counted(model, stage, backend):
    log, found = _log(model, stage, backend)
    moves = [event for event in _last_step(log) if isinstance(event, Move) and event.label != "scalars"]
    sent = sum(move.nbytes * (len(move.members) - 1) * (2 if move.kind == "all-reduce" else 1) for move in moves)
    assert sent == sum(nbytes for kind, nbytes in found.sent.items() if kind != "scalars")


@pytest.mark.parametrize(("stage", "by"), [(0, "messages"), (3, "reads")])
def test_sums_that_torch_makes_are_sent_also_by_ranks_that_read_each_others_memory(model, stage, by):
    log, _ = _log(model, stage, "gloo")
    assert {event.by for event in _last_step(log) if isinstance(event, Move) and event.label != "scalars"} == {by}


@pytest.mark.parametrize("stage", [2, 3])
def test_every_collective_is_waited_for_once(model, stage):
    log, _ = _log(model, stage)
    moves = [event for event in log.events if isinstance(event, Move)]
    waits = [event.move for event in log.events if isinstance(event, Wait)]
    assert len(waits) == len(set(waits))
    assert set(waits) <= set(moves)
    assert len(moves) - len(waits) <= 6, "only the gathers of updated weights outlive the last step"


def test_the_products_of_a_forward_pass_are_two_for_each_weight_and_token(model):
    pace = compare(model, _request(checkpointing=False, nodes=1), plain_machine(), silent)[0]
    inside = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed_tokens" not in name)
    attention = 4 * 4 * 64 * 64 * 32 / 2 * 2  # both products, halved by the mask: heads, tokens squared, width, layers
    assert pace.flops == pytest.approx(3 * (2 * inside * 64 + attention), rel=0.01)


@pytest.mark.slow
def test_a_faster_link_never_makes_a_step_longer(model):
    quick = {"memory_rate": 1e12}
    machines = [plain_machine(net_rate=rate, node_rate=10 * rate, **quick) for rate in (1e8, 1e9)]
    slow, fast = (compare(model, _request(checkpointing=False), machine, silent) for machine in machines)
    assert all(one.timeline.seconds >= other.timeline.seconds for one, other in zip(slow, fast, strict=True))
    assert slow[-1].timeline.seconds > 1.5 * fast[-1].timeline.seconds


@pytest.mark.slow
def test_weights_inside_nodes_pay_where_the_network_is_slow(model):
    request = _request(accumulation=4, checkpointing=False)
    by_label = {pace.way.label: pace for pace in compare(model, request, plain_machine(net_rate=1e7), silent)}
    plain, node = by_label["stage 3"], by_label["stage 3, weights each node, states all ranks"]
    assert node.timeline.seconds < plain.timeline.seconds
    assert by_label["stage 3, the same in 8 bits"].timeline.seconds < (node.timeline.seconds)


@needs_shared_layers
@pytest.mark.slow
def test_the_fastest_way_takes_as_many_rows_as_fit_and_keeps_the_tokens_of_a_step(model):
    request = _request(accumulation=8, nodes=1, checkpointing=False)
    found = fastest(model, request, plain_machine(launch=1e-4), silent)
    assert found == sorted(found, key=lambda pace: -pace.tokens_per_second)
    batches = {(pace.way.rows * pace.way.accumulation, pace.way.config.tp_size) for pace in found}
    assert batches == {(8, 1), (16, 2)} and {pace.tokens for pace in found} == {8 * 64}
    alone = next(pace for pace in found if pace.way.config.tp_size == 1)
    assert alone.way.rows == 8, "launches bound a step, and memory is plenty"
    resident = min(pace.footprint.peak_bytes for pace in found)
    assert fastest(model, _request(gpu_memory=resident // 4), plain_machine(), silent) == []


@needs_shared_layers
@pytest.mark.slow
def test_layers_are_shared_where_gathers_are_slow_and_the_yaml_says_so(model, tmp_path):
    request = _request(nodes=1, checkpointing=False, accumulation=2)
    machine = plain_machine(flops={"fp32": 1e9, "bf16": 1e9}, node_rate=1e8)
    found = fastest(model, request, machine, silent)
    tp = [pace for pace in found if pace.way.config.tp_size == 2]
    assert tp and {pace.tokens for pace in found} == {128}
    assert tp[0].footprint.sent["tensor parallelism"] > 0
    assert any("activations" in label for _, label in tp[0].timeline.exposed), tp[0].timeline.exposed
    write_best(tp, request, tmp_path / "tp.yaml")
    written = ZeroConfig.from_any(str(tmp_path / "tp.yaml"))
    assert (written.tp_size, written.zero_stage) == (2, tp[0].way.config.zero_stage)
    settled = replace(request, config=ZeroConfig.from_any({"zero_stage": 3, "tp_size": 2}))
    assert {pace.way.config.tp_size for pace in fastest(model, settled, machine, silent)} == {2}


@pytest.mark.slow
def test_states_go_to_the_host_where_they_do_not_fit_and_their_way_takes_time(model, tmp_path):
    request = _request(nodes=1, checkpointing=False)
    on_device = compare(model, request, plain_machine(), silent)
    limit = int(0.8 * min(pace.footprint.peak_bytes for pace in on_device) / 0.9)
    small = replace(request, gpu_memory=limit)
    assert fastest(model, small, plain_machine(), silent) == [], "nobody knows how fast the bus is"
    speeds = [fastest(model, small, plain_machine(bus_rate=rate, host_rate=1e9), silent)[0] for rate in (1e9, 1e7)]
    assert "states in host memory" in speeds[0].way.label
    assert speeds[1].timeline.seconds > speeds[0].timeline.seconds
    assert speeds[0].timeline.moving["upload"] > 0 and speeds[0].timeline.moving["download"] > 0
    assert speeds[0].timeline.exposed["step on the host", "state"] > 0
    write_best(speeds[:1], small, tmp_path / "host.yaml")
    assert ZeroConfig.from_any(str(tmp_path / "host.yaml")).offload_optimizer_device == "cpu"


def test_offload_without_rates_is_refused(model):
    config = ZeroConfig(zero_stage=3, offload_optimizer_device="cpu")
    with pytest.raises(PlanError, match=r"has no bus_rate and no host_rate: .* doctor --disk"):
        compare(model, _request(config=config), plain_machine(), silent)
    with pytest.raises(PlanError, match="beside GPUs only"):
        compare(model, _request(config=config, backend="gloo"), plain_machine(host_computes=True), silent)


@pytest.mark.slow
def test_a_run_is_saved_as_often_as_daly_says(model):
    (pace,) = compare(model, _request(nodes=1, gpus=1, checkpointing=False), plain_machine(), silent)
    run = whole_run(pace, _request(nodes=1, gpus=1), plain_machine(disk_rate=1e9), tokens=1e9, trained=10**9)
    assert run.save_seconds == pytest.approx(12)
    assert run.interval == pytest.approx(math.sqrt(2 * 12 * 50_700 * 3600) - 12)
    assert run.gpu_hours == pytest.approx(1e9 / pace.tokens_per_second / 3600)
    assert whole_run(pace, _request(), plain_machine(), tokens=1e9, trained=1) == Run(
        days=pytest.approx(run.days / 4), gpu_hours=pytest.approx(run.gpu_hours), save_seconds=None, interval=None
    )


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(model, tmp_path):
    model.config.save_pretrained(tmp_path / "model")
    return tmp_path


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_the_timeline_and_the_fastest(folder, capsys):
    words = ["plan", str(folder / "model"), "--time", "--machine", "a100", "--nodes", "2", "--seq-len", "64"]
    words += ["--no-gradient-checkpointing", "--tokens", "1e9", "--timeline", str(folder / "step.json")]
    assert main([*words, "--write", str(folder / "fast.yaml")]) == 0
    out = capsys.readouterr().out
    assert "stage 3, weights each node, states all ranks" in out
    assert "1e+09 tokens take" in out and "has no disk_rate (hf-zero doctor --disk measures one)" in out
    events = json.loads((folder / "step.json").read_text())["traceEvents"]
    assert {"M", "X"} == {event["ph"] for event in events}
    assert "zero_stage" in (folder / "fast.yaml").read_text()
    assert ZeroConfig.from_any(str(folder / "fast.yaml")).zero_stage in (0, 1, 2, 3)


def test_a_machine_that_nobody_knows_is_one_line_and_status_2(folder, capsys):
    assert main(["plan", str(folder / "model"), "--time", "--machine", "h1000"]) == 2
    assert "no machine is called 'h1000'" in capsys.readouterr().err
    assert main(["plan", str(folder / "model"), "--time", "--machine", "h100", "--cpu"]) == 2
    assert "8 x H100 SXM" in (said := capsys.readouterr().err) and "doctor --calibrate" in said
    assert main(["plan", str(folder / "model"), "--time", "--machine", "tests/data/two_cores.yaml"]) == 2
    assert "name one with GPUs" in capsys.readouterr().err
    assert main(["plan", str(folder / "model"), "--tokens", "1e9"]) == 2
