"""Optimizers that train one set of weights and evaluate another (schedule-free ones) do so on sharded models too."""

import torch
import torch.distributed as dist

from hf_zero.core.elementwise import needs_whole_matrices
from hf_zero.core.engine import engine_of
from hf_zero.core.master import MASTER
from hf_zero.core.rebuild import gather_states
from tests.integration.test_accelerate_loops import STAGES, make_accelerator, weights_of
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.reference import Trace, compare
from tests.support.trainers import compare_logs, compare_weights, train


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024, arXiv:2405.15682): steps `z`, evaluates the mean `x` of all z.

    Parameters hold y, which lies between both, while training, and x while evaluating; as in the package of the
    paper's authors the optimizer starts in evaluation mode, and notes its mode in the groups.
    """

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0, "train_mode": False})

    def train(self):
        self._switch(True, lambda group: 1 - group["beta"])

    def eval(self):
        self._switch(False, lambda group: 1 - 1 / group["beta"])

    @torch.no_grad()
    def _switch(self, train_mode, weight):
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] is not train_mode else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group))
            group["train_mode"] = train_mode

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("the optimizer is not in train mode")
            group["steps"] += 1
            share = 1 / group["steps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, share)
                p.sub_(p.grad, alpha=group["lr"] * (1 - group["beta"] * (1 - share)))
                z.sub_(p.grad, alpha=group["lr"])


class WholeMeanSGD(ScheduleFreeSGD):
    """Not elementwise in evaluation mode only."""

    @torch.no_grad()
    def eval(self):
        super().eval()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.mean())


def test_it_is_tried_in_train_mode_and_evaluated():
    for train_mode in (False, True):
        optimizer = ScheduleFreeSGD([torch.nn.Parameter(torch.ones(8, 4))])
        if train_mode:
            optimizer.train()
        assert not needs_whole_matrices(optimizer, optimizer.param_groups[0])
        (group,) = optimizer.param_groups
        assert group["train_mode"] is train_mode and group["steps"] == 0, "the optimizer itself is not touched"
    optimizer = WholeMeanSGD([torch.nn.Parameter(torch.ones(8, 4))])
    assert needs_whole_matrices(optimizer, optimizer.param_groups[0])


def _prepared(stage, seed=0, **arguments):
    accelerator = make_accelerator(stage, **arguments)
    model = zoo.build("llama_tied", seed=seed)
    return accelerator, *accelerator.prepare(model, ScheduleFreeSGD(model.parameters()))


def _train(accelerator, model, optimizer, start, stop):
    """Every second step is followed by an evaluation, as Trainer does both; the weights are those of the last one."""
    trace = Trace()
    for number in range(start, stop):
        model.train()
        optimizer.train()
        loss = model(**zoo.batch("llama_tied", dist.get_rank(), number)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(loss.item())
        if number % 2:
            model.eval()
            optimizer.eval()
            with torch.no_grad():
                trace.losses.append(model(**zoo.batch("llama_tied", dist.get_rank(), 99)).loss.item())
            trace.weights = weights_of(model, accelerator)
    return trace


@distributed(world_size=2)
def test_training_and_evaluation_as_under_ddp():
    stock = _train(*_prepared(None), 0, 6)
    for stage in STAGES:
        compare(_train(*_prepared(stage), 0, 6), stock, f"stage {stage}")


@distributed(world_size=2)
def test_weights_follow_the_mode_in_16_bit_too():
    """In train mode the model holds casts of the masters that are trained, in evaluation mode of the others."""
    for stage in STAGES:
        accelerator, model, optimizer = _prepared(stage, mixed_precision="bf16")
        _train(accelerator, model, optimizer, 0, 3)  # ends in train mode
        trained = weights_of(model, accelerator)
        optimizer.eval()
        evaluated = weights_of(model, accelerator)
        engine = engine_of(model)
        masters = gather_states(engine.buffers, engine.bindings)
        for name, param in model.named_parameters():
            assert evaluated[name].dtype == torch.bfloat16
            assert torch.equal(evaluated[name], masters[param][MASTER].bfloat16().view_as(param)), (stage, name)
        assert any(not torch.equal(evaluated[name], trained[name]) for name in trained), stage


@distributed(world_size=2)
def test_a_mode_that_holds_already_costs_nothing():
    """Trainer calls `optimizer.train()` before every micro-batch."""
    accelerator, model, optimizer = _prepared(3)
    _train(accelerator, model, optimizer, 0, 1)
    comm = engine_of(model).comm
    before = comm.traffic.calls.copy()
    for _ in range(3):
        optimizer.train()
    assert comm.traffic.calls == before, comm.traffic.calls - before


@distributed(world_size=2)
def test_it_goes_on_from_a_state_that_was_saved_in_evaluation_mode(tmp_path):
    for stage in STAGES:
        whole = _prepared(stage)
        _train(*whole, 0, 2)
        whole[0].save_state(tmp_path / str(stage))
        expected = _train(*whole, 2, 4)
        again = _prepared(stage, seed=1)
        again[2].train()  # Trainer does so before it loads
        again[0].load_state(tmp_path / str(stage))
        compare(_train(*again, 2, 4), expected, f"stage {stage}", exact=True)


@distributed(world_size=2)
def test_the_trainer_evaluates_and_saves_what_stock_does(tmp_path):
    def run(stage):
        folder = tmp_path / str(stage)
        others = {"optimizer_cls_and_kwargs": (ScheduleFreeSGD, {"lr": 0.1})}
        options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
        return train("llama_tied", stage, folder, others=others, lr_scheduler_type="constant", **options)

    stock_log, stock_weights = run(None)
    assert sum("eval_loss" in entry for entry in stock_log) >= 2
    for stage in STAGES:
        log, weights = run(stage)
        compare_logs(log, stock_log, f"stage {stage}")
        if dist.get_rank() == 0:
            compare_weights(weights, stock_weights, f"stage {stage}")
