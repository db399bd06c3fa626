"""Our dispatcher while Megatron-Core generates text."""
