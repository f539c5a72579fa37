"""Code of the user's by name, `package.module:name` or `path/to/file.py:name`; and code that was written down."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from ferrite.errors import UserError


def load_module(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"there is no file {name}", {"looked in": str(Path.cwd())})
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name and not name.startswith(problem.name):
            raise  # the user's module was found, and what it imports is missing
        raise UserError(f"there is no module {name!r}", {"looked in": f"{Path.cwd()} and the Python path"}) from None


def load_source(text: str, filename: str = "<dumped graph>") -> types.ModuleType:
    """A module of a text, such as a graph in a dump. `filename`: what tracebacks call it."""
    module = types.ModuleType("dumped")
    exec(compile(text, filename, "exec"), module.__dict__)
    return module
