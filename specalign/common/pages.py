"""Pages of text or Markdown, written by Jinja templates."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specalign.common.text import markdown_text


def render_page(template: Path, **values: object) -> str:
    """The page of a template, with these values; the filter `markdown` escapes a text
    for Markdown."""
    pages = Environment(
        loader=FileSystemLoader(template.parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    pages.filters["markdown"] = markdown_text
    return pages.get_template(template.name).render(values)
