"""Models whose ranks would run different layers run the same ones at stage 3."""

import torch
import torch.distributed as dist

import hf_zero
from tests.support.harness import distributed


@distributed(world_size=2)
def test_dropped_layers_are_run_on_every_rank():
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=48,
        layerdrop=0.5,
        conv_dim=(16,),
        conv_kernel=(8,),
        conv_stride=(8,),
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
    )
    accelerator = hf_zero.ZeroAccelerator(zero_plugin=hf_zero.ZeroPlugin(zero_stage=3))
    model = Wav2Vec2Model(config).train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(100 + dist.get_rank())  # the ranks drop different layers
    for _ in range(4):
        accelerator.backward(model(torch.randn(2, 400)).last_hidden_state.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    sums = torch.stack([p.detach().double().sum() for p in model.parameters()])
    other = sums.clone()
    dist.broadcast(other, 0)
    assert torch.equal(sums, other) and sums.isfinite().all()
