"""Where Megatron-Core meets the dispatcher: hooks, options, checks, experts and inference."""
