"""Private or young names of other libraries that hf_zero relies on: each exists and takes what we pass to it."""

import importlib
import inspect

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_zero.comm import dtensors


TRAINER = "transformers.trainer.Trainer"
MODEL = "transformers.modeling_utils.PreTrainedModel"
ACCELERATOR = "accelerate.accelerator.Accelerator"
LAUNCH = "accelerate.commands.launch"

# What we override or call, with all parameters in order, as the tested versions have them. `self` is left out.
SIGNATURES = {
    f"{TRAINER}._build_accelerator_args": "**kwargs",
    f"{TRAINER}.create_accelerator_and_postprocess": "",
    f"{TRAINER}._move_model_to_device": "model, device",
    f"{TRAINER}._prepare_for_training": "max_steps, train_dataloader, resume_from_checkpoint",
    f"{TRAINER}._load_from_checkpoint": "resume_from_checkpoint, model",
    f"{TRAINER}._load_best_model": "",
    f"{TRAINER}._save_optimizer_and_scheduler": "output_dir",
    f"{TRAINER}._load_optimizer_and_scheduler": "checkpoint",
    f"{TRAINER}._load_scaler": "checkpoint",
    f"{TRAINER}.save_model": "output_dir, _internal_call",
    f"{TRAINER}._save": "output_dir, state_dict",
    f"{TRAINER}._save_checkpoint": "model, trial",
    f"{TRAINER}._finalize_training": "trial, num_train_samples, start_time",
    f"{TRAINER}._clip_grad_norm": "model",
    f"{TRAINER}._get_grad_norm": "model, grad_norm",
    f"{TRAINER}._get_num_items_in_batch": "batch_samples, device",
    f"{TRAINER}.compute_loss": "model, inputs, return_outputs, num_items_in_batch",
    f"{TRAINER}.prediction_step": "model, inputs, prediction_loss_only, ignore_keys",
    f"{TRAINER}.get_total_train_batch_size": "args",
    f"{TRAINER}.get_sp_size": "",
    f"{TRAINER}.get_tp_size": "",
    "transformers.masking_utils.find_packed_sequence_indices": "position_ids",
    "transformers.masking_utils.packed_sequence_compatibility_function": (
        "mask_function, position_ids, packed_sequence_mask"
    ),
    "transformers.training_args.TrainingArguments.__post_init__": "",
    f"{MODEL}._load_pretrained_model": "model, state_dict, checkpoint_files, load_config, expected_keys",
    f"{MODEL}._finalize_model_loading": "model, load_config, loading_info",
    f"{MODEL}._move_missing_keys_from_meta_to_device": "missing_keys, device_map, device_mesh, hf_quantizer",
    f"{MODEL}._get_files_timestamps": "working_dir",
    f"{MODEL}._upload_modified_files": (
        "working_dir, repo_id, files_timestamps, commit_message, token, create_pr, revision, commit_description"
    ),
    "transformers.utils.hub.create_and_tag_model_card": "repo_id, tags, token",
    "transformers.modeling_utils.remove_tied_weights_from_state_dict": "state_dict, model",
    "transformers.core_model_loading.rename_source_key": (
        "source_key, weight_renamings, weight_converters, base_model_prefix, meta_state_dict, reverse"
    ),
    "transformers.core_model_loading.revert_weight_conversion": "model, state_dict",
    "transformers.core_model_loading.WeightConverter.convert": "layer_name, model, config, hf_quantizer, loading_info",
    f"{ACCELERATOR}.prepare": "*args, device_placement",
    f"{ACCELERATOR}.prepare_model": "model, device_placement, evaluation_mode",
    f"{ACCELERATOR}.prepare_optimizer": "optimizer, device_placement",
    f"{ACCELERATOR}.prepare_data_loader": "data_loader, device_placement, slice_fn_for_dispatch",
    f"{ACCELERATOR}.prepare_scheduler": "scheduler",
    f"{ACCELERATOR}._prepare_device_mesh": "",
    f"{ACCELERATOR}._prepare_tp": "*args",
    "transformers.distributed.tensor_parallel.apply_tensor_parallelism": "model, tp_mesh, tp_plan",
    f"{MODEL}._expand_parallel_plan": "plan",
    f"{ACCELERATOR}.deepspeed_ulysses_dl_adapter": "dl, model",
    f"{ACCELERATOR}.gather_for_metrics": "input_data, use_gather_object",
    f"{ACCELERATOR}.backward": "loss, **kwargs",
    f"{ACCELERATOR}.no_sync": "model",
    f"{ACCELERATOR}.clip_grad_norm_": "parameters, max_norm, norm_type",
    f"{ACCELERATOR}.clip_grad_value_": "parameters, clip_value",
    f"{ACCELERATOR}.unscale_gradients": "optimizer",
    f"{ACCELERATOR}.get_state_dict": "model, unwrap",
    f"{ACCELERATOR}.save_model": "model, save_directory, max_shard_size, safe_serialization",
    f"{ACCELERATOR}.save_state": "output_dir, safe_serialization, **save_model_func_kwargs",
    f"{ACCELERATOR}.load_state": "input_dir, load_kwargs, **load_model_func_kwargs",
    f"{ACCELERATOR}.free_memory": "*objects",
    f"{ACCELERATOR}.end_training": "",
    f"{ACCELERATOR}.join_uneven_inputs": "joinables, even_batches",
    f"{ACCELERATOR}.register_save_state_pre_hook": "hook",
    f"{ACCELERATOR}.register_load_state_pre_hook": "hook",
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer, device_placement, scaler",
    f"{LAUNCH}.launch_command_parser": "subparsers",
    f"{LAUNCH}._validate_launch_command": "args",
    f"{LAUNCH}.launch_command": "args",
    f"{LAUNCH}.multi_gpu_launcher": "args",
    f"{LAUNCH}.deepspeed_launcher": "args",
}

# What earlier releases have instead. We call neither of them with what is new.
EARLIER = {
    f"{MODEL}._load_pretrained_model": "model, state_dict, checkpoint_files, load_config",
    "transformers.core_model_loading.rename_source_key": (
        "source_key, weight_renamings, weight_converters, base_model_prefix, meta_state_dict"
    ),
}
# By what name earlier releases have it, and its parameters there (hf_zero/releases.py).
ELSEWHERE = {
    "transformers.masking_utils.packed_sequence_compatibility_function": (
        "transformers.masking_utils.packed_sequence_mask_function",
        "packed_sequence_mask",
    )
}
EARLIEST = {
    "transformers.core_model_loading.rename_source_key": (
        "source_key, weight_renamings, weight_converters, prefix, meta_state_dict"
    ),
}

TRL_SIGNATURES = {
    "trl.distributed.DistributedBackend": "accelerator",
    "trl.distributed.DistributedBackend.gather_params": "params",
    "trl.distributed.DistributedBackend.summon_full_params": "module, **kwargs",
    "trl.trainer.callbacks.SyncRefModelCallback": "ref_model, accelerator",
    "trl.trainer.utils.add_fused_lm_head": "model, temperature, cast_lm_head_to_fp32, outputs",
}


def _resolve(dotted):
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(dotted)


def _parameters(dotted):
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(_resolve(dotted)).parameters.values()
    return ", ".join(stars.get(p.kind, "") + p.name for p in parameters if p.name != "self")


def _skip_without_plans_of_dtensors():
    """Tensor parallelism needs what late releases have, and refuses the others (parallel/tensor_parallel.py)."""
    if not hasattr(_resolve(MODEL), "_expand_parallel_plan"):
        pytest.skip("this release does not share models out as DTensors")


@pytest.mark.parametrize("dotted", SIGNATURES)
def test_signature(dotted):
    if "parallelism" in dotted or "parallel_plan" in dotted:
        _skip_without_plans_of_dtensors()
    try:
        found = _parameters(dotted)
    except AttributeError:
        earlier, expected = ELSEWHERE[dotted]
        assert _parameters(earlier) == expected
        return
    assert found in [forms[dotted] for forms in (SIGNATURES, EARLIER, EARLIEST) if dotted in forms]


@pytest.mark.parametrize("dotted", TRL_SIGNATURES)
def test_trl_signature(dotted):
    trl = pytest.importorskip("trl")
    if "add_fused_lm_head" in dotted and Version(trl.__version__) < Version("1.15"):
        pytest.skip("this release multiplies by the head in the model's own forward")
    assert _parameters(dotted) == TRL_SIGNATURES[dotted]


def test_trl_trainers_keep_their_backend_in_one_attribute():
    pytest.importorskip("trl")
    grpo = _resolve("trl.trainer.grpo_trainer.GRPOTrainer")
    assert "self._dist = DistributedBackend(self.accelerator)" in inspect.getsource(grpo.__init__)
    vllm = _resolve("trl.generation.vllm_generation.VLLMGeneration")
    assert "self._dist = DistributedBackend(accelerator)" in inspect.getsource(vllm.__init__)


def test_a_style_that_sums_gradients_registers_its_hooks_where_they_can_be_taken_over():
    _skip_without_plans_of_dtensors()
    style = _resolve("transformers.distributed.tensor_parallel.ReplicatedWithGradAllReduce")()
    norm = torch.nn.LayerNorm(2)
    style.install_forward(norm, None)
    assert norm.forward.__qualname__ == dtensors.SUMMING
    assert inspect.getclosurevars(norm.forward).nonlocals[dtensors.HOOKED] == {}
    norm(torch.zeros(2))
    assert inspect.getclosurevars(norm.forward).nonlocals[dtensors.HOOKED] == dict(norm.named_parameters())


def test_loading_info_carries_the_keys_that_we_report():
    info = _resolve("transformers.modeling_utils.LoadStateDictInfo")
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= set(inspect.signature(info).parameters)


@pytest.mark.parametrize("name", ["_load_pretrained_model", "_finalize_model_loading"])
def test_loading_seams_are_static_methods(name):
    assert isinstance(inspect.getattr_static(_resolve(MODEL), name), staticmethod)


@pytest.mark.parametrize("name", ["from_pretrained", "_from_config"])
def test_models_are_loaded_by_class_methods_of_one_class(name):
    assert isinstance(inspect.getattr_static(_resolve(MODEL), name), classmethod)


def test_trainers_and_accelerators_are_made_by_object_and_a_trainer_calls_the_accelerator_of_its_module():
    assert Trainer.__new__ is object.__new__ and Accelerator.__new__ is object.__new__
    module = _resolve("transformers.trainer")
    assert module.Accelerator is Accelerator
    assert "self.accelerator = Accelerator(" in inspect.getsource(Trainer.create_accelerator_and_postprocess)


def test_accelerate_has_the_stand_ins_of_deepspeed_in_a_module_that_does_not_need_it():
    deepspeed = importlib.import_module("accelerate.utils.deepspeed")
    assert {"DummyOptim", "DummyScheduler"} <= vars(deepspeed).keys()


def _tiny_model():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def test_loading_goes_through_the_class_of_the_call(tmp_path):
    """A subclass made on the fly is asked to load, on meta, with its mapping resolved."""
    seen = {}

    class Spy(LlamaForCausalLM):
        @staticmethod
        def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *keys):
            seen["devices"] = {p.device.type for p in model.parameters()}
            seen["files"] = checkpoint_files
            seen["mapping"] = load_config.weight_mapping
            return LlamaForCausalLM._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *keys)

    _tiny_model().save_pretrained(tmp_path)
    Spy.from_pretrained(tmp_path)
    assert seen["devices"] == {"meta"}
    assert [str(file) for file in seen["files"]] == [str(tmp_path / "model.safetensors")]
    assert "mapping" in seen


def test_generate_and_layerdrop_ask_the_duck_typed_attribute():
    model = _tiny_model()
    is_managed = _resolve("transformers.generation.utils.is_fsdp_managed_module")
    assert not is_managed(model)
    model._is_fsdp_managed_module = True
    assert is_managed(model)


def test_trainer_gathers_through_an_attribute_that_may_be_bound_again(tmp_path):
    trainer = Trainer(model=_tiny_model(), args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    bound = getattr(trainer.gather_function, "func", trainer.gather_function)
    assert bound == trainer.accelerator.gather_for_metrics


def test_accelerator_keeps_what_it_prepared(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = _tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    assert accelerator._models == [prepared] and prepared._is_accelerate_prepared
    assert accelerator._optimizers == [wrapped] and wrapped._is_accelerate_prepared
    assert isinstance(wrapped, AcceleratedOptimizer) and wrapped.optimizer is optimizer
    wrapped._is_overflow = True
    assert wrapped.step_was_skipped and accelerator.optimizer_step_was_skipped


def test_state_hooks_see_the_final_folder_and_may_take_entries_away(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(_tiny_model())
    seen = []

    def save(models, weights, folder):
        seen.append(("save", models == [model], len(weights), folder))
        weights.clear()

    def load(models, folder):
        seen.append(("load", models == [model], folder))
        models.clear()

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(tmp_path / "state")
    assert not list((tmp_path / "state").glob("model*"))
    accelerator.load_state(tmp_path / "state")
    folder = str(tmp_path / "state")
    assert [(*entry[:-1], str(entry[-1])) for entry in seen] == [("save", True, 1, folder), ("load", True, folder)]


def test_torch_offers_the_entry_point_group_and_the_new_collective_names():
    assert 'group_name = "torch.backends"' in inspect.getsource(torch)
    for name, earlier in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    ):
        assert hasattr(torch.distributed, name) or hasattr(torch.distributed, earlier)


def test_a_storage_can_be_found_again_and_tells_who_holds_it():
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import _disable_current_modes

    tensor = torch.ones(3)
    memory = tensor.untyped_storage()
    ref = StorageWeakRef(memory)
    assert ref.cdata == memory._cdata and torch._C._storage_Use_Count(memory._cdata) == 2
    alias = tensor.detach()
    assert torch._C._storage_Use_Count(memory._cdata) == 3
    del memory, tensor, alias
    assert torch.UntypedStorage._new_with_weak_ptr(ref.cdata) is None
    with _disable_current_modes():
        pass
