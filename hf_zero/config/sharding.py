"""The first half of the options: what is sharded over which ranks, in which precision, and how it is sent."""

from dataclasses import dataclass
from typing import Any

from hf_zero.config import values
from hf_zero.config.declare import choice, number, numbers, one_of, option, size, switch, weights, whole


Auto = str  # the literal "auto"; readable type hints below
Size = int | str  # a count of elements, or a byte size such as "25MB"
STAGE3 = ("zero_stage", 3)


def stage3_names(name: str) -> str:
    """DeepSpeed knows these with a prefix and without."""
    return f"stage3_{name} {name}"


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Fields of ``ZeroConfig``. Names are DeepSpeed's and Accelerate's where they have one."""

    # What is sharded.
    zero_stage: int = option(
        2,
        "what is sharded: 0 nothing, 1 optimizer states, 2 + gradients, 3 + parameters",
        whole(0, at_most=3, expected="0 (nothing sharded), 1 (optimizer states), 2 (+ gradients) or 3 (+ parameters)"),
        deepspeed="zero_optimization.stage",
        accelerate="zero_stage",
        argument="zero_stage",
    )
    param_access: str = option(
        "gather",
        "reading a sharded parameter or gradient outside its module gathers it, or raises",
        choice("gather", "raise"),
        own=True,
        argument="zero_param_access",
    )
    zero3_init_flag: bool | None = option(
        None,
        "build the model already sharded (on where the stage is 3)",
        switch(),
        accelerate="zero3_init_flag",
        needs=STAGE3,
    )
    zero3_save_16bit_model: bool = option(
        True,
        "write the weights in 16 bit; saving always gives a complete folder",
        switch(),
        zero=stage3_names("gather_16bit_weights_on_model_save") + " stage3_gather_fp16_weights_on_model_save",
        accelerate="zero3_save_16bit_model",
    )

    # Precision of compute, of the wire and of the accumulator.
    mixed_precision: str = option(
        "no",
        "compute dtype; master weights, accumulator and states stay fp32",
        choice("no", "bf16", "fp16", parse=values.to_precision),
        shared=True,
    )
    communication_data_type: str = option(
        "fp32",
        "dtype of gradients on the wire; they are summed in fp32",
        choice("fp32", "bf16", "fp16", parse=values.to_dtype),
        both="communication_data_type",
    )
    grad_accum_dtype: str = option(
        "fp32",
        "dtype that gradients are accumulated in",
        choice("fp32", parse=values.to_dtype),
        deepspeed="data_types.grad_accum_dtype",
    )

    # Values with another owner (TrainingArguments, Accelerator): compared, never silently overruled.
    gradient_accumulation_steps: int | Auto = option(
        values.AUTO,
        "micro-batches per update; owned by the arguments, compared here",
        whole(1, auto=True),
        both="gradient_accumulation_steps",
        argument="gradient_accumulation_steps",
        shared=True,
    )
    gradient_clipping: float | Auto = option(
        values.AUTO,
        "limit of the global gradient norm, 0 for none; a Trainer's arguments own it, loops of Accelerate obey",
        number(
            lambda norm: norm >= 0,
            'a norm of at least 0 (0 switches clipping off) or "auto"',
            shown="from 0",
            auto=True,
        ),
        both="gradient_clipping",
        argument="max_grad_norm",
        shared=True,
    )
    train_micro_batch_size_per_gpu: int | Auto = option(
        values.AUTO,
        "samples per rank and micro-batch; owned by the arguments",
        whole(1, auto=True),
        both="train_micro_batch_size_per_gpu",
        argument="per_device_train_batch_size",
        shared=True,
    )
    train_batch_size: int | Auto = option(
        values.AUTO,
        "samples per update: micro-batch x accumulation x ranks; checked",
        whole(1, auto=True),
        both="train_batch_size",
        shared=True,
    )

    # Communication.
    overlap_comm: bool = option(
        True, "communicate while computing; the numbers stay the same", switch(), zero="overlap_comm"
    )
    deterministic_reduce: bool = option(
        False, "sum gradients in rank order, so that stages agree bit for bit", switch(), own=True
    )
    peer_memory: bool = option(
        True, "CPU ranks of one machine read each other's memory instead of sending", switch(), own=True
    )
    no_sync: str = option(
        "reduce",
        "stages 2-3 under no_sync: reduce every micro-batch, as far as the node, or keep local gradients",
        choice("reduce", "node", "local"),
        own=True,
        argument="zero_no_sync",
    )
    reduce_bucket_size: Size | Auto = option(
        500_000_000,
        "elements per gradient reduction (stages 0-2)",
        size(1),
        zero="reduce_bucket_size allreduce_bucket_size",
    )
    allgather_bucket_size: Size | Auto = option(
        500_000_000, "elements per all-gather of updated weights (stages 1-2)", size(1), zero="allgather_bucket_size"
    )
    zero_hpz_partition_size: int | Auto = option(
        1,
        "ranks of a node, which keeps all weights, so that gathers stay inside; 1: no node does; auto: each machine",
        whole(1, auto=True),
        zero="zero_hpz_partition_size",
        by_machine=True,
        needs=STAGE3,
    )
    mics_shard_size: int | Auto = option(
        0,
        "ranks that share one copy of the state, others replicate it; 0 for all ranks, auto for those of a machine",
        whole(0, auto=True, parse=values.to_count),
        zero="mics_shard_size",
        by_machine=True,
    )
    rank_weights: list[float] | None = option(
        None,
        "shares of the ranks of one replica in the optimizer's state, such as [2, 1]; unset: equal ones",
        weights(),
        own=True,
        needs=("zero_stage", (1, 2, 3)),
    )
    sp_size: int = option(
        1,
        "neighbouring ranks that share each sequence and exchange heads of attention for parts of it (Ulysses)",
        whole(1),
        deepspeed="sequence_parallel_size",
        own=True,
        argument="zero_sp_size",
    )
    tp_size: int = option(
        1,
        "neighbouring ranks that share the computation of each layer, by the model's own tp_plan",
        whole(1, parse=lambda value: values.to_int(value) or 1),  # DeepSpeed's 0 is none, too
        deepspeed="tensor_parallel.autotp_size",
        own=True,
        argument="zero_tp_size",
    )
    cp_size: int = option(
        1,
        "neighbouring ranks that share each sequence by torch's ring attention; GPUs only",
        whole(1),
        own=True,
        argument="zero_cp_size",
    )
    node_size: int | Auto = option(
        values.AUTO,
        "ranks on one machine, for what counts as traffic between nodes; auto: LOCAL_WORLD_SIZE",
        whole(1, auto=True),
        own=True,
    )
    zero_quantized_weights: bool = option(
        False,
        "send weights in 8 bits: as differences between nodes, directly where all ranks are on one node",
        switch(),
        zero="zero_quantized_weights",
        needs=STAGE3,
    )
    zero_quantized_gradients: bool = option(
        False, "send gradients in quantized_gradient_bits; sums are in fp32", switch(), zero="zero_quantized_gradients"
    )
    quantized_gradient_bits: int = option(
        8, "bits of quantised gradients; 4 with a rotation that spreads outliers", one_of(8, 4), own=True
    )
    zeropp_loco_param: dict[str, Any] | None = option(
        None,
        "error feedback of 4-bit gradients between nodes: err_beta, the weight of earlier errors; reset_T, in steps",
        numbers(err_beta=(0.0, 1.0), reset_T=(1, None)),
        zero="zeropp_loco_param",
        needs=("quantized_gradient_bits", 4),
    )
    zero_quantized_nontrainable_weights: bool = option(
        False,
        "keep and send frozen weights (not vectors) in 8 bits; saved files hold them so, too",
        switch(),
        zero="zero_quantized_nontrainable_weights",
        needs=STAGE3,
    )
    quantized_error_limit: float | Auto = option(
        values.AUTO,
        "relative error of three steps in a row that ends quantisation; auto: 0.05, and 0.25 with 4 bits",
        number(lambda limit: limit > 0, 'a number above 0 or "auto"', shown="above 0", auto=True),
        own=True,
    )
    hang_timeout_s: float = option(
        120.0,
        "seconds after which ranks that wait for each other are named and stopped",
        number(lambda seconds: seconds > 0, "a number of seconds above 0", shown="above 0"),
        own=True,
    )
