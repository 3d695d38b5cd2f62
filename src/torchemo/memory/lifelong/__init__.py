"""A memory that continues to learn in use: tasks that come back are recognised and recalled.

Past visits of a task are more examples of the same task. Their support gradients, averaged with the gradient
at hand, give the step that all examples together would give; no example is kept.
"""
