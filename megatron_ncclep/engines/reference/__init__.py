"""The readable engine: torch.distributed alone, on any backend."""
