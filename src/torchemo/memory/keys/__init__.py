"""Task keys (Eq. 4) and how they are trained."""
