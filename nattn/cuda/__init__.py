"""Attention on NVIDIA GPUs, through numba.cuda."""
