"""What runs a program as a fresh Python would."""

from __future__ import annotations

from fixtures import closed
from forked_python import server

python = closed(server)
