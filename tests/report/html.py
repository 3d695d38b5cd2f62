"""A page taken apart with the standard library alone."""

import re
from collections import Counter
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr", "input", "wbr"}


class Page(HTMLParser):
    """Elements with their attributes, the text of the page, and tags that do not fit together."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.words, self.open, self.unbalanced = [], [], [], []
        self.feed(text)
        self.close()
        self.unbalanced += self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    @property
    def references(self):
        """Everything the page could fetch or jump to."""
        named = ("src", "href", "xlink:href", "srcset", "action", "data", "poster", "background")
        found = [a[name] for _, a in self.elements for name in named if a.get(name)]
        styles = [a["style"] for _, a in self.elements if "style" in a]
        return found + [url for style in styles for url in re.findall(r"url\(([^)]*)\)", style)]

    @property
    def repeated_ids(self):
        counted = Counter(a["id"] for _, a in self.elements if "id" in a)
        return [name for name, count in counted.items() if count > 1]


def broken_laws(text):
    """Say what of a self-contained, accessible page this text is not."""
    page = Page(text)
    broken = []
    tags = {tag for tag, _ in page.elements}
    broken += [f"<{t}>" for t in tags & {"script", "iframe", "object", "embed", "base", "form"}]
    broken += [f"{n} of {t}" for t, a in page.elements for n in a if n.startswith("on")]
    broken += [r for r in page.references if not r.startswith(("#", "data:"))]
    broken += re.findall(r"@import[^;]*", text)
    broken += [f"unbalanced {tag}" for tag in page.unbalanced]
    broken += [f"id {name} twice" for name in page.repeated_ids]
    broken += ["img without alt" for a in page.all("img") if not a.get("alt")]
    broken += ["svg without label" for a in page.all("svg") if not a.get("aria-label")]
    broken += ["th without scope" for a in page.all("th") if a.get("scope") not in ("col", "row")]
    ids = {a["id"] for _, a in page.elements if "id" in a}
    broken += [r for r in page.references if r.startswith("#") and r[1:] not in ids]
    if len(text.encode()) > 2_000_000:
        broken.append("more than 2 MB")
    return broken
