"""Which messages and weights are quantised for a configuration, and how."""

from __future__ import annotations

from hf_zero.comm.codec import Codec
from hf_zero.comm.feedback import ErrorFeedback
from hf_zero.comm.meter import Quantised
from hf_zero.comm.topology import Topology
from hf_zero.config import ZeroConfig
from hf_zero.errors import ZeroConfigError


def quantised_kinds(config: ZeroConfig, topology: Topology) -> list[Quantised]:
    """Which messages are quantised, and how. Raises ZeroConfigError where they cannot be."""
    chosen = []
    if config.zero_quantized_weights and topology.size > 1:
        chosen.append(Quantised("weights", Codec(8), _limit(config, 8)))
    if config.zero_quantized_gradients and topology.size > 1:
        bits = config.quantized_gradient_bits
        chosen.append(Quantised("gradients", Codec(bits), _limit(config, bits), _feedback(config, topology)))
    if chosen and config.zero_stage == 0:
        raise ZeroConfigError("zero_quantized_gradients needs sharded optimizer states: set zero_stage to 1, 2 or 3")
    for name, devices in (
        ("zero_quantized_weights", ("offload_optimizer_device", "offload_param_device")),
        ("zero_quantized_nontrainable_weights", ("offload_param_device",)),
    ):
        far = [device for device in devices if getattr(config, device) != "none"]
        if far and getattr(config, name):
            raise ZeroConfigError(
                f"{name} and {far[0]}: {getattr(config, far[0])} are not available together: set one of them to its "
                "default"
            )
    return chosen


def frozen_codec(config: ZeroConfig) -> Codec | None:
    """How sharded weights that are never trained rest, if they are quantised."""
    return Codec(8) if config.zero_stage == 3 and config.zero_quantized_nontrainable_weights else None


def _feedback(config: ZeroConfig, topology: Topology) -> ErrorFeedback | None:
    asked = config.zeropp_loco_param
    if asked is None or config.quantized_gradient_bits != 4:
        return None
    if topology.is_plain:
        raise ZeroConfigError(
            "zeropp_loco_param compensates errors of gradients between nodes, and all ranks are on one node: set "
            "zero_hpz_partition_size to the ranks of a node, or remove the section"
        )
    if config.mixed_precision == "fp16":
        raise ZeroConfigError(
            "zeropp_loco_param carries errors of gradients from step to step, and the loss scale of fp16 changes "
            "between steps: train in bf16, or remove the section"
        )
    return ErrorFeedback(asked.get("err_beta", 0.8), asked.get("reset_T", 1024))


def _limit(config: ZeroConfig, bits: int) -> float:
    limit = config.quantized_error_limit
    return {8: 0.05, 4: 0.25}[bits] if limit == "auto" else float(limit)
