"""The guard: sharded parameters keep their shape, are never read empty, and no write to them is lost."""

import copy

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.core.engine import engine_of
from hf_zero.core.unit import UnitState
from hf_zero.errors import ZeroAccessError
from tests.support.harness import distributed


STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def build():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def prepared(stage=3, **config):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage, **config})
    return model, optimizer, engine


def train_step(model, optimizer, engine):
    ids = torch.arange(12).view(2, 6) + dist.get_rank()
    engine.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()


def values_of(model):
    with hf_zero.gathered_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@distributed(world_size=2)
def test_metadata_needs_no_gather():
    model, optimizer, engine = prepared()
    reference = build()
    for moment in ("after prepare", "after a step"):
        engine.comm.traffic.clear()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p.shape == q.shape and p.numel() == q.numel() > 0 and p.dtype == q.dtype, (moment, name)
            assert p.size() == q.size() and p.dim() == q.dim() and len(p) == len(q) and p.stride() == q.stride(), name
            assert p.requires_grad and p.is_leaf and p.is_contiguous() and p.device == q.device, (moment, name)
            assert "sharded" in repr(p) and hash(p) == id(p) and torch.zeros_like(p).shape == q.shape, name
            assert isinstance(p, torch.nn.Parameter)
        assert sum(p.numel() for p in model.parameters()) == model.num_parameters()
        assert not engine.comm.traffic.calls, f"{moment}: {engine.comm.traffic.calls}"
        train_step(model, optimizer, engine)


@distributed(world_size=2)
def test_reads_gather():
    model, optimizer, engine = prepared()
    reference = dict(build().named_parameters())
    weight = model.lm_head.weight
    assert torch.equal(weight.detach(), reference["lm_head.weight"])
    assert torch.equal(model.model.norm.weight * 2, reference["model.norm.weight"] * 2)
    assert torch.equal(torch.cat([p.flatten() for p in model.parameters()]), _flat(reference.values()))
    assert (
        model.model.layers[0].mlp.up_proj.weight[3, 5].item() == reference["model.layers.0.mlp.up_proj.weight"][3, 5]
    )


def _flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


@distributed(world_size=2)
def test_an_alias_outlives_the_gather():
    model, optimizer, engine = prepared()
    alias, state = model.lm_head.weight.detach(), model.state_dict()
    before = alias.clone()
    train_step(model, optimizer, engine)
    assert torch.equal(alias, before), "an alias must keep the values it was made with"
    assert torch.equal(state["lm_head.weight"], before)
    assert not torch.equal(values_of(model)["lm_head.weight"], before)


@distributed(world_size=2)
def test_reading_may_be_forbidden():
    model, optimizer, engine = prepared(param_access="raise")
    with pytest.raises(ZeroAccessError, match=r"parameter 'lm_head.weight', which is sharded.*gathered_parameters"):
        model.lm_head.weight.sum()
    with hf_zero.gathered_parameters(model.lm_head.weight):
        model.lm_head.weight.sum()
    train_step(model, optimizer, engine)
    with pytest.raises(ZeroAccessError, match="lm_head.weight"):
        model.lm_head.weight.sum()


@STAGES
@distributed(world_size=2)
def test_no_write_is_lost(stage):
    model, optimizer, engine = prepared(stage)
    train_step(model, optimizer, engine)
    head, norm, layer = model.lm_head.weight, model.model.norm.weight, model.model.layers[1].mlp
    expected = values_of(model)
    with torch.no_grad():
        head.copy_(torch.full_like(head, 0.5))
        norm.lerp_(torch.full_like(norm, 3.0), 0.25)
    layer.up_proj.weight.data.mul_(2.0)
    layer.gate_proj.weight.data = torch.ones(layer.gate_proj.weight.shape)
    torch.nn.init.constant_(layer.down_proj.weight, 0.125)
    expected["lm_head.weight"].fill_(0.5)
    expected["model.norm.weight"].lerp_(torch.full_like(norm, 3.0), 0.25)
    expected["model.layers.1.mlp.up_proj.weight"].mul_(2.0)
    expected["model.layers.1.mlp.gate_proj.weight"].fill_(1.0)
    expected["model.layers.1.mlp.down_proj.weight"].fill_(0.125)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # the next step leaves weights alone: what it writes back are the masters
    train_step(model, optimizer, engine)
    for name, value in values_of(model).items():
        assert torch.equal(value, expected[name]), name


@STAGES
@distributed(world_size=2)
def test_reading_costs_a_master_no_precision(stage):
    model, optimizer, engine = prepared(stage, mixed_precision="bf16")
    masters = [master.detach().clone() for master in engine.masters]
    for p in model.parameters():
        p.data.sum()
    model.lm_head.weight.detach().float()
    engine.before_step(optimizer)
    for present, master in zip(engine.masters, masters, strict=True):
        assert torch.equal(present, master)


@STAGES
@distributed(world_size=2)
def test_gathered_parameters_write_takes_rank_0(stage):
    model, optimizer, engine = prepared(stage)
    with hf_zero.gathered_parameters(model.lm_head.weight, write=True):
        if dist.get_rank() == 0:
            model.lm_head.weight.data.fill_(7.0)
    assert (values_of(model)["lm_head.weight"] == 7.0).all()


@distributed(world_size=2)
def test_gathered_parameters_without_write_restores():
    model, optimizer, engine = prepared()
    before = values_of(model)
    with hf_zero.gathered_parameters(model):
        for p in model.parameters():
            p.data.zero_()
    with pytest.raises(RuntimeError, match="inside"):
        with hf_zero.gathered_parameters(model, write=True):
            model.lm_head.weight.data.zero_()
            raise RuntimeError("inside")
    for name, value in values_of(model).items():
        assert torch.equal(value, before[name]), name
    assert all(unit.state is UnitState.RESTING for unit in engine.units)


@distributed(world_size=2)
def test_gathered_parameters_nest():
    model, optimizer, engine = prepared()
    head = model.lm_head.weight
    with hf_zero.gathered_parameters(model, write=True):
        with hf_zero.gathered_parameters(head):
            head.data.fill_(1.0)
        assert (head == 1.0).all(), "the inner scope must not undo the outer one's writes"
        train_forward = model(input_ids=torch.arange(6).view(1, 6)).logits
        assert head.untyped_storage().nbytes() > 0, "a forward inside must not release what the scope holds"
    assert train_forward.isfinite().all()
    assert (values_of(model)["lm_head.weight"] == 1.0).all()
    assert not any(unit.pins for unit in engine.units)


@STAGES
@distributed(world_size=2)
def test_values_read_in_a_scope_serve_backward_after_it(stage):
    model, optimizer, engine = prepared(stage)
    norm, twin = model.model.norm.weight, build().model.norm.weight  # norms are saved for backward as they are
    x = torch.linspace(-1, 1, 32).requires_grad_()
    with hf_zero.gathered_parameters(norm):
        ours = torch.rms_norm(x, (32,), norm) * norm
    wanted = torch.autograd.grad((torch.rms_norm(x, (32,), twin) * twin).pow(2).sum(), (x, twin))
    engine.backward(ours.pow(2).sum())
    assert torch.equal(x.grad, wanted[0]) and torch.equal(norm.grad, wanted[1])


@distributed(world_size=2)
def test_copies_are_plain():
    model, optimizer, engine = prepared()
    twin, reference = copy.deepcopy(model), build()
    assert engine_of(twin) is None
    for p, q in zip(twin.parameters(), reference.parameters(), strict=True):
        assert type(p) is torch.nn.Parameter and torch.equal(p, q)
    ids = torch.arange(6).view(1, 6)
    engine.schedule.reshard_all()
    engine.comm.traffic.clear()
    assert torch.equal(twin(input_ids=ids).logits, reference(input_ids=ids).logits)
    assert not engine.comm.traffic.calls, "the copy must not drive the engine of the original"


@distributed(world_size=2)
def test_moving_or_casting_a_prepared_model_is_refused():
    model, optimizer, engine = prepared()
    with pytest.raises(ValueError, match=r"cannot make a prepared parameter of .* before it is prepared"):
        model.to(torch.float64)
    model.to("cpu")
    train_step(model, optimizer, engine)


@STAGES
@distributed(world_size=2)
def test_load_state_dict_on_a_prepared_model(stage):
    model, optimizer, engine = prepared(stage)
    torch.manual_seed(5)
    state = {name: torch.randn_like(value) for name, value in build().state_dict().items()}
    model.load_state_dict(state)
    for name, value in values_of(model).items():
        assert torch.equal(value, state[name]), name


@distributed(world_size=2)
def test_undo_gives_the_model_back():
    model, optimizer, engine = prepared(mixed_precision="bf16")
    reference = build()
    engine.undo()
    assert engine_of(model) is None and type(model) is type(reference)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert type(p) is torch.nn.Parameter and torch.equal(p, q), name
    model(input_ids=torch.arange(6).view(1, 6)).logits.sum().backward()


@STAGES
@distributed(world_size=2)
def test_a_failed_backward_leaves_the_engine_usable(stage):
    model, optimizer, engine = prepared(stage)
    ids = torch.arange(12).view(2, 6)

    def fail(grad):
        raise RuntimeError("out of memory, say")

    loss = model(input_ids=ids, labels=ids).loss
    handle = model.model.layers[0].mlp.up_proj.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="say"):
        engine.backward(loss)
    handle.remove()
    optimizer.zero_grad()
    twin, twin_optimizer, twin_engine = prepared(stage)
    for triple in ((model, optimizer, engine), (twin, twin_optimizer, twin_engine)):
        train_step(*triple)
    for (name, value), other in zip(values_of(model).items(), values_of(twin).values(), strict=True):
        assert torch.equal(value, other), name


@STAGES
@distributed(world_size=2)
def test_resize_token_embeddings_on_a_prepared_model(stage):
    model, reference = build(), build()
    pairs = []
    for candidate in (model, reference):
        optimizer = torch.optim.SGD(candidate.parameters(), lr=0.1, momentum=0.9)
        engine = hf_zero.shard(candidate, optimizer, {"zero_stage": stage if candidate is model else 0})
        train_step(candidate, optimizer, engine)
        torch.manual_seed(3)
        candidate.resize_token_embeddings(80, mean_resizing=False)
        pairs.append((candidate, optimizer, engine))
    for candidate, optimizer, engine in pairs:
        assert candidate.lm_head.weight.shape == candidate.model.embed_tokens.weight.shape == (80, 32)
        for _ in range(2):
            train_step(candidate, optimizer, engine)
    for (name, value), other in zip(values_of(model).items(), values_of(reference).values(), strict=True):
        assert value.shape == other.shape and torch.equal(value, other), name


@STAGES
@distributed(world_size=2)
def test_tie_weights_on_a_prepared_model(stage):
    model, optimizer, engine = prepared(stage)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    train_step(model, optimizer, engine)
    train_step(model, optimizer, engine)
    assert torch.equal(values_of(model)["model.embed_tokens.weight"], model.lm_head.weight)


@STAGES
@distributed(world_size=2)
def test_a_group_added_to_an_attached_optimizer_is_stepped(stage):
    model = build()
    model.lm_head.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    engine = hf_zero.shard(model, optimizer, {"zero_stage": stage})
    train_step(model, optimizer, engine)
    before = values_of(model)
    model.lm_head.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.lm_head.parameters()), "lr": 0.5})
    train_step(model, optimizer, engine)
    moved = values_of(model)["lm_head.weight"] - before["lm_head.weight"]
    assert 0.4 < moved.abs().max() < 0.6, f"moved by {moved.abs().max()}, not by the new learning rate"


@STAGES
@distributed(world_size=2)
def test_gradients_can_be_read_and_written(stage):
    model, optimizer, engine = prepared(stage)
    reference = build()
    ids = torch.arange(12).view(2, 6)
    shifted = ids + dist.get_rank()
    assert all(p.grad is None for p in model.parameters())
    for candidate, backward in ((model, engine.backward), (reference, torch.Tensor.backward)):
        backward(candidate(input_ids=shifted, labels=shifted).loss)
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        dist.all_reduce(q[1].grad)
        torch.testing.assert_close(p.grad, q[1].grad / 2, rtol=0, atol=1e-8, msg=name)
    before = values_of(model)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    model.model.norm.weight.grad = None
    optimizer.step()
    after = values_of(model)
    torch.testing.assert_close(after["lm_head.weight"], before["lm_head.weight"] - 0.1)
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@distributed(world_size=2)
def test_gradients_inside_no_sync_are_this_ranks_own():
    model, optimizer, engine = prepared(1)
    ids = torch.arange(12).view(2, 6) + dist.get_rank()
    with engine.no_sync():
        engine.backward(model(input_ids=ids, labels=ids).loss)
    reference = build()
    reference(input_ids=ids, labels=ids).loss.backward()
    assert torch.equal(model.lm_head.weight.grad, reference.lm_head.weight.grad)
