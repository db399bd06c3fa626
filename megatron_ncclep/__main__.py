"""`python -m megatron_ncclep` and `torchrun -m megatron_ncclep`: the `ncclep` command."""

import sys

from megatron_ncclep.cli import main

if __name__ == "__main__":
    sys.exit(main())
