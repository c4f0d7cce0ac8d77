"""What happens beside training: evaluation and generation between steps, a second model that stays or trains too."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import hf_zero
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.nets import Net, batches, micro, seeded
from tests.support.reference import OPTIMIZERS, STAGES, average_gradients, check_stages, whole_weights


@distributed(world_size=2)
def test_evaluation_between_steps_sees_the_weights_of_now():
    def look(step, model):
        x, _ = batches(0, 50)
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            seen.append(model(x).sum().item())
        model.train()

    seen = []
    check_stages(seeded(Net), batches, micro=micro, before_step=look, stages=[0])
    stock, replicated = seen[:3], seen[3:]
    assert stock == replicated and len(set(stock)) == 3, seen
    for stage in (1, 2, 3):
        del seen[:]
        check_stages(seeded(Net), batches, micro=micro, before_step=look, stages=[stage])
        assert seen == stock * 2, f"stage {stage}: {seen}"


@distributed(world_size=2)
def test_generation_between_steps():
    def write(step, model):
        prompt = zoo.batch("llama_tied", 0, 9)["input_ids"][:, :3]
        model.eval()
        written.append(model.generate(prompt, max_new_tokens=4, do_sample=False).tolist())
        model.train()

    written = []
    check_stages(
        functools.partial(zoo.build, "llama_tied"), functools.partial(zoo.batch, "llama_tied"), before_step=write
    )
    runs = [written[first : first + 3] for first in range(0, len(written), 3)]
    assert len(runs) == 5 and all(run == runs[0] for run in runs), runs


@pytest.mark.parametrize("trained_first", [True, False])
@distributed(world_size=2)
def test_a_second_model_is_only_evaluated(trained_first):
    """As preference training does it: the reference model is sharded too, has trainable parameters, and stays."""
    plain = seeded(Net)()
    for stage in STAGES:
        config = hf_zero.ZeroConfig(zero_stage=stage)
        model, reference = seeded(Net)(), seeded(Net)()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if trained_first:
            engine = hf_zero.shard(model, optimizer, config)
            hf_zero.shard(reference, None, config)
        else:
            hf_zero.shard(reference, None, config)
            engine = hf_zero.shard(model, optimizer, config)
        for number in range(3):
            x, y = batches(dist.get_rank(), number)
            with torch.no_grad():
                wanted = reference(x)
            assert torch.equal(wanted, plain(x)), f"stage {stage}: the reference moved in step {number}"
            out = model(x)
            engine.backward(F.cross_entropy(out, y) + F.mse_loss(out, wanted))
            optimizer.step()
            optimizer.zero_grad()
        kept = whole_weights(reference)
        moved = whole_weights(model)
        for name, p in plain.named_parameters():
            assert torch.equal(kept[name], p), f"stage {stage}: {name} of the reference changed"
            assert not torch.equal(moved[name], p), f"stage {stage}: {name} of the model did not train"


@distributed(world_size=2)
def test_two_models_train_with_one_optimizer_each():
    def train(make):
        nets = [seeded(Net)(), seeded(functools.partial(Net, depth=2), seed=1)()]
        optimizers = [OPTIMIZERS["sgd"](net.parameters()) for net in nets]
        backward = make(nets, optimizers)
        for number in range(3):
            x, y = batches(dist.get_rank(), number)
            backward(F.cross_entropy(nets[0](x) + nets[1](x), y), nets)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return nets

    def stock(nets, optimizers):
        def backward(loss, nets):
            loss.backward()
            for net in nets:
                average_gradients(net)

        return backward

    def ours(stage, nets, optimizers):
        config = hf_zero.ZeroConfig(zero_stage=stage)
        engines = [hf_zero.shard(*pair, config) for pair in zip(nets, optimizers, strict=True)]
        return lambda loss, nets: engines[0].backward(loss)

    wanted = [{name: p.detach() for name, p in net.named_parameters()} for net in train(stock)]
    for stage in STAGES:
        got = [whole_weights(net) for net in train(functools.partial(ours, stage))]
        for mine, theirs in zip(got, wanted, strict=True):
            for name, weight in theirs.items():
                assert torch.equal(mine[name], weight), f"stage {stage}: {name}"
