"""This project's own engine: kernels on NCCL windows, within one NVLink domain."""
