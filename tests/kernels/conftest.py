"""Which folders of checks belong to this process: those below are for test_triton.py to start."""

import os

collect_ignore = [] if "TRITON_INTERPRET" in os.environ else ["compiled", "interpreted"]
