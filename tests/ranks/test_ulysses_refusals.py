"""What cannot be computed with parts of sequences is refused by its name, before or in the first step."""

import peft
import pytest
import torch
import transformers as tf
from accelerate import DataLoaderConfiguration, ParallelismConfig
from torch import nn

import hf_zero
from hf_zero import ZeroAccelerator, ZeroPlugin
from hf_zero.errors import ZeroConfigError
from hf_zero.integrations.trl import ZeroDistributedBackend
from hf_zero.parallel.sequence_batches import cut
from tests.support import sequences, zoo
from tests.support.harness import distributed
from tests.support.trainers import forget_accelerate, make_trainer


def _accelerator(plugin=None, **arguments):
    forget_accelerate()
    return ZeroAccelerator(zero_plugin=ZeroPlugin(zero_stage=2, **{"sp_size": 2} | (plugin or {})), **arguments)


def _expect(words, action, *args, kind=ZeroConfigError, **kwargs):
    with pytest.raises(kind, match=words):
        action(*args, **kwargs)


@distributed(world_size=2)
def test_arrangements():
    _expect(r"sp_size is 3 .*there are 2 ranks: set it to one of 1, 2", _accelerator, {"sp_size": 3})
    _expect(r"cp_size is 2 .*no kernel for CPUs.*sp_size", _accelerator, {"sp_size": 1, "cp_size": 2})
    by_rank_0 = DataLoaderConfiguration(dispatch_batches=True)
    _expect("dispatch_batches is on", _accelerator, dataloader_config=by_rank_0)
    _expect("sp_size is 2 .*ParallelismConfig says 4", _accelerator, parallelism_config=ParallelismConfig(sp_size=4))
    too_many = ParallelismConfig(sp_size=2, dp_shard_size=2)
    _expect("is 4, but there are 2 ranks", _accelerator, parallelism_config=too_many)


@distributed(world_size=2)
def test_loops_that_cut_their_own_batches():
    _expect("sp_size is 2 .*ZeroAccelerator", hf_zero.shard, sequences.build(), config={"sp_size": 2})
    _expect("sp_size: trainers that generate", ZeroDistributedBackend, _accelerator())


def _mamba():
    return tf.MambaForCausalLM(tf.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4))


def _prompted():
    return peft.get_peft_model(sequences.build(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))


MODELS = {
    "no model of transformers": lambda: nn.Linear(2, 2),
    "attends to the sequences of an encoder": lambda: zoo.build("t5"),
    "is no causal language model": lambda: zoo.build("bert"),
    "reads more than text": lambda: zoo.build("llava"),
    "passes a state from token to token": _mamba,
    "an adapter that makes sequences longer": _prompted,
    "output_router_logits is on": lambda: zoo.build("mixtral"),
    "attention is 'eager'.*\"sdpa\"": lambda: sequences.build(attn_implementation="eager"),
}


@distributed(world_size=2)
def test_models():
    accelerator = _accelerator()
    for words, build in MODELS.items():
        _expect(words, accelerator.prepare_model, build())
    _expect("2 ranks share each sequence, but the attention has 1 head", accelerator.prepare_model,
            sequences.build(heads=1, keys=1), kind=ValueError)  # fmt: skip


@distributed(world_size=2)
def test_calls():
    accelerator = _accelerator()
    model = accelerator.prepare_model(sequences.build())
    ids = torch.ones(1, 4, dtype=torch.int64)
    positions = torch.arange(4)[None]
    _expect("needs input_ids and position_ids.*cut_sequences", model, input_ids=ids, kind=ValueError)
    _expect("labels .*must be shifted", model, input_ids=ids, position_ids=positions, labels=ids, kind=ValueError)
    _expect("called without labels", model, input_ids=ids, position_ids=positions, kind=ValueError)
    _expect("a part of the prepared model", model.model, input_ids=ids, position_ids=positions, kind=ValueError)
    part = accelerator.cut_sequences({"input_ids": torch.ones(1, 8, dtype=torch.int64), "labels": torch.ones(1, 8)})
    assert part["input_ids"].shape == (1, 4)
    mask = torch.ones(1, 1, 4, 4)
    _expect("attention_mask of 4 dimensions", model, **part, attention_mask=mask, kind=ValueError)
    with torch.no_grad():
        assert model(input_ids=ids, position_ids=positions + 4 * accelerator.process_index).logits.shape[1] == 4


def test_batches():
    ids = torch.ones(1, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="list"):
        cut([ids], 0, 2)
    with pytest.raises(ValueError, match="prompt_ids"):
        cut({"prompt_ids": ids}, 0, 2)
    with pytest.raises(ValueError, match="attention_mask of shape"):
        cut({"input_ids": ids, "attention_mask": torch.ones(1, 1, 5, 5)}, 0, 2)
    with pytest.raises(ValueError, match="pad_to_multiple_of"):
        cut({"input_ids": ids.expand(2, -1), "cu_seq_lens_q": torch.tensor([0, 2, 5, 10])}, 0, 2)


def test_batches_are_cut_after_labels_are_shifted():
    ids = torch.arange(1, 6)[None]
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "name": "x"}
    first, last = cut(batch, 0, 2), cut(batch, 1, 2)
    assert first["input_ids"].tolist() == [[1, 2, 3]] and last["input_ids"].tolist() == [[4, 5, 0]]
    assert first["shift_labels"].tolist() == [[2, 3, 4]] and last["shift_labels"].tolist() == [[5, -100, -100]]
    assert last["labels"].tolist() == [[4, 5, -100]] and last["attention_mask"].tolist() == [[1, 1, 0]]
    assert first["position_ids"].tolist() == [[0, 1, 2]] and last["position_ids"].tolist() == [[3, 4, 5]]
    assert first["name"] == "x"
    packed = {"position_ids": torch.tensor([[0, 1, 0, 1, 2]]), "cu_seq_lens_q": torch.tensor([0, 2, 5])}
    last = cut({**batch, **packed, "max_length_q": 3}, 1, 2)
    assert last["position_ids"].tolist() == [[1, 2, 3]]
    assert last["cu_seq_lens_q"].tolist() == [0, 2, 6] and last["max_length_q"] == 4


@distributed(world_size=2)
def test_losses_of_whole_sequences(tmp_path):
    others = {"train_dataset": sequences.examples(4)}
    for words, arguments, more in (
        ("label_smoothing_factor computes a loss of whole sequences", {"label_smoothing_factor": 0.1}, {}),
        ("compute_loss_func computes", {}, {"compute_loss_func": lambda *_, **__: None}),
    ):
        model = sequences.build()
        trainer = make_trainer(
            None,
            2,
            tmp_path,
            model=model,
            zero_sp_size=2,
            others={**others, "eval_dataset": None, **more},
            **arguments,
        )
        _expect(words, trainer.train)
