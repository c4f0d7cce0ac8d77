"""Which module of a package imports which: inside functions too, relative or not."""

import ast


def files(package):
    return sorted(package.rglob("*.py"))


def module(package, file):
    """`hf_zero/config/reader.py` as ("config", "reader"); a package's `__init__.py` as the package itself."""
    parts = file.relative_to(package).with_suffix("").parts
    return parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts


def found_in(package, file, at_import=False):
    """Yield (line, dotted name) of all imports: inside functions too, or only what importing the file runs."""
    home = (package.name, *module(package, file))
    if file.name != "__init__.py":
        home = home[:-1]
    elif len(home) == 2 and home[1] == "__init__":
        home = home[:1]
    tree = ast.parse(file.read_text())
    for node in tree.body if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = list(home[: len(home) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def target(package, dotted):
    """The module of ours that a dotted name lies in, as parts behind the package; None for other people's."""
    parts = dotted.split(".")
    if parts[0] != package.name:
        return None
    found = ()
    for part in parts[1:]:
        folder = package.joinpath(*found)
        if not ((folder / part).is_dir() or (folder / f"{part}.py").is_file()):
            break
        found = (*found, part)
    return found or ("__init__",)
