"""An example of a package that adds to opcast."""

from pathlib import Path

DEVICES = Path(__file__).parent / "devices"
