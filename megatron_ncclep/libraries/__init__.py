"""Shared libraries: their locations and versions, and our own extension."""
