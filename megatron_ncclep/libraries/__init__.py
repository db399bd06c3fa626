"""Shared libraries: where they are, which versions they have, and our own extension."""
