"""The programs whose places are changed in memory, and the releases that the tests run with."""

from __future__ import annotations

from typing import NamedTuple

from packaging.version import Version


class Program(NamedTuple):
    """One such program.

    Attributes:
        name: in messages.
        oldest, newest: of the releases that the tests run with.
        feature: what is not available where a place is not as expected.
    """

    name: str
    oldest: str
    newest: str
    feature: str

    def is_tested(self, version: str) -> bool:
        """Whether a version is in the range that the tests run with.

        The part after a `+` does not count: if Megatron-Core 0.18 or later is installed inside any
        git checkout, it adds the commit of that checkout.
        """
        found = Version(Version(version).public)
        return Version(self.oldest) <= found <= Version(self.newest)

    @property
    def not_known(self) -> str:
        """The end of a message about a place that is not as expected."""
        return (
            f"this {self.name} is not one that megatron_ncclep knows ({self.oldest} to "
            f"{self.newest})"
        )


MEGATRON = Program("Megatron-Core", "0.16.1", "0.20.0", "--moe-token-dispatcher-type ncclep")
VLLM = Program("vLLM", "0.24", "0.33", "--all2all-backend ncclep")
SGLANG = Program("SGLang", "0.5.23", "0.5.23", "--moe-a2a-backend ncclep")
