"""Experts that compute with one grouped GEMM a layer and step (`--ncclep-experts grouped`).

They are Megatron's own experts, with its parameters, initialisation and checkpoints, and another
`forward` (grouped.py).  Where an expert's rows are is read on the device, so that the host never
waits for it.
"""
