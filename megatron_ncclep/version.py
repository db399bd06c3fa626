"""The version, in a file that setup can read without importing the package."""

__version__ = "0.1.0"
