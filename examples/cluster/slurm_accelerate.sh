#!/bin/bash
# Slurm starts one `accelerate launch` per node, with the YAML that you have: `sbatch examples/cluster/slurm_accelerate.sh`.
#SBATCH --job-name=hf_zero
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
set -eu

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# SLURM_NODEID differs on each node, so it must be read there and not here.
srun bash -c "accelerate launch --config_file recipes/accelerate_configs/zero3_hpz.yaml \
    --num_machines $SLURM_NNODES --num_processes $((SLURM_NNODES * 8)) --machine_rank \$SLURM_NODEID \
    --main_process_ip $first_node --main_process_port 29500 train.py"
