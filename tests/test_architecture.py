"""Who may import whom, what the library never uses, and which files keep to Python 3.10: read from the source."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.environments import interpreters

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("scheduler", "providers", "shm", "tools")
FILES = sorted(path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# The first matching prefix of a file decides which of Outrider's modules it may import, beside those of its own folder.
CONTRACT = ("outrider.providers.contract", "outrider.providers.wire", "outrider.shm")
WORKER = tuple(f"outrider.providers.{path.stem}" for path in (ROOT / "providers").glob("[a-z]*.py"))
FOLDERS = sorted(path.parent.name for path in (ROOT / "providers").glob("*/__init__.py") if path.parent.name != "wire")
ALLOWED: dict[str, tuple[str, ...]] = {
    "scheduler/outrider/": ("outrider.scheduler", "outrider.tools"),
    "scheduler/": ("outrider.scheduler", "outrider.__version__", *CONTRACT),
    "providers/contract.py": CONTRACT,
    "providers/wire/": CONTRACT,
    **{f"providers/{name}/": (f"outrider.providers.{name}", *CONTRACT) for name in FOLDERS},
    "providers/chaos/": (
        "outrider.providers.chaos",
        "outrider.providers.loading",
        "outrider.providers.adapters",
        *CONTRACT,
    ),  # wraps any other; fmt: skip
    "providers/": (*WORKER, *CONTRACT),
    "shm/": ("outrider.shm",),
    "tools/": ("outrider.tools", "outrider.scheduler", "outrider.__version__", *CONTRACT),
}
# What a file may import beyond the standard library and Outrider.
OUTSIDE: dict[str, set[str]] = {
    "providers/contract.py": {"numpy"},
    "providers/wire/": {"numpy", "msgpack", "ml_dtypes"},
    "providers/cpu/": {"numpy", "onnx", "ml_dtypes"},
    "providers/null/": {"numpy"},
    "providers/ort/": {"numpy", "onnxruntime", "ml_dtypes"},
    "providers/chaos/": {"numpy"},
    "providers/": {"numpy", "msgpack", "zmq"},
    "shm/": {"numpy"},
    "scheduler/": {"numpy", "msgpack", "zmq", "onnx", "google", "ml_dtypes"},  # google.protobuf comes with onnx
    "tools/": {"numpy", "onnx", "rich", "zmq", "msgpack", "onnxruntime", "ml_dtypes"},
}
NEVER = {"pickle", "multiprocessing", "cloudpickle", "dill", "marshal", "shelve"}


def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(), file)


def _imports(file: str) -> Iterator[tuple[int, str]]:
    """(line, module) of each import; `from a import b` counts as `a.b`, which may be a module or a name in one."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{'.' * node.level}{node.module}.{alias.name}"


def _rule(rules: dict[str, Any], file: str) -> Any:
    return next(rule for prefix, rule in rules.items() if file.startswith(prefix))


def test_all_packages_are_seen() -> None:
    assert {file.split("/")[0] for file in FILES} == set(PACKAGES)
    assert "providers/wire/graph.py" in FILES


def test_imports_go_one_way() -> None:
    wrong = []
    for file in FILES:
        allowed = _rule(ALLOWED, file)
        for line, module in _imports(file):
            if module.startswith("."):
                wrong.append(f"{file}:{line} imports relatively")
            elif module.startswith("outrider.") and not any(f"{module}.".startswith(f"{ok}.") for ok in allowed):
                wrong.append(f"{file}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_only_declared_packages_are_used() -> None:
    wrong = []
    for file in FILES:
        allowed = sys.stdlib_module_names - NEVER | _rule(OUTSIDE, file) | {"outrider"}
        wrong += [f"{file}:{line} imports {name}" for line, name in _imports(file) if name.split(".")[0] not in allowed]
    assert not wrong, "\n".join(wrong)


def _faults(file: str) -> Iterator[str]:
    for node in ast.walk(_tree(file)):
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and node.attr in ("fork", "forkpty"):
            yield f"{where} forks"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == "__del__":
            yield f"{where} defines __del__"
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{where} catches everything"
        elif isinstance(node, ast.ExceptHandler) and node.name and _logs(node, node.name):
            yield f"{where} logs an error, whose frames a kept record would keep, and not its words"
        elif isinstance(node, ast.Name) and node.id == "print" and not file.startswith("tools/"):
            yield f"{where} prints"


def _logs(handler: ast.ExceptHandler, name: str) -> bool:
    """Whether a handler passes the error itself to a logger."""
    calls = [node for node in ast.walk(handler) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    logged = [
        call for call in calls if isinstance(call.func.value, ast.Name) and call.func.value.id in ("log", "_logger")
    ]
    return any(isinstance(one, ast.Name) and one.id == name for call in logged for one in call.args)


def test_every_package_is_installed() -> None:
    """pyproject.toml lists packages by name: one that is missing there would be missing in a wheel only."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {os.path.dirname(file) for file in FILES if file.endswith("/__init__.py")}
    names = {"outrider" if one == "scheduler/outrider" else f"outrider.{one.replace('/', '.')}" for one in folders}
    assert sorted(listed) == sorted(names)


def test_no_fork_no_finalizer_no_print_no_bare_except() -> None:
    wrong = [fault for file in FILES for fault in _faults(file)]
    assert not wrong, "\n".join(wrong)


def test_files_stay_small() -> None:
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in FILES}
    assert not {file: length for file, length in lengths.items() if length > 600}


# What runs in a worker under another interpreter.
PYTHON_310 = [file for file in FILES if file.startswith(("shm/", "providers/"))]


def test_workers_files_are_python_310() -> None:
    for file in PYTHON_310:
        ast.parse((ROOT / file).read_text(), file, feature_version=(3, 10))


@pytest.mark.parametrize("python", [sys.executable, *interpreters("3.10")])
def test_workers_files_compile_under_python_310_where_there_is_one(python: str) -> None:
    script = "import sys\nfor name in sys.argv[1:]: compile(open(name).read(), name, 'exec')"
    command = [python, "-c", script, *(str(ROOT / file) for file in PYTHON_310)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _modules_after(statement: str) -> set[str]:
    command = [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return set(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split())


def test_worker_pulls_in_neither_scheduler_nor_onnx() -> None:
    loaded = _modules_after("import outrider.providers.worker")
    wrong = sorted(
        name for name in loaded if re.match(r"(onnx|onnxruntime|rich|outrider\.(scheduler|tools))(\.|$)", name)
    )
    assert not wrong


def test_shm_pulls_in_nothing_of_ours() -> None:
    names = ", ".join(f"outrider.shm.{path.stem}" for path in (ROOT / "shm").glob("[a-z]*.py"))
    loaded = {name for name in _modules_after(f"import {names}") if name.startswith("outrider.")}
    assert {name for name in loaded if not name.startswith("outrider.shm")} == set()


def test_package_is_lazy() -> None:
    assert not {name for name in _modules_after("import outrider") if name.startswith("outrider.")}


def test_public_names_are_found_in_a_fresh_process() -> None:
    loaded = _modules_after("import outrider; assert outrider.InferenceSession is outrider.scheduler.InferenceSession")
    assert "outrider.scheduler.session" in loaded


def test_both_packages_offer_the_same_names() -> None:
    import outrider
    from outrider import scheduler

    assert outrider.__all__ == scheduler.__all__
    assert all(getattr(outrider, name) is getattr(scheduler, name) for name in outrider.__all__)
    assert set(outrider.__all__) < set(dir(outrider))
    with pytest.raises(AttributeError, match="it offers CancelToken, ExecutionMode"):
        outrider.InferenceSesion  # noqa: B018
