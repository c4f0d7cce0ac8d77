#!/bin/bash
# Slurm starts one torchrun per node, and that the ranks of the node: `sbatch examples/cluster/slurm_torchrun.sh`.
#SBATCH --job-name=hf_zero
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
set -eu

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HF_ZERO_CONFIG_FILE=recipes/accelerate_configs/zero3_hpz.yaml

# When a rank dies, all end; a job that is queued again goes on from its newest checkpoint.
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first_node:29500" \
    -m hf_zero.run train.py
