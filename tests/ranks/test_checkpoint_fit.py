"""A checkpoint of another model or optimizer is refused with the reason, before anything is changed."""

import json

import pytest
import torch

import hf_zero
from hf_zero.checkpoint import training_state
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.errors import ZeroCheckpointError
from tests.support import zoo
from tests.support.harness import distributed


ADAMW = torch.optim.AdamW
OTHERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "Adam": torch.optim.Adam,
}


def llama(**settings):
    """Seeded, as `zoo.build`, with other settings."""
    from transformers import LlamaForCausalLM

    config = zoo.build("llama").config
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def trained(model, make_optimizer, groups=lambda model: model.parameters()):
    """An engine that has made one step."""
    optimizer = make_optimizer(groups(model))
    engine = hf_zero.shard(model, optimizer, {"zero_stage": 3})
    engine.backward(model(**zoo.batch("llama", 0, 0)).loss)
    optimizer.step()
    optimizer.zero_grad()
    return engine


def save(folder, engine, masters=True):
    stored = () if masters else {id(param) for buffer in engine.buffers for param in buffer.params}
    job = SaveJob(comm=engine.comm, is_main=engine.comm.rank == 0)
    training_state.save_state(folder, engine.buffers, engine.bindings, job, stored=stored)


def load(folder, engine):
    training_state.load_state(folder, engine.buffers, engine.bindings, engine.comm)


def snapshot(engine):
    """Everything that loading may change."""
    states = [state for optimizer in engine.optimizers for state in optimizer.state.values()]
    options = [dict(group, params=None) for optimizer in engine.optimizers for group in optimizer.param_groups]
    return (
        [weight.detach().clone() for weight in engine.masters],
        [
            {kind: value.clone() if torch.is_tensor(value) else value for kind, value in state.items()}
            for state in states
        ],
        options,
    )


def check_refused(folder, engine, words):
    before = snapshot(engine)
    with pytest.raises(ZeroCheckpointError, match=words):
        load(folder, engine)
    torch.testing.assert_close(snapshot(engine), before, rtol=0, atol=0)


def forget(folder, *keys, members=False):
    """Make a file one of an older version, which did not write these keys."""
    path = folder / training_state.STATE_NAME
    file = SlicedFile.open(path)
    data = path.read_bytes()[len(file.header) :]
    metadata = {key: value for key, value in file.metadata.items() if key not in keys}
    if members:
        metadata["extra"] = json.dumps({})
    path.write_bytes(SlicedFile(file.tensors, metadata).header + data)


@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_another_optimizer(tmp_path, name):
    save(tmp_path, trained(llama(), ADAMW))
    check_refused(
        tmp_path, trained(llama(), OTHERS[name]), f"holds the state of AdamW, this run's optimizer is {name}"
    )


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop"])
def test_the_state_of_another_optimizer_in_a_file_that_does_not_say_so(tmp_path, name):
    save(tmp_path, trained(llama(), ADAMW))
    forget(tmp_path, "classes", "version")
    check_refused(tmp_path, trained(llama(), OTHERS[name]), r"the states \['exp_avg', 'exp_avg_sq'\], and " + name)


def test_older_files_are_read(tmp_path):
    engine = trained(llama(), lambda params: ADAMW(params, amsgrad=True))
    save(tmp_path, engine)
    forget(tmp_path, "classes", "version", members=True)
    again = trained(llama(), lambda params: ADAMW(params, lr=1.0))
    load(tmp_path, again)
    torch.testing.assert_close(snapshot(again), snapshot(engine), rtol=0, atol=0)


def test_newer_files_are_not(tmp_path):
    engine = trained(llama(), ADAMW)
    save(tmp_path, engine)
    path = tmp_path / training_state.STATE_NAME
    path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"2"'))
    check_refused(tmp_path, engine, "has version 2, this hf_zero reads up to 1: update hf_zero")


def test_files_of_others_are_named(tmp_path):
    from safetensors.torch import save_file

    engine = trained(llama(), ADAMW)
    save_file({"a": torch.ones(1)}, tmp_path / training_state.STATE_NAME)
    check_refused(tmp_path, engine, "zero_state.safetensors was not written by hf_zero")


def decayed(model, *without):
    """Two groups, as Trainer makes them: weights, and what is not decayed."""
    bare = [param for name, param in model.named_parameters() if "norm" in name or name in without]
    rest = [param for param in model.parameters() if all(param is not other for other in bare)]
    return [{"params": rest, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0}]


def test_parameters_in_other_groups(tmp_path):
    save(tmp_path, trained(llama(), ADAMW, decayed))
    moved = trained(llama(), ADAMW, lambda model: decayed(model, "lm_head.weight"))
    check_refused(tmp_path, moved, "the groups of AdamW: 'lm_head.weight' was in group 0 and is in group 1$")
    swapped = trained(llama(), ADAMW, lambda model: decayed(model)[::-1])
    check_refused(tmp_path, swapped, "was in group 0 and is in group 1; .* more differ")
    left_out = trained(llama(), ADAMW, lambda model: [p for p in model.parameters() if p is not model.lm_head.weight])
    save(tmp_path, trained(llama(), ADAMW))
    check_refused(tmp_path, left_out, "'lm_head.weight' was in group 0 and is in none of its groups")


def test_the_order_in_a_group_does_not_matter(tmp_path):
    save(tmp_path, trained(llama(), ADAMW))
    load(tmp_path, trained(llama(), ADAMW, lambda model: list(model.parameters())[::-1]))


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize(
    "settings, words",
    [
        ({"tie_word_embeddings": True}, "the model has no parameter 'lm_head.weight' of its own$"),
        ({"num_hidden_layers": 1}, r"the model has no parameter 'model\.layers\.1\..*; and 4 more"),
        ({"vocab_size": 70}, r"'lm_head.weight' has shape \(64, 32\), the model's is \(70, 32\); 'model.embed_tokens"),
    ],
)
def test_another_model(tmp_path, settings, words, masters):
    save(tmp_path, trained(llama(), ADAMW), masters)
    check_refused(tmp_path, trained(llama(**settings), ADAMW), words)


def test_tied_weights_that_are_untied(tmp_path):
    save(tmp_path, trained(llama(tie_word_embeddings=True), ADAMW))
    check_refused(tmp_path, trained(llama(), ADAMW), "'lm_head.weight' is missing")


@distributed(world_size=2)
def test_all_ranks_refuse(tmp_path):
    save(tmp_path, trained(llama(), ADAMW))
    check_refused(tmp_path, trained(llama(vocab_size=70), ADAMW), r"rank 0 of 2 failed: .*does not fit the model")
