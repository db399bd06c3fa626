"""The engine over NVIDIA's libnccl_ep."""
