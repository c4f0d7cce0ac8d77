"""Training with masters away from the device is training: every bit of losses, norms, weights, states is the same."""

import contextlib
import dataclasses
import functools
import itertools
import random
import tempfile

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import hf_zero
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.placement import Place
from tests.support import zoo
from tests.support.far_home import disk_homes, far_homes, host_homes
from tests.support.harness import distributed
from tests.support.late_lanes import late_homes
from tests.support.nets import Net, batches, seeded
from tests.support.networks import NETWORKS


STEPS = 4


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have, and an option that counts."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "turn": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["turn"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    update = average.mul(group["betas"][0]).add(param.grad, alpha=1 - group["betas"][0]).sign_()
                    param.add_(update, alpha=-group["lr"] / group["turn"])
                    average.mul_(group["betas"][1]).add_(param.grad, alpha=1 - group["betas"][1])


OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, fused=True),
    "adamw_foreach": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, foreach=True),
    "amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-4, amsgrad=True),
    "tensor_lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2), eps=1e-4),
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.05),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3, momentum=0.9),
    "nadam": functools.partial(torch.optim.NAdam, lr=1e-3, eps=1e-4),
    "radam": functools.partial(torch.optim.RAdam, lr=1e-3, eps=1e-4),
    "lion": Lion,
}
HOMES = {
    "host": host_homes,
    "far": far_homes,
    "far_slices_near": functools.partial(far_homes, parameters=False),
    "part": functools.partial(far_homes, ratio=0.4),
    "disk": functools.partial(disk_homes, tempfile.gettempdir()),
    "late": late_homes,
    "late_slices_near": functools.partial(late_homes, Place.DEVICE, ratio=0.6),
    "late_disk": functools.partial(late_homes, Place.DISK, folder=tempfile.gettempdir()),
    "streamed": functools.partial(late_homes, step="device"),
    "streamed_slices_near": functools.partial(late_homes, Place.DEVICE, ratio=0.6, step="device"),
    "streamed_disk": functools.partial(late_homes, Place.DISK, folder=tempfile.gettempdir(), step="device"),
}


class Wide(Net):
    """Wide enough that masters are cut."""

    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.middle = nn.Linear(8, 8 * 96)

    def route(self, x):
        return super().route(x) + self.middle(x).view(-1, 96, 8).mean(1)


def _frozen():
    net = Wide()
    for param in [*net.layers[0].parameters(), net.middle.bias]:
        param.requires_grad_(False)
    return net


MODELS = {
    "wide": Wide,
    "frozen": _frozen,
    "tied": NETWORKS["tied"],
    "experts": NETWORKS["some_of_experts"],
    "lora": lambda: peft.get_peft_model(
        zoo.build("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train."""

    model: str = "wide"
    optimizer: str = "adamw"
    homes: str = "far"
    stage: int = 3
    precision: str = "no"
    peer_memory: bool = True
    accumulation: int = 2
    clip: float | None = 0.1
    skips: bool = False
    zeroes: bool = True  # `zero_grad` after a step; else gradients add up
    node: int = 1  # ranks on a node that keeps all weights
    quantised: bool = False

    def __str__(self):
        fields = dataclasses.asdict(self).items()
        return "-".join(f"{name}={value}" for name, value in fields if value != getattr(Case, name)) or "plain"


def _loss(case, model, number):
    if case.model == "lora":
        return model(**zoo.batch("llama", dist.get_rank(), number)).loss
    x, y = batches(dist.get_rank(), number)
    loss = F.cross_entropy(model(x).float(), y)
    return loss * 1e30 if case.skips and number // case.accumulation == 1 else loss


def _train(case, homes):
    """Losses and norms, then weights and optimizer state."""
    model = seeded(MODELS[case.model])()
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = OPTIMIZERS[case.optimizer](groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    config = hf_zero.ZeroConfig(
        zero_stage=case.stage,
        mixed_precision=case.precision,
        peer_memory=case.peer_memory,
        initial_scale_power=8,
        zero_hpz_partition_size=case.node,
        zero_quantized_weights=case.quantised,
    )
    engine = ZeroEngine(model, config, homes=homes)
    engine.attach_optimizer(optimizer)
    seen, weights = [], optimizer.param_groups[0]["params"]
    for step in range(STEPS):
        for micro in range(case.accumulation):
            last = micro == case.accumulation - 1
            loss = _loss(case, model, step * case.accumulation + micro)
            with contextlib.nullcontext() if last else engine.no_sync():
                engine.backward(loss)
            seen.append(loss.item())
        if case.clip is not None:
            seen.append(engine.clip_grad_norm_(case.clip).item())
        optimizer.step()
        schedule.step()
        if case.zeroes:
            optimizer.zero_grad()
        if step == 1:
            with torch.inference_mode():  # the first to come to the new weights
                model.eval()
                seen.append(_loss(case, model, 99).item())
                model.train()
    assert optimizer.param_groups[0]["params"] is weights and set(optimizer.state) <= {
        weight for group in optimizer.param_groups for weight in group["params"]
    }
    state = optimizer.state_dict()
    with hf_zero.gathered_parameters(model):
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
    return seen, values, state


@functools.lru_cache(maxsize=1)
def _near(case):
    return _train(case, None)


def _compare(case):
    wanted, found = _near(dataclasses.replace(case, homes="far")), _train(case, HOMES[case.homes]())
    assert repr(found[0]) == repr(wanted[0]), (case, found[0], wanted[0])  # where nan is nan
    for name, value in wanted[1].items():
        assert torch.equal(found[1][name], value), (case, name, (found[1][name] - value).abs().max())
    assert found[2]["param_groups"] == wanted[2]["param_groups"], case
    assert found[2]["state"].keys() == wanted[2]["state"].keys(), case
    for name, states in wanted[2]["state"].items():
        assert found[2]["state"][name].keys() == states.keys(), (case, name)
        for kind, value in states.items():
            other = found[2]["state"][name][kind]
            same = torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value
            assert same, (case, name, kind)


PRECISIONS = {"no": {}, "bf16": {}, "fp16": {"skips": True}}


def _cases():
    """Those that differ in homes alone follow each other, as the run that they are compared with is the same."""
    for model, stage, precision, peers, homes in itertools.product(MODELS, range(4), PRECISIONS, (True, False), HOMES):
        if precision == "fp16" and model == "lora":
            continue
        more = PRECISIONS[precision]
        yield Case(model=model, homes=homes, stage=stage, precision=precision, peer_memory=peers, **more)
    for optimizer, homes in itertools.product(OPTIMIZERS, HOMES):
        yield Case(optimizer=optimizer, homes=homes)
    for stage, more in itertools.product(range(4), ({"zeroes": False}, {"accumulation": 1, "clip": None})):
        yield from (Case(homes=homes, stage=stage, **more) for homes in HOMES)


def _sample():
    cases = list(_cases())
    draw = random.Random(14)
    streamed = [Case(homes=homes, stage=stage) for homes in HOMES if "streamed" in homes for stage in (0, 2)]
    plain = [case for case in cases if case == Case(homes=case.homes, stage=case.stage) and case not in streamed]
    others = [case for case in cases if case not in plain]
    return sorted({*plain, *draw.sample(others, 12)}, key=str)


@distributed(world_size=2)
def _compare_all(cases):
    for case in cases:
        _compare(case)


@pytest.mark.parametrize("part", range(2))
def test_no_bit_differs(part):
    _compare_all(_sample()[part::2])


@pytest.mark.parametrize("quantised", [False, True])
@distributed(world_size=4)
def test_no_bit_differs_where_nodes_keep_all_weights(quantised):
    for homes in ("far", "part"):
        _compare(Case(homes=homes, node=2, quantised=quantised, precision="bf16"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(20))
def test_no_bit_differs_in_any_case(part):
    cases = list(_cases())
    _compare_all(cases[part * len(cases) // 20 : (part + 1) * len(cases) // 20])
