"""The ranks of a group: how they find, reach and agree with each other; no engine, no Megatron."""
