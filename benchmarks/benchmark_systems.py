"""The systems that the benchmark compares: each prepares the same seeded model and takes the same training steps."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import hf_zero


MAX_NORM = 1.0
OPTIMIZER = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}
# Only ever found by name: nothing here needs it.
DEEPSPEED = "deepspeed"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One system on one kind of work."""

    system: str
    size: str
    precision: str  # fp32 or bf16
    accumulation: int
    rows: int
    length: int
    device: str = "cpu"


# Llama-style decoders; the names say how many parameters, with untied embeddings. `deep` has so little arithmetic per
# layer that a step shows what a system itself costs.
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256},
    "deep": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 32, "vocab_size": 256},
    "33m": {"hidden_size": 512, "intermediate_size": 1344, "num_hidden_layers": 8, "vocab_size": 8000},
    "125m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 26112},
}


def build_model(size: str) -> nn.Module:
    """The model of this size; every call gives the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = SIZES[size]["hidden_size"] // 64 if size not in ("tiny", "deep") else 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(**SIZES[size], num_attention_heads=heads, max_position_embeddings=8192, use_cache=False)
        )


def make_batches(case: Case, rank: int, step: int) -> list[dict[str, Tensor]]:
    """The micro-batches of one step, different for every rank and step, the same for every system."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    shape = (case.accumulation, case.rows, case.length)
    ids = torch.randint(0, SIZES[case.size]["vocab_size"], shape, generator=draw).to(case.device)
    return [{"input_ids": micro, "labels": micro} for micro in ids]


class Session:
    """A system that has prepared a model; this one trains it in one process, without communication.

    Attributes:
        note: what a reader must know about this system's figures.
        stage: the ZeRO stage whose formulas hold for it.
    """

    note = "no communication: each rank trains alone on its own data"
    stage: int | None = None

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.case = case
        self.optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
        self.model = self.prepare(model)

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def window(self, last: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch; `last` is the one before the step."""
        return contextlib.nullcontext()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(self.case.device, torch.bfloat16, enabled=self.case.precision == "bf16"):
            return self.model(**batch).loss

    def backward(self, loss: Tensor) -> None:
        (loss / self.case.accumulation).backward()

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM, foreach=True)

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def counters(self) -> tuple[int, dict[str, int]] | None:
        """Bytes sent so far and calls by kind, where the system counts them itself."""
        return None

    def own_elements(self) -> int:
        """Elements that this rank's optimizer steps."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return sum(getattr(param, "_local_tensor", param).numel() for param in params)

    def close(self) -> None:
        """Let go of everything that holds the model."""


class Ddp(Session):
    note = "stock DistributedDataParallel, gradient_as_bucket_view; bf16 is autocast, as Trainer does"
    stage = 0

    def prepare(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def window(self, last: bool) -> AbstractContextManager:
        return contextlib.nullcontext() if last else self.model.no_sync()


class Zero(Session):
    """hf_zero at stage `stage`.

    `local` keeps gradients unreduced between the micro-batches of a window; `sent` has ranks send messages, as they do
    between machines, where they would read each other's memory; `compiled` has inductor compile each decoder layer.
    """

    note = ""

    def __init__(
        self,
        model: nn.Module,
        case: Case,
        stage: int,
        local: bool = False,
        sent: bool = False,
        compiled: bool = False,
    ) -> None:
        self.stage, self.local, self.sent, self.compiled = stage, local, sent, compiled
        super().__init__(model, case)

    def prepare(self, model: nn.Module) -> nn.Module:
        settings = {
            "zero_stage": self.stage,
            "mixed_precision": "bf16" if self.case.precision == "bf16" else "no",
            "no_sync": "local" if self.local else "reduce",
            "peer_memory": not self.sent,
        }
        self.engine = hf_zero.shard(model, self.optimizer, settings)
        if self.compiled:
            torch.compiler.reset()  # of a layer that is compiled again and again, torch gives up after some rounds
            for layer in model.model.layers:
                layer.compile()
        return model

    def window(self, last: bool) -> AbstractContextManager:
        return contextlib.nullcontext() if last else self.engine.no_sync()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss / self.case.accumulation)

    def clip(self) -> None:
        self.engine.clip_grad_norm_(MAX_NORM)

    def counters(self) -> tuple[int, dict[str, int]] | None:
        comm = self.engine.comm
        return sum(comm.traffic.bytes_sent.values()), dict(comm.traffic.calls)

    def close(self) -> None:
        if self.engine.comm.watchdog is not None:
            self.engine.comm.watchdog.stop()


class Fsdp2(Session):
    """torch's fully_shard as its experts use it: embedding and head are units, the last unit stays for backward.

    `keep` holds weights from the first forward of a window to its last backward (ZeRO-2's memory); `local` sums
    micro-batches unsharded and reduces once.
    """

    note = "embedding and head as own units; fused AdamW on sharded tensors"

    def __init__(self, model: nn.Module, case: Case, keep: bool, local: bool) -> None:
        self.keep, self.local = keep, local
        super().__init__(model, case)
        # The optimizer was made for the parameters as they were before.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **OPTIMIZER)

    def mesh(self) -> DeviceMesh:
        return dist.init_device_mesh(self.case.device, (dist.get_world_size(),))

    def prepare(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if self.case.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        settings = {"mesh": self.mesh(), "mp_policy": policy}
        decoder = model.model
        fully_shard(decoder.embed_tokens, **settings, reshard_after_forward=not self.keep)
        for layer in decoder.layers:
            fully_shard(layer, **settings, reshard_after_forward=not self.keep)
        fully_shard([decoder.norm, model.lm_head], **settings, reshard_after_forward=False)
        return fully_shard(model, **settings, reshard_after_forward=not self.keep)

    def window(self, last: bool) -> AbstractContextManager:
        if self.local:
            self.model.set_requires_gradient_sync(last)
        if self.keep:
            self.model.set_reshard_after_backward(last)
        return contextlib.nullcontext()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


class DeepSpeed(Session):
    """DeepSpeed with fused AdamW and with buckets and limits that fit the model's units."""

    note = "fused torch AdamW; bucket and live limits fitted to the largest unit; its own clipping inside step()"

    def __init__(self, model: nn.Module, case: Case, stage: int) -> None:
        self.stage_asked = stage
        super().__init__(model, case)

    def prepare(self, model: nn.Module) -> nn.Module:
        deepspeed = importlib.import_module(DEEPSPEED)
        layer = sum(param.numel() for param in model.model.layers[0].parameters())
        largest = max(layer, model.lm_head.weight.numel())
        settings = {
            "train_micro_batch_size_per_gpu": self.case.rows,
            "gradient_accumulation_steps": self.case.accumulation,
            "gradient_clipping": MAX_NORM,
            "bf16": {"enabled": self.case.precision == "bf16"},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": self.stage_asked,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_scatter": True,
                "reduce_bucket_size": largest,
                "allgather_bucket_size": largest,
                "stage3_prefetch_bucket_size": layer,
                "stage3_max_live_parameters": 2 * largest,
                "stage3_max_reuse_distance": largest,
                "stage3_param_persistence_threshold": 10_000,
            },
        }
        self.engine, self.optimizer, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=settings)
        return self.engine

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)  # divides by the accumulation steps itself
        if not self._is_boundary():
            self.engine.step()

    def _is_boundary(self) -> bool:
        return self.engine.is_gradient_accumulation_boundary()

    def clip(self) -> None:
        """Part of step()."""

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        """Part of step()."""

    def own_elements(self) -> int:
        return 0

    def close(self) -> None:
        self.engine.destroy()


# Every system by name: what makes it, and with which settings.
SYSTEMS: dict[str, tuple[type[Session], dict]] = {
    "single": (Session, {}),
    "ddp": (Ddp, {}),
    "zero0": (Zero, {"stage": 0}),
    "zero0-sent": (Zero, {"stage": 0, "sent": True}),
    "zero1": (Zero, {"stage": 1}),
    "zero1-sent": (Zero, {"stage": 1, "sent": True}),
    "zero2": (Zero, {"stage": 2}),
    "zero2-sent": (Zero, {"stage": 2, "sent": True}),
    "zero2-local": (Zero, {"stage": 2, "local": True}),
    "zero3": (Zero, {"stage": 3}),
    "zero3-sent": (Zero, {"stage": 3, "sent": True}),
    "zero3-local": (Zero, {"stage": 3, "local": True}),
    "zero3-compiled": (Zero, {"stage": 3, "compiled": True}),
    "fsdp2": (Fsdp2, {"keep": False, "local": False}),
    "fsdp2-keep": (Fsdp2, {"keep": True, "local": False}),
    "fsdp2-keep-local": (Fsdp2, {"keep": True, "local": True}),
    "deepspeed1": (DeepSpeed, {"stage": 1}),
    "deepspeed2": (DeepSpeed, {"stage": 2}),
    "deepspeed3": (DeepSpeed, {"stage": 3}),
}


def reads_memory(system: str) -> bool:
    """Whether, on one machine, its ranks read each other's memory: the kernel's counter of messages sees nothing."""
    kind, settings = SYSTEMS[system]
    return kind is Zero and not settings.get("sent")


def why_not(system: str, accumulation: int) -> str | None:
    """The reason why a system does not take part, None where it does."""
    kind, settings = SYSTEMS[system]
    if kind is DeepSpeed and importlib.util.find_spec(DEEPSPEED) is None:
        return "DeepSpeed is not installed"
    if settings.get("local") and accumulation == 1:
        return "the same as without -local: one micro-batch per step"
    return None


def give_back_memory() -> None:
    """Return what was freed to the machine: sessions are cycles of objects, and all are opened in one process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def open_session(base: nn.Module, case: Case) -> Iterator[Session]:
    """A copy of `base` prepared by the case's system."""
    give_back_memory()
    kind, settings = SYSTEMS[case.system]
    session = kind(copy.deepcopy(base).to(case.device), case, **settings)
    try:
        yield session
    finally:
        session.close()
