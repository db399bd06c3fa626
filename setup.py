"""Builds the package; everything declarative is in pyproject.toml.

`configs/` lives at the top of the tree, where people look for it, and is installed as package data
under `megatron_ncclep/configs`, where `megatron_ncclep.render` finds it again.

This version is pure Python: there is no extension to build yet (see csrc/README.md).
"""

from setuptools import setup

setup(
    packages=[
        "megatron_ncclep",
        "megatron_ncclep.engines",
        "megatron_ncclep.testing",
        "megatron_ncclep.training",
        "megatron_ncclep.configs",
    ],
    package_dir={"megatron_ncclep": "megatron_ncclep", "megatron_ncclep.configs": "configs"},
    package_data={"megatron_ncclep": ["py.typed"], "megatron_ncclep.configs": ["*/*.yaml"]},
)
