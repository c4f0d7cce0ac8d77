"""``hf-zero convert``: training checkpoints of DeepSpeed and FSDP into ours, and ours into the stock Trainer's."""
