"""The planner trains with tiles: it predicts the lower peak, and recommends them where only activations do not fit."""

import dataclasses
import functools

import pytest
import transformers
import yaml

from hf_zero.config import ZeroConfig
from hf_zero.planning.model import BatchShape, build
from hf_zero.planning.plan import HEADROOM, Request, make_plan
from hf_zero.planning.report import write_yaml
from tests.support import zoo


SHAPE = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 512, "max_position_embeddings": 4096}
REQUEST = Request(
    name="model",
    config=ZeroConfig(),
    gpus=2,
    nodes=1,
    gpu_memory=10**12,
    batch=BatchShape(rows=2, length=2048),
    accumulation=1,
    optimizer="adamw",
    backend="nccl",
    checkpointing=False,
)


def _model(kind=transformers.LlamaConfig, **more):
    return build(kind(**{**zoo._DECODER, **SHAPE, **more}))


@functools.cache
def _peaks(tile_loss, tile_mlp):
    """The peak of each stage, with so many tokens in a tile."""
    config = ZeroConfig(tile_loss=tile_loss, tile_mlp=tile_mlp)
    plan = make_plan(_model(), dataclasses.replace(REQUEST, config=config))
    return [row.footprint.peak_bytes for row in plan.rows]


def test_tiles_lower_the_peak_of_every_stage():
    whole, loss, both = _peaks(0, 0), _peaks(256, 0), _peaks(256, 256)
    logits = 2 * 2048 * 4096 * 4
    assert all(after < before - 2 * logits for before, after in zip(whole, loss, strict=True)), (whole, loss)
    assert all(after < before for before, after in zip(loss, both, strict=True)), (loss, both)


def _with_room_for(peak, **more):
    return dataclasses.replace(REQUEST, gpu_memory=int(peak / (1 - HEADROOM)) + 1000, **more)


def test_tiles_are_recommended_where_nothing_else_fits(tmp_path):
    plan = make_plan(_model(), _with_room_for(_peaks(1024, 0)[1]))
    assert plan.recommended.stage == 1 and plan.recommended.tiles == {"tile_loss": 1024}, plan.reason
    assert "only with tile_loss 1024" in plan.reason
    write_yaml(plan, tmp_path / "zero.yaml")
    assert yaml.safe_load((tmp_path / "zero.yaml").read_text())["deepspeed_config"]["tile_loss"] == 1024
    assert ZeroConfig.from_any(str(tmp_path / "zero.yaml")).tile_loss == 1024


def test_tiles_of_mlps_are_recommended_where_those_of_the_loss_are_not_enough():
    plan = make_plan(_model(), _with_room_for(_peaks(1024, 1024)[3]))
    assert plan.recommended.tiles == {"tile_loss": 1024, "tile_mlp": 1024}, plan.reason


@pytest.mark.parametrize("memory", [10**12, 10**4])
def test_tiles_are_not_recommended_without_need_or_where_the_state_does_not_fit(memory):
    plan = make_plan(_model(num_hidden_layers=1), dataclasses.replace(REQUEST, gpu_memory=memory))
    assert not any(row.tiles for row in plan.rows)


def test_models_without_tiles_are_planned_without_them():
    kind, settings = transformers.BertConfig, {**zoo._BERT, "architectures": ["BertForMaskedLM"], **SHAPE}
    model = build(kind(**settings))
    whole = make_plan(model, REQUEST)
    plan = make_plan(model, _with_room_for(min(row.footprint.peak_bytes for row in whole.rows) - 10**6))
    assert not any("tile_loss" in row.tiles for row in plan.rows)
