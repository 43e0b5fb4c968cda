"""RL post-training of language models on CUDA GPUs, Ascend NPUs or a plain CPU, composed by Hydra from one command."""
