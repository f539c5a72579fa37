"""Model tests never reach for the network: every weight is random, and a lookup on the hub fails at once."""

from __future__ import annotations

import os

# Before the first import of transformers, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
