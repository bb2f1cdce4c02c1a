"""The signatures of FlashInfer's `MoeAlltoAll` and its functions, read from its wheel without importing it.

    python -m tests.integrations.flashinfer.signatures flashinfer_python-0.7.2-py3-none-any.whl

writes `signatures.json`, which the tests compare with ours. The tests that have the wheel compare it with the file.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

VERSION = "0.7.2"
STORED = Path(__file__).with_name("signatures.json")
WHEEL = f"flashinfer_python-{VERSION}-py3-none-any.whl"
_MODULE = "flashinfer/comm/trtllm_moe_alltoall.py"
_ENUMS = "flashinfer/tllm_enums.py"


def read_wheel(wheel):
    """Parameters of all that the module exports, as text; and the members of `SfLayout`."""
    with zipfile.ZipFile(wheel) as files:
        module, enums = (ast.parse(files.read(name)) for name in (_MODULE, _ENUMS))
    exported = next(
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    found = {"version": VERSION, "functions": {}, "methods": {}, "SfLayout": {}}
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name in exported:
            found["functions"][node.name] = parameters(node)
        if isinstance(node, ast.ClassDef) and node.name in exported:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and (
                    method.name == "__init__" or not method.name.startswith("_")
                ):
                    found["methods"][method.name] = parameters(method)
    for node in enums.body:
        if isinstance(node, ast.ClassDef) and node.name == "SfLayout":
            pairs = [each for each in node.body if isinstance(each, ast.Assign)]
            found["SfLayout"] = {each.targets[0].id: ast.literal_eval(each.value) for each in pairs}
    return found


def parameters(function):
    """The parameters in a function's source, as they are written, without annotations, `self` and `cls`."""
    if "property" in map(ast.unparse, function.decorator_list):
        return "property"
    given = function.args
    for each in (*given.args, *given.kwonlyargs):
        each.annotation = None
    names = [each for each in given.args if each.arg not in ("self", "cls")]
    return ast.unparse(
        ast.arguments([], names, given.vararg, given.kwonlyargs, given.kw_defaults, None, given.defaults)
    )


if __name__ == "__main__":
    STORED.write_text(json.dumps(read_wheel(sys.argv[1]), indent=1) + "\n")
