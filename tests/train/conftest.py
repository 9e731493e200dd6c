"""Makes ``tiny_family`` importable and its entries registered."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
