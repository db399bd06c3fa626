"""The engine for several nodes: torch.distributed between them, another engine inside."""
