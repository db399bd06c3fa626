"""The readable engine: only torch.distributed, on any backend."""
