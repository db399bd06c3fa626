"""Megatron's options that the dispatcher refuses, and when it checks them."""
