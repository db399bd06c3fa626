"""Our options in Megatron's configuration and on its command line."""
