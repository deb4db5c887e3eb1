"""Device descriptions, the catalogue of device files, and rules for figures that they omit."""
