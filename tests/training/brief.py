"""Presets that take less time."""

from torchemo.config.run import RunConfig
from torchemo.config.toml import from_dict, to_dict
from torchemo.lab.study.plan import _set_where_known


def with_two_inner_steps(config):
    """Return a configuration whose learner, if it has inner steps, and its target take two."""
    plain = to_dict(config)
    _set_where_known(plain, ("learner.steps=2", "learner.target_steps=2"))
    return from_dict(plain, RunConfig, where="a preset")
