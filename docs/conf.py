"""Build the documentation site: ``make docs``."""

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from generate import write_reference  # noqa: E402 -- found beside this file

project = "torchemo"
author = "The torchemo developers"
copyright = "the torchemo developers, MIT license"
release = metadata.version("torchemo")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = [".md"]
exclude_patterns = ["_site"]
default_role = "literal"
html_theme = "furo"
html_title = "torchemo"
html_copy_source = False
html_theme_options = {"sidebar_hide_name": False}

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

napoleon_use_ivar = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
# Shapes are written as strings (jaxtyping); they are read as they stand.
autodoc_preserve_defaults = True

write_reference(HERE / "reference" / "generated")


def setup(app: Any) -> None:
    """Lead links to files beside the documents to their copies on the site."""
    app.connect("source-read", _relink)


def _relink(app: Any, name: str, source: list[str]) -> None:
    for page in ("SECURITY", "CONTRIBUTING"):
        source[0] = source[0].replace(
            f"](../{page}.md)", f"](reference/generated/{page.lower()}.md)"
        )
