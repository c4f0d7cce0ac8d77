"""A real run by messages begins and waits for its collectives where the planner's log of a step does."""

import torch
import transformers

from hf_zero import ZeroConfig
from hf_zero.comm.communicator import Communicator
from hf_zero.core.engine import ZeroEngine
from hf_zero.planning.enqueued import Enqueued, Mark, Move, Wait
from hf_zero.planning.model import BatchShape, build
from hf_zero.planning.trace import Scenario, trace
from hf_zero.tools.operations import Operation
from tests.support.harness import distributed


LENGTH = 16
CONFIG = transformers.LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    vocab_size=256,
    use_cache=False,
    architectures=["LlamaForCausalLM"],
)


def _last_step(log):
    """Collectives as they begin and are waited for; with a wait, how many products were launched since it began."""
    marks = [number for number, event in enumerate(log.events) if event == Mark("step")]
    found, products, begun = [], 0, {}
    for event in log.events[: marks[-1]]:
        if isinstance(event, Operation):
            products += event.flops > 0
        elif isinstance(event, Move):
            begun[event] = products
            found.append(("begins", event.kind, event.label))
        elif isinstance(event, Wait):
            found.append(("ends", event.move.kind, event.move.label, products - begun[event.move]))
        elif event == Mark("step"):
            found.clear()
    return found


@distributed(world_size=2)
def test_collectives_begin_and_are_waited_for_where_the_planner_says():
    for stage in (2, 3):
        config = ZeroConfig(zero_stage=stage, peer_memory=False)
        planned = Enqueued()
        scenario = Scenario(
            config=config, world_size=2, batch=BatchShape(rows=1, length=LENGTH), backend="gloo", accumulation=2
        )
        trace(build(CONFIG), scenario, log=planned)

        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(CONFIG)
        real, comm = Enqueued(), Communicator.connect(peer_memory=False)
        comm._transport = real.noting(comm._transport)
        engine = ZeroEngine(model, config, group=comm, device=torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters())
        engine.attach_optimizer(optimizer)
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
        with real.recording():
            for _ in range(3):
                real.mark("step")
                for micro in range(2):
                    if micro == 0:
                        with engine.no_sync():
                            engine.backward(model(input_ids=ids, labels=ids).loss)
                    else:
                        engine.backward(model(input_ids=ids, labels=ids).loss)
                engine.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            real.mark("step")
        expected, found = _last_step(planned), _last_step(real)
        assert found == expected, [pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]][:5]
        hidden = {one[2] for one in found if one[:2] == ("ends", "all-gather") and one[3]}
        assert hidden, "some gathers are under way under products"
