"""MkDocs hooks: generated reference pages, pages for linked source files, equations as MathML, links to settings."""

import html
import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import command_reference
import settings_reference
from source_pages import find_links, listed_files, source_page, source_uri

ROOT = Path(__file__).parents[2]
_MATH = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
_MARKUP = re.compile(r"(<pre\b.*?</pre>|<a\b.*?</a>|<h\d.*?</h\d>)", re.DOTALL)
_CODE = re.compile(r"<code>([a-z_]+(?:\.[a-zA-Z_]+)+)</code>")
_PREFERRED = {
    "pretrain": ("pretraining", "continue", "masking", "scaling", "electra", "recipes"),
    "shrink": ("elastic", "pruning", "exits", "vocabulary", "augmentation", "dynabert"),
}
"""Page of settings to link from these pages, for paths that several recipes have."""
_anchors: dict[str, list[tuple[str, str]]] = {}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages: reference and linked source files."""
    _anchors.update(settings_reference.anchors())
    for uri, text in (settings_reference.pages() | command_reference.pages(_anchors)).items():
        boost = 0.5 if uri.startswith("reference/python") else 2
        text = f"---\nsearch:\n  boost: {boost}\n---\n\n{text}"
        files.append(File.generated(config, uri, content=text))
    docs = Path(config.docs_dir)
    linked = {
        target
        for page in files.documentation_pages()
        if page.abs_src_path is not None
        for target in find_links(page.content_string, docs / page.src_uri, docs)
    }
    pending, done = sorted(linked), set[Path]()
    while pending:
        path = pending.pop()
        if path in done or not (ROOT / path).exists():
            continue
        done.add(path)
        files.append(File.generated(config, source_uri(path), content=source_page(ROOT, path)))
        if (ROOT / path).is_dir():
            pending += [inner.relative_to(ROOT) for inner in listed_files(ROOT / path)]
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside the documentation to their source pages."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    docs = Path(config.docs_dir)
    source = docs / page.file.src_uri
    for target, written in find_links(markdown, source, docs).items():
        if files.get_file_from_path(source_uri(target)) is None:
            continue
        relative = os.path.relpath(docs / source_uri(target), source.parent)
        for link in written:
            markdown = markdown.replace(f"]({link})", f"]({relative})")
    return markdown


def on_page_content(content: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Render equations as MathML, and link paths of settings to their description."""
    content = _MATH.sub(_mathml, content)
    if page.file.src_uri.startswith(("reference/settings", "source/")):
        return content
    parts = _MARKUP.split(content)
    return "".join(part if index % 2 else _link_settings(part, page, files) for index, part in enumerate(parts))


def _mathml(match: re.Match[str]) -> str:
    latex = html.unescape(match[2]).strip()
    is_block = match[1] == "div"
    latex = latex.removeprefix(r"\[" if is_block else r"\(").removesuffix(r"\]" if is_block else r"\)").strip()
    mathml = convert(latex, display="block" if is_block else "inline")
    mathml = mathml.replace("<mi>log</mi><m", '<mi>log</mi><mspace width="0.17em"/><m')
    return f'<div class="equation">{mathml}</div>' if is_block else mathml


def _link_settings(text: str, page: Page, files: Files) -> str:
    def link(match: re.Match[str]) -> str:
        places = _anchors.get(match[1])
        if not places:
            return match[0]
        uri, anchor = sorted(places, key=lambda place: not _is_preferred(place[0], page))[0]
        target: Any = files.get_file_from_path(uri)
        return f'<a class="setting-link" href="{target.url_relative_to(page.file)}#{anchor}">{match[0]}</a>'

    return _CODE.sub(link, text)


def _is_preferred(uri: str, page: Page) -> bool:
    name = Path(page.file.src_uri).stem
    return name in _PREFERRED.get(Path(uri).stem, ())
