"""pytest imports test files by path: a module that several of them share has to be found by its name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
