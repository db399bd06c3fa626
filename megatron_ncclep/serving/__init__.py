"""What the hooks of vLLM and SGLang have in common: a layer's two modes, and failures."""
