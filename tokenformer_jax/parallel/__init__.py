"""Many devices and many processes: how arrays are split, and who speaks for all."""
