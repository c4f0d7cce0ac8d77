"""`hf-zero verify` names every planted fault by its cause, and blames no healthy run."""

import functools
import importlib.util
import re

import pytest
import torch
import transformers

from hf_zero.comm.communicator import Communicator
from hf_zero.config import ZeroConfig
from hf_zero.config.consistency import resolve_auto
from hf_zero.errors import ZeroLaunchError
from hf_zero.planning.model import PlanError
from hf_zero.verify.foreign import SYSTEMS
from hf_zero.verify.measures import Measure
from hf_zero.verify.runs import check_room
from hf_zero.verify.sample import make_task
from hf_zero.verify.task import Task, grouped
from hf_zero.verify.verify import verify
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.planted import FAULTS, DoubledLayer, Dropped, OtherRate, Scaled, Stale


CPU = torch.device("cpu")
STAGES = (0, 1, 2, 3)
QUANTISED = {"zero_stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
TINY = {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}


def _check_faults(faults, config, seed):
    """Each fault in turn, on the ranks of this test; returns what was not named as it should be."""
    comm, wrong, asked = Communicator.connect(), [], config
    for fault in faults:
        config = asked.replace(zero_stage=2) if fault is Stale else asked
        task = make_task(None, config, CPU, steps=2, seed=seed)
        found = verify(task, config, comm, model="sample", make=functools.partial(fault, task, config))
        promise, words = FAULTS[fault]
        named = found.finding is not None and re.search(words, found.finding.cause)
        if found.holds or not named or found.finding.promise != promise:
            wrong.append((fault.__name__, found.finding and found.finding.to_dict()))
    return wrong


@distributed(world_size=2)
def test_every_planted_fault_is_named():
    wrong = _check_faults(FAULTS, ZeroConfig(zero_stage=3), seed=0)
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_every_planted_fault_is_named_at_each_stage_and_seed(stage, seed):
    wrong = _check_faults(FAULTS, ZeroConfig(zero_stage=stage), seed)
    assert not wrong, "\n".join(map(str, wrong))


def _zoo_task(name, seed):
    def batch(rank, step, number):
        return zoo.batch(name, rank, 10 * step + number + 100 * seed)

    return Task(
        build=functools.partial(zoo.build, name, seed),
        make_optimizer=lambda model: torch.optim.AdamW(grouped(model, 1e-3, 0.01)),
        batch=batch,
        loss=lambda model, inputs: model(**inputs).loss,
        steps=2,
    )


def _check_healthy(cases):
    """Verify hf_zero in each case: a model of the zoo (None: the sample), a seed, a configuration."""
    comm, wrong = Communicator.connect(), []
    for name, seed, settings in cases:
        config = ZeroConfig(**settings)
        task = _zoo_task(name, seed) if name else make_task(None, config, CPU, steps=2, seed=seed)
        found = verify(task, resolve_auto(config, world_size=comm.world_size), comm, model=str(name))
        if not found.holds:
            wrong.append((name, seed, settings, found.finding, found.lines()))
    return wrong


HEALTHY = [
    ("mixtral", 0, {"zero_stage": 3}),
    ("llava", 1, {"zero_stage": 2}),
    ("t5", 2, {"zero_stage": 1}),
    ("vit", 0, {"zero_stage": 3, "communication_data_type": "bf16"}),
    (None, 1, {"zero_stage": 0}),
    (None, 2, {"zero_stage": 2, "no_sync": "local", "gradient_accumulation_steps": 3}),
    (None, 3, {"zero_stage": 3, "mixed_precision": "bf16"}),
    ("llama_tied", 3, {"zero_stage": 3, "mixed_precision": "fp16"}),
]


@distributed(world_size=3)
def test_healthy_runs_of_three_ranks_are_not_blamed():
    wrong = _check_healthy(HEALTHY)
    assert not wrong, "\n".join(map(str, wrong))


@distributed(world_size=4)
def test_weights_that_are_sharded_inside_nodes_and_replicas_are_not_blamed():
    nodes = {"zero_stage": 3, "zero_hpz_partition_size": 2, "node_size": 2}
    replicas = {"zero_stage": 3, "mics_shard_size": 2, "node_size": 2, "no_sync": "node"}
    wrong = _check_healthy([(None, 0, nodes), ("llama_tied", 1, replicas), (None, 2, {**nodes, **QUANTISED})])
    assert not wrong, "\n".join(map(str, wrong))


@distributed(world_size=2)
def test_places_and_codecs_are_not_blamed_and_faults_behind_a_codec_are_named(tmp_path):
    disk = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": str(tmp_path)}
    cases = [
        {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
        {"zero_stage": 2, **disk},
        {**QUANTISED, "zero_quantized_nontrainable_weights": True},
        {**QUANTISED, "zero_stage": 1, "mixed_precision": "bf16"},
        {"zero_stage": 3, "zero_quantized_gradients": True, "quantized_gradient_bits": 4},
    ]
    wrong = _check_healthy([(None, seed, case) for seed, case in enumerate(cases)])
    assert not wrong, "\n".join(map(str, wrong))
    wrong = _check_faults([Scaled, Dropped, DoubledLayer, OtherRate], ZeroConfig(**QUANTISED), seed=0)
    assert not wrong, "\n".join(map(str, wrong))


@distributed(world_size=1)
def test_a_codec_is_judged_by_its_error_over_all_tensors_and_the_worst_one_is_named():
    measure = Measure(promise="gradients", explained="")
    right = {"large": torch.full((4,), 3.0), "small": torch.ones(2)}
    mine = {"large": right["large"] * 1.01, "small": right["small"] * 1.1}
    assert measure.apart(mine, right, 0.05) == ["small"] and measure.mismatch is None
    assert measure.where == "small" and abs(measure.largest - (0.0009 * 4 + 0.02) ** 0.5 / 38**0.5) < 1e-6
    assert measure.apart({"large": right["large"]}, right, 0.05) == ["small"] and measure.mismatch.where == "small"


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", zoo.NAMES)
@distributed(world_size=2)
def test_no_model_of_the_zoo_is_blamed(name, seed):
    precisions = ("no", "bf16") if name in ("llama", "gemma", "gpt2", "mixtral", "t5", "bert", "vit") else ("no",)
    cases = [(name, seed, {"zero_stage": s, "mixed_precision": p}) for s in STAGES for p in precisions]
    wrong = _check_healthy(cases)
    assert not wrong, "\n".join(map(str, wrong))


@distributed(world_size=2)
def test_stock_systems_can_be_verified_and_blamed():
    comm, config = Communicator.connect(), ZeroConfig(zero_stage=0)
    task = make_task(None, config, CPU, steps=1, seed=0)
    if importlib.util.find_spec("deepspeed") is None:
        with pytest.raises(ZeroLaunchError, match="--against deepspeed needs DeepSpeed"):
            SYSTEMS["deepspeed"](task, config)
    for name in ("ddp", "fsdp2"):
        system = SYSTEMS[name]
        found = verify(task, config, comm, model="sample", make=functools.partial(system, task, config))
        assert found.holds, f"{name}: {found.lines()}"

        class Doubled(system):
            def micro_step(self, batch, weight, last):
                return super().micro_step(batch, 2 * weight, last)

        found = verify(task, config, comm, model="sample", make=functools.partial(Doubled, task, config))
        assert found.finding is not None and "2 times" in found.finding.cause, f"{name}: {found.lines()}"


@distributed(world_size=1)
def test_a_model_that_does_not_fit_or_has_no_loss_is_refused(tmp_path):
    with pytest.raises(ZeroLaunchError, match=r"that needs 40000000\.0 GB of it, and .* with fewer layers"):
        check_room(10**15, CPU, Communicator.connect())
    (tmp_path / "config.json").write_text(
        transformers.GPT2Config(architectures=["GPT2Model"], **TINY).to_json_string()
    )
    with pytest.raises(PlanError, match="GPT2Model takes no labels"):
        make_task(str(tmp_path / "config.json"), ZeroConfig(), CPU, steps=1, seed=0)


@distributed(world_size=2)
def test_reads_that_are_forbidden_and_saves_by_a_thread_are_verified_all_the_same():
    wrong = _check_healthy([(None, 0, {"zero_stage": 3, "param_access": "raise", "async_save": True})])
    assert not wrong, "\n".join(map(str, wrong))


@distributed(world_size=1)
def test_what_is_written_says_what_was_measured(tmp_path):
    import json

    comm, config = Communicator.connect(), ZeroConfig(zero_stage=2)
    task = make_task(None, config, CPU, steps=2, seed=0)
    found = verify(task, config, comm, model="sample")
    found.write(tmp_path)
    written = json.loads((tmp_path / "certificate.json").read_text())
    assert written["holds"] and written["finding"] is None and len(written["losses"]) == 4, written
    promises = {verdict["promise"]: verdict["verdict"] for verdict in written["verdicts"]}
    assert promises["resume"] == "holds, bitwise" and promises["run of one process"].startswith("holds"), promises
    page = (tmp_path / "certificate.md").read_text()
    assert "**Every promise holds.**" in page and all(f"| {name} | " in page for name in promises), page
    fault = next(fault for fault in FAULTS if fault.__name__ == "Unclipped")
    found = verify(task, config, comm, model="sample", make=functools.partial(fault, task, config))
    found.write(tmp_path)
    assert not json.loads((tmp_path / "certificate.json").read_text())["holds"]
    assert "clipping: nothing was clipped" in (tmp_path / "certificate.md").read_text()
