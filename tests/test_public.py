"""The public surface fits one screen and does not wait for torch."""

import subprocess
import sys

import pytest

import torchemo


def test_every_public_name_loads_and_there_are_at_most_forty():
    assert len(torchemo.__all__) <= 40
    for name in torchemo.__all__:
        assert getattr(torchemo, name) is not None
    assert set(torchemo.__all__) <= set(dir(torchemo))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Emo'"):
        torchemo.Emo  # noqa: B018


def test_importing_the_package_does_not_import_torch():
    code = "import sys, torchemo, torchemo.config.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
