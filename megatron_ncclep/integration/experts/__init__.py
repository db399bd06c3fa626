"""Experts that compute each linear layer with one grouped GEMM (`--ncclep-experts grouped`).

They are Megatron's own experts, with its parameters, initialisation and checkpoints, but a
different `forward` (grouped.py).  The device reads where each expert's rows are, so the host never
waits for that.
"""
