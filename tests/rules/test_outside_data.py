"""The rule for data from outside: nothing that reads it can run it as code."""

import ast

import pytest

from tests.rules.source_tree import dotted, modules

SERVED = ("services", "kvtransfer")
RUN_CODE = {"eval", "exec", "compile", "__import__"}  # functions of Python's own
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"os.system", "os.popen", "torch.load", "yaml.load", "yaml.unsafe_load", "numpy.load", "np.load"}


def is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def unsafe(source: ast.AST) -> list[str]:
    """What in a syntax tree could run data as code, with its lines."""
    found = []
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names if name.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_MODULES:
            found.append((node.lineno, str(node.module)))
        elif isinstance(node, ast.Call):
            called = dotted(node.func)
            if called in RUN_CODE | UNSAFE_CALLS:
                found.append((node.lineno, called))
            for keyword in node.keywords:
                if keyword.arg in ("shell", "allow_pickle") and not is_false(keyword.value):
                    found.append((node.lineno, f"{called}({keyword.arg}=...)"))
    return [f"{line} {what}" for line, what in found]


def test_nothing_that_serves_runs_data_as_code():
    found = [f"{module.path}:{what}" for module in modules(*SERVED) for what in unsafe(module.tree)]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "yaml.load(text)",
        "subprocess.run(line, shell=True)",
        "reader(path, allow_pickle=True)",
    ],
)
def test_what_would_is_found(source: str):
    assert len(unsafe(ast.parse(source))) == 1
