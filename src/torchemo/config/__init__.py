"""A run's options, presets and TOML; needs no torch."""
