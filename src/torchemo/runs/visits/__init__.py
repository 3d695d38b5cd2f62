"""A store of your own tasks on disk: what comes back is recognised, used and said.

It holds support gradients, class means, class names and dates, never an image.
"""
