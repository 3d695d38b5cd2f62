"""The frame of a page: templates that escape everything they are given."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from torchemo.report.format import breakable, number, p_value


def render(template: str, **context: Any) -> str:
    """Fill a template; every text is escaped unless it is a figure of our own."""
    # The names end in .j2, from which jinja could not tell that they are HTML: escaping is always on.
    environment = Environment(
        loader=PackageLoader("torchemo.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    environment.filters["p_value"] = p_value
    environment.filters["breakable"] = breakable
    return environment.get_template(template).render(**context)
