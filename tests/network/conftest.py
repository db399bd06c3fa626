"""What the test network shares with the tests of the native code."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "native"))
