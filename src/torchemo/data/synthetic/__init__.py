"""Tasks that need no download: drawn images and families of curves."""
