"""16-bit runs of models that meet fp32 tensors inside: they train alike at every stage, and as under autocast."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import hf_zero
from tests.support import zoo
from tests.support.harness import distributed
from tests.support.nets import WIDTH, Block, Net, batches, seeded
from tests.support.reference import SGD, STAGES, Plan, average_gradients, train_zero
from tests.support.trainers import forget_accelerate


class BufferNet(Net):
    """A registered table of positions is added to the activations, before a LayerNorm."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("positions", torch.linspace(-1, 1, WIDTH))

    def route(self, x):
        return super().route(x + self.positions)


class ConstantBlock(Block):
    """fp32 constants are made inside, before a matrix and before a norm."""

    def forward(self, x):
        x = x + self.down(self.up(x * torch.linspace(0.5, 1, WIDTH)))
        return super().forward(x * torch.linspace(1, 0.5, WIDTH))


class BatchNormBlock(Block):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.instance_norm = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)

    def forward(self, x):
        x = x + self.batch_norm(self.down(self.up(x)))
        return super().forward(x + self.instance_norm(x.view(1, *x.shape).transpose(1, 2)).transpose(1, 2)[0])


class GroupNormNet(Net):
    """Images: a convolution, GroupNorm without and with weights, fp32 inputs from the start."""

    def __init__(self):
        super().__init__()
        self.first = nn.GroupNorm(2, 4)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.second = nn.GroupNorm(2, 2, affine=False)

    def forward(self, x):
        x = self.second(self.conv(self.first(x)[:, None])).sum(1)
        return super().forward(x)


class RecurrentNet(Net):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def route(self, x):
        x = super().route(x)[None]
        x = x + self.gru(x)[0]
        return (x + self.attention(x, x, x, need_weights=False)[0])[0]


class EncoderNet(Net):
    def __init__(self, norm_first):
        super().__init__(block=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, norm_first=norm_first))

    def route(self, x):
        return super().route(x[None] + torch.linspace(-1, 1, WIDTH))[0]


NETS = {
    "a buffer": BufferNet,
    "a constant in a layer": functools.partial(Net, block=ConstantBlock),
    "norms with running statistics": functools.partial(Net, block=BatchNormBlock),
    "convolution and group norm": GroupNormNet,
    "recurrence and attention": RecurrentNet,
    "torch's encoder layers": functools.partial(EncoderNet, norm_first=False),
    "torch's encoder layers, norm first": functools.partial(EncoderNet, norm_first=True),
}


def micro(model, batch, backward):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    assert loss.dtype == torch.float32
    backward(loss)
    return loss


def _under_autocast(build, batches, plan):
    """As the stock Trainer trains: fp32 weights, autocast around forward, outputs as fp32."""
    model = build()
    optimizer, losses = SGD(model.parameters()), []
    for (number,) in plan.windows():
        x, y = batches(number)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = F.cross_entropy(out.float(), y)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NETS)
@distributed(world_size=2)
def test_a_net_that_meets_fp32_inside(name):
    build, mine = seeded(NETS[name]), functools.partial(batches, dist.get_rank())
    stock = _under_autocast(build, mine, Plan())
    traces = []
    for stage in STAGES:
        config = hf_zero.ZeroConfig(zero_stage=stage, mixed_precision="bf16")
        traces.append(train_zero(build(), SGD, mine, Plan(), config=config, micro=micro))
        torch.testing.assert_close(traces[-1].losses, stock, rtol=0, atol=2**-6, msg=f"stage {stage}")
        assert traces[-1].losses == traces[0].losses, f"stage {stage}"
        for key, weight in traces[0].weights.items():
            assert torch.equal(traces[-1].weights[key], weight), f"stage {stage}: {key}"


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_what_has_which_precision(stage):
    model = seeded(NETS["norms with running statistics"])()
    engine = hf_zero.shard(model, SGD(model.parameters()), {"zero_stage": stage, "mixed_precision": "bf16"})
    for name, param in model.named_parameters():
        statistics = "batch_norm" in name or "instance_norm" in name
        assert param.dtype == (torch.float32 if statistics else torch.bfloat16), name
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32, torch.long}
    assert {master.dtype for master in engine.masters} == {torch.float32}
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(functools.partial(_note, seen, name))
    x, _ = batches(0, 0)
    out = model(x)
    assert seen["enter"] == seen["layers.0.up"] == seen["head"] == torch.bfloat16, seen
    assert out.dtype == torch.float32, "what a model returns is fp32, as with the stock Trainer"
    assert not torch.is_autocast_enabled("cpu")


def _note(seen, name, module, args, output):
    if isinstance(output, torch.Tensor):
        seen[name] = output.dtype


class Talkative(Net):
    """Returns containers; numbers, integers and objects of its own among them."""

    def __init__(self):
        super().__init__()
        self.cache = object()

    def forward(self, x):
        out = super().forward(x)
        from transformers.modeling_outputs import SequenceClassifierOutput

        loss = F.mse_loss(out, torch.full_like(out, 0.1))
        return SequenceClassifierOutput(loss=loss, logits=out, hidden_states=(x, [out.argmax(-1)], self.cache))


@distributed(world_size=2)
def test_containers_that_a_model_returns_keep_their_kind():
    model = seeded(Talkative)()
    engine = hf_zero.shard(model, SGD(model.parameters()), {"zero_stage": 3, "mixed_precision": "bf16"})
    x, _ = batches(0, 0)
    out = model(x)
    assert type(out).__name__ == "SequenceClassifierOutput" and out.loss.dtype == out.logits.dtype == torch.float32
    assert out.hidden_states[0] is x and out.hidden_states[1][0].dtype == torch.long
    assert out.hidden_states[2] is model.cache
    engine.backward(out.loss)
    loss = torch.nn.functional.cross_entropy(model(x).logits, torch.tensor([0] * 5), weight=torch.tensor([1.0, 2, 3]))
    engine.backward(loss)


@pytest.mark.parametrize("name", ["whisper", "t5", "llama"])
@distributed(world_size=2)
def test_generation_from_fp32_inputs(name):
    """Encoders are called outside of forward."""
    batch = zoo.batch(name, 0, 0)
    del batch["labels"]
    given, plain = {"max_new_tokens": 4, "do_sample": False}, zoo.build(name).eval()
    for param in plain.parameters():
        param.data = param.data.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = plain.generate(**batch, **given)
    for stage in STAGES:
        model = zoo.build(name).eval()
        hf_zero.shard(model, SGD(model.parameters()), {"zero_stage": stage, "mixed_precision": "bf16"})
        assert torch.equal(model.generate(**batch, **given), wanted), f"stage {stage}"


@distributed(world_size=2)
def test_code_outside_of_forward_may_run_under_the_same_autocast():
    """`accelerator.autocast()` is not a context that does nothing."""
    forget_accelerate()
    plugin = hf_zero.ZeroPlugin(zero_stage=3)
    accelerator = hf_zero.ZeroAccelerator(cpu=True, mixed_precision="bf16", zero_plugin=plugin)
    model = accelerator.prepare(seeded(Net)())
    x = torch.randn(2, WIDTH)
    with pytest.raises(RuntimeError, match="dtype"):
        model.head(x)
    with accelerator.autocast():
        assert model.head(x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
