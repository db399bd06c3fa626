"""Where Megatron-Core meets the dispatcher: hooks, options, and whatever else goes with MoE."""
