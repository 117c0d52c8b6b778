"""Pages of the source files that the documentation links to: links work in the repository and on the site."""

import ast
import os
import re
from pathlib import Path

_LINK = re.compile(r"\]\(([^)\s:#]+)(?:#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash"}


def find_links(text: str, page: Path, docs: Path) -> dict[Path, list[str]]:
    """Return the targets of relative links that leave the documentation, as paths from the repository root.

    The values are the links as they are written.
    """
    found: dict[Path, list[str]] = {}
    for match in _LINK.finditer(text):
        target = Path(os.path.normpath(page.parent / match[1]))
        if target.is_relative_to(docs.parent) and not target.is_relative_to(docs):
            found.setdefault(target.relative_to(docs.parent), []).append(match[0][2:-1])
    return found


def listed_files(folder: Path) -> list[Path]:
    """Return the modules and packages that the page of a folder links to."""
    return [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]


def source_uri(path: Path) -> str:
    """Return the place of a source file's page in the documentation."""
    return f"source/{path.as_posix()}.md"


def source_page(root: Path, path: Path) -> str:
    """Return the Markdown of the page of a file, or of a folder: its modules with their summaries."""
    header = f"---\ntitle: {path.name}\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n"
    heading = f"# {path.name} {{: .source-title }}\n\n`{path.as_posix()}`\n{{: .setting-type }}\n\n"
    if (root / path).is_dir():
        return header + heading + _listing(root / path)
    language = _LANGUAGES.get(path.suffix, "text")
    text = (root / path).read_text(encoding="utf-8")
    return f'{header}{heading}````{language} linenums="1"\n{text.rstrip()}\n````\n'


def _listing(folder: Path) -> str:
    rows = ["| file | |", "|---|---|"]
    for file in sorted(folder.iterdir()):
        if file.suffix == ".py":
            rows.append(f"| [`{file.name}`]({folder.name}/{file.name}.md) | {_summary(file)} |")
        elif (file / "__init__.py").exists():
            rows.append(f"| [`{file.name}/`]({folder.name}/{file.name}.md) | {_summary(file / '__init__.py')} |")
        elif file.is_file():
            rows.append(f"| `{file.name}` | |")
    return "\n".join(rows) + "\n"


def _summary(file: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|").replace("<", "&lt;")
