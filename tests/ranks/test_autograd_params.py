"""Which parameters train, and with what: frozen, unused, tied, mixed, adapted; each as without hf_zero."""

import functools

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.support import zoo
from tests.support.harness import distributed, run_ranks
from tests.support.nets import WIDTH, Block, Net, batches, micro, seeded
from tests.support.reference import ADAMW, OPTIMIZERS, SGD, Plan, check_stages


check_net = functools.partial(check_stages, batches=batches, micro=micro)
ADAM = functools.partial(torch.optim.Adam, lr=1e-3, eps=1e-4)


# ------------------------------------------------------------------------------------------------------------ unused


class Unused(Net):
    """One block, one layer of another and one matrix of the model are never called."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.layers[1].spare = nn.Linear(3, 3)

    def route(self, x):
        return self.layers[2](self.layers[1](x))


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
@distributed(world_size=2)
def test_parameters_that_are_never_used(optimizer):
    check_net(seeded(Unused), plan=Plan(accumulation=2), optimizer=optimizer)


@distributed(world_size=2)
def test_blocks_that_only_some_micro_batches_use():
    class Skipping(Net):
        turn = 0

        def route(self, x):
            self.turn += 1
            for number, layer in enumerate(self.layers):
                if (number + self.turn) % 3:
                    x = layer(x)
            return x

    check_net(seeded(Skipping), plan=Plan(steps=4, accumulation=2))


class Branches(Block):
    """Two ways through a block; at every call the ranks take different ones."""

    turn = 0

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x):
        self.turn += 1
        return self.ways[(self.turn + dist.get_rank()) % 2](super().forward(x))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_take_different_ways_through_a_block(world_size):
    run_ranks(_different_ways, world_size=world_size)


def _different_ways():
    check_net(seeded(lambda: Net(block=Branches)), plan=Plan(steps=4, accumulation=2))


@distributed(world_size=2)
def test_ranks_take_different_ways_in_a_list_of_mixed_blocks():
    """Dense blocks and blocks of experts in turn: a block travels as a whole, whatever its neighbours are."""

    def make():
        net = Net()
        net.layers[1] = Branches()
        return net

    check_net(seeded(make), plan=Plan(steps=4))


@distributed(world_size=2)
def test_a_rank_without_a_single_gradient_in_a_block():
    """A micro-batch that one rank masks out altogether still gives every rank the other's gradient."""

    def masked(model, batch, backward):
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        loss = loss * 0.0 if dist.get_rank() == 1 else loss
        backward(loss)
        return loss

    check_stages(seeded(Net), batches, micro=masked)


# ------------------------------------------------------------------------------------------------------------ frozen


def _freeze(model, *words):
    for name, p in model.named_parameters():
        p.requires_grad_(not any(word in name for word in words))
    return model


@pytest.mark.parametrize(
    "words",
    [
        ["embed_tokens"],
        ["k_proj", "norm"],
        ["layers.0"],
        ["layers.1"],
        ["embed_tokens", "layers.0.self_attn", "layers.1.mlp"],
        ["model."],
        ["lm_head"],
    ],
    ids=",".join,
)
@pytest.mark.parametrize("checkpointing", [False, True])
@distributed(world_size=2)
def test_frozen_parameters(words, checkpointing):
    def build():
        model = _freeze(zoo.build("llama"), *words)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    check_stages(build, functools.partial(zoo.batch, "llama"), Plan(accumulation=2), optimizer=ADAMW)


@distributed(world_size=2)
def test_the_optimizer_was_given_only_what_trains():
    def build():
        return _freeze(zoo.build("llama"), "layers.0", "q_proj")

    def optimizer(params):
        return ADAMW([p for p in params if p.requires_grad])

    check_stages(build, functools.partial(zoo.batch, "llama"), optimizer=optimizer)


@pytest.mark.parametrize("accumulation", [1, 2])
@distributed(world_size=2)
def test_parameters_are_frozen_and_unfrozen_between_steps(accumulation):
    frozen = [["layers.0", "head"], ["layers.1.up"], [], ["layers"], []]

    def change(step, model):
        _freeze(model, *frozen[step])

    check_net(seeded(Net), plan=Plan(steps=5, accumulation=accumulation), before_step=change)


@distributed(world_size=2)
def test_parameters_that_are_frozen_at_first_train_later():
    """The usual warm-up of a new head: the body is frozen when the model is prepared, and thaws afterwards."""

    def thaw(step, model):
        if step == 2:
            model.requires_grad_(True)

    def build():
        return _freeze(seeded(Net)(), "layers", "enter")

    check_net(build, plan=Plan(steps=4), before_step=thaw)


# ---------------------------------------------------------------------------------------------------------- adapters


def _with_adapters(name, dtype, **options):
    model = zoo.build(name).to(dtype)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"], **options
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
        for key, p in model.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(p, std=0.02)
    return model


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@distributed(world_size=2)
def test_lora_with_fp32_adapters(base, optimizer):
    def build():
        model = _with_adapters("qwen2", base)
        dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
        assert dtypes == {torch.float32}, dtypes
        return model

    check_stages(build, functools.partial(zoo.batch, "qwen2"), Plan(accumulation=2), optimizer=OPTIMIZERS[optimizer])


@distributed(world_size=2)
def test_lora_with_a_trained_head_and_checkpointing():
    def build():
        model = _with_adapters("llama", torch.float32, modules_to_save=["lm_head"])
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        return model

    check_stages(build, functools.partial(zoo.batch, "llama"), Plan(accumulation=2))


@distributed(world_size=2)
def test_adapters_are_switched_off_for_the_reference_pass():
    """As preference training with LoRA does it: the model without its adapters is the reference."""

    def preferring(model, batch, backward):
        with torch.no_grad(), model.disable_adapter():
            reference = model(**batch).logits
        out = model(**batch)
        loss = out.loss + F.mse_loss(out.logits, reference)
        backward(loss)
        return loss

    build = functools.partial(_with_adapters, "llama", torch.float32)
    check_stages(build, functools.partial(zoo.batch, "llama"), micro=preferring)


# --------------------------------------------------------------------------------------------- tied, mixed, odd sizes


@distributed(world_size=2)
def test_the_first_and_the_last_layer_share_a_matrix():
    def make():
        net = Net()
        net.layers[2].down.weight = net.layers[0].down.weight
        net.layers[1].up.bias = net.layers[2].up.bias
        return net

    check_net(seeded(make), plan=Plan(accumulation=2))


@distributed(world_size=2)
def test_units_of_mixed_dtypes():
    class Mixed(Block):
        def __init__(self):
            super().__init__()
            self.fine = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x):
            x = super().forward(x)
            return x + self.fine(x.double()).float()

    check_net(seeded(lambda: Net(block=Mixed)), plan=Plan(accumulation=2))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parameters_smaller_than_the_number_of_ranks(world_size):
    run_ranks(_tiny_parameters, world_size=world_size)


class _Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return x * self.scale + self.empty.sum()


def _tiny_parameters():
    check_net(seeded(lambda: Net(block=_Scale)))


@distributed(world_size=2)
def test_parameters_that_are_not_contiguous():
    def make():
        net = Net()
        for layer in net.layers:
            layer.up.weight = nn.Parameter(torch.randn(WIDTH, 12).t())
        return net

    check_net(seeded(make), exact=False)


@distributed(world_size=2)
def test_a_model_without_layers():
    check_net(seeded(lambda: nn.Linear(4, 3)))


@distributed(world_size=2)
def test_a_sequential_model():
    check_net(
        seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 3)))
    )


@distributed(world_size=2)
def test_convolutions_and_batch_norm():
    class Convolving(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv1d(1, 4, 2), nn.Conv1d(4, 4, 2)])
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            x = self.layers[1](self.layers[0](x[:, None]))
            return self.head(self.norm(x).flatten(1))

    check_net(seeded(Convolving))
