"""``python -m openengine_vllm`` and the console script ``openengine-vllm``."""

from __future__ import annotations

import sys

from openengine_vllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
