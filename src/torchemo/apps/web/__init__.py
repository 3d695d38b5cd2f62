"""``torchemo serve``: a page on this machine that teaches a trained run new classes and asks it."""
