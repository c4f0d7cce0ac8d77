"""A hook of mkdocs: what a page links to outside of docs/ becomes the name of that file of the repository."""

import re


_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page, **kwargs) -> str:
    depth = page.file.src_uri.count("/")

    def named(link: re.Match) -> str:
        text, up, path, _ = link.groups()
        if up.count("../") <= depth:
            return link[0]
        return f"`{path}`" if path.strip("/") in text.strip("`/") else f"{text} (`{path}`)"

    return _OUTSIDE.sub(named, markdown)
