"""The architecture is a test: who may import whom, and what may stand nowhere."""

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("autopar", "solver", "cost_models", "benchmarks", "examples", "tests")
MAX_LINES = 400  # of a file
MAX_FUNCTION_LINES = 60  # without its docstring; how many branches one may have is for ruff (pyproject.toml)

MAY_NOT = {
    "solver": {"torch", "autopar", "cost_models", "benchmarks", "sympy"},  # numbers in, numbers out
    "cost_models": {"torch", "autopar", "solver", "benchmarks", "pulp", "highspy"},  # hardware and steps
    "autopar": {"benchmarks", "pulp", "highspy", "sympy"},  # it talks to the two above, not to their libraries
}
# Between trace and emit everything is plain values: what pyproject.toml has pyright check strictly. "rules" stands for
# autopar/rules.py or autopar/rules/, "search/search" for one file of a folder whose other files need torch.
STRICT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["strict"]
PLAIN = {name.removeprefix("autopar/").removesuffix(".py") for name in STRICT if name.startswith("autopar/")}
COMMANDS = ("__main__", "command")  # they make models, wherever they stand
COMPAT = Path("autopar/_compat.py")
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}  # may run what a file holds


# --- what the code says --------------------------------------------------------------------------------------------


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """By path."""
    found = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT): ast.parse(path.read_text(), filename=str(path)) for path in found}


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All of a file: several tests look at each."""
    return tuple(ast.walk(tree))


@functools.cache
def imports(tree: ast.AST) -> tuple[tuple[str, str], ...]:
    """(module, name) of every import, wherever in the file; name is "" for `import module`. Dots lead if relative."""
    return tuple(_imports(tree))


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in nodes(tree):
        match node:
            case ast.Import():
                yield from ((alias.name, "") for alias in node.names)
            case ast.ImportFrom():
                yield from (("." * node.level + (node.module or ""), alias.name) for alias in node.names)
            case ast.Call(
                func=ast.Name("__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(module)), *_],
            ):
                yield module, ""


def packages(tree: ast.AST) -> set[str]:
    """The top-level packages that the code imports."""
    return {module.partition(".")[0] for module, _ in imports(tree)}


def private_torch(tree: ast.AST) -> set[str]:
    """Private names of torch that are imported, or reached through a module: `torch._C`, `dist._shard`.

    Operators (`torch.ops._c10d_functional`) are what we generate, no import; nor is `SomeClass._name` one.
    """
    stands_for = {"torch": "torch"}
    for node in nodes(tree):
        match node:
            case ast.Import():
                stands_for |= {alias.asname: alias.name for alias in node.names if alias.asname}
            case ast.ImportFrom(level=0, module=str(base)):
                stands_for |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
    told = {f"{module}.{name}".rstrip(".") for module, name in imports(tree)}
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and (found := dotted(node)):
            head, _, rest = found.partition(".")
            told.add(f"{stands_for.get(head, '')}.{rest}")
    return {name for name in told if is_private_torch(name)}


def dotted(node: ast.expr) -> str:
    """`a.b.c` as it is written; "" where it begins with no name."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before else ""


def is_private_torch(name: str) -> bool:
    head, *rest = name.split(".")
    if head != "torch" or rest[:1] == ["ops"]:
        return False
    for part in rest:
        if part.startswith("_") and not part.startswith("__"):
            return True
        if part[:1].isupper():
            return False
    return False


def unsafe_loads(tree: ast.AST) -> set[str]:
    """Places that may run code held in a file: an unpickling module, or a loader told to trust what it reads."""
    found = {f"import {name}" for name in packages(tree) & UNPICKLERS}
    safe = {"weights_only": True, "allow_pickle": False}
    for node in nodes(tree):
        match node:
            case ast.keyword(arg=str(arg), value=value) if arg in safe:
                if not (isinstance(value, ast.Constant) and value.value is safe[arg]):
                    found.add(f"{ast.unparse(node)} (line {value.lineno})")
    return found


def long_functions(tree: ast.AST, most: int) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function with more than `most` lines from `def` to its end, its docstring left out."""
    for node in nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            told = node.body[0] if ast.get_docstring(node) is not None else None
            skipped = 0 if told is None else (told.end_lineno or told.lineno) - told.lineno + 1
            count = (node.end_lineno or node.lineno) - node.lineno + 1 - skipped
            if count > most:
                yield node.name, count


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def arrows(trees: dict[Path, ast.Module]) -> "nx.DiGraph[str]":
    """Module -> module that it imports, among the given files."""
    path_of = {module_of(path): path for path in trees}
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(sorted(path_of))
    for source, path in path_of.items():
        for module, name in imports(trees[path]):
            full = f"{module}.{name}"
            target = full if full in path_of else module  # `from autopar import graph` means autopar.ir.graph
            if target in path_of:
                graph.add_edge(source, target)
    return graph


def circles(trees: dict[Path, ast.Module]) -> list[str]:
    return [" -> ".join([*circle, circle[0]]) for circle in nx.simple_cycles(arrows(trees))]


def is_plain(module: str) -> bool:
    head, *parts = module.split(".")
    paths = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
    paths |= {f"{path.rpartition('/')[0]}/*" for path in paths if "/" in path}
    return head == "autopar" and bool(paths & PLAIN) and not {*parts[1:]} & {*COMMANDS}


def torch_in(trees: dict[Path, ast.Module]) -> tuple["nx.DiGraph[str]", set[str]]:
    """The import graph and its modules that import torch themselves. The package `autopar` itself counts as one."""
    return arrows(trees), {module_of(path) for path, tree in trees.items() if "torch" in packages(tree)} | {"autopar"}


def torch_in_plain(trees: dict[Path, ast.Module]) -> list[str]:
    """Ways from a plain-value file to torch, the shortest for each file."""
    graph, torch = torch_in(trees)
    found: list[str] = []
    for module in sorted(filter(is_plain, graph)):
        reached = torch & (nx.descendants(graph, module) | {module})
        ways = [nx.shortest_path(graph, module, end) for end in sorted(reached)]
        found += [" -> ".join([*min(ways, key=len), "torch"])] if ways else []
    return found


def in_folder(folder: str) -> list[Path]:
    return [path for path in trees() if path.parts[0] == folder]


# --- the law -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", MAY_NOT)
def test_folder_keeps_to_its_layer(folder):
    for path in in_folder(folder):
        wrong = packages(trees()[path]) & MAY_NOT[folder]
        assert not wrong, f"{path} imports {sorted(wrong)}, which is not for {folder}/"


def test_pulp_and_highs_stay_in_the_backends():
    for path in in_folder("solver"):
        if "backends" not in path.parts:
            wrong = packages(trees()[path]) & {"pulp", "highspy"}
            assert not wrong, f"{path} imports {sorted(wrong)}; only solver/backends/ may"


def test_one_file_speaks_to_solver_and_cost_models():
    both = [str(path) for path in in_folder("autopar") if {"solver", "cost_models"} <= packages(trees()[path])]
    assert len(both) <= 1, f"{both} import both solver and cost_models; one file of autopar/ may"


def test_plain_values_need_no_torch():
    found = torch_in_plain({path: trees()[path] for path in in_folder("autopar")})
    assert not found, "plain-value files of autopar/ reach torch:\n" + "\n".join(found)


def test_parts_without_torch_are_listed_as_plain():
    graph, torch = torch_in({path: trees()[path] for path in in_folder("autopar")})
    part_of = {module: module.split(".")[1] for module in graph if module != "autopar"}  # a file, or a whole folder
    with_torch = {part for module, part in part_of.items() if torch & (nx.descendants(graph, module) | {module})}
    missing = sorted(set(part_of.values()) - with_torch - PLAIN)
    assert not missing, f"{missing} of autopar/ need no torch; add them to tool.pyright.strict in pyproject.toml"


def test_solver_and_cost_models_are_checked_strictly():
    assert set(STRICT) >= {"solver", "cost_models"}


def test_autopar_has_no_import_circle():
    found = circles({path: trees()[path] for path in in_folder("autopar")})
    assert not found, "imports in a circle:\n" + "\n".join(found)


# The pipeline, from what everybody reads to what nobody does. Who stands later may import who stands earlier.
STAGES = (
    "_version", "_compat", "errors", "ir", "rules", "propose", "price", "rewrite", "assemble", "plan", "lower",
    "simulate", "page", "decide", "machine", "pipeline", "diff", "trace", "emit", "calibrate", "search", "attach",
    "optim", "planner", "compile", "measure", "scale", "what_if", "autopar",
)  # fmt: skip


def test_imports_go_down_the_stages():
    graph = arrows({path: trees()[path] for path in in_folder("autopar")})

    def stage(module: str) -> str:
        parts = module.split(".")
        return parts[1] if len(parts) > 1 and parts[1] != "__main__" else "autopar"

    assert {stage(module) for module in graph} == set(STAGES), "name a new stage here, where it belongs"
    up = [f"{one} -> {other}" for one, other in graph.edges if STAGES.index(stage(one)) < STAGES.index(stage(other))]
    assert not up, "imports that go up the stages:\n" + "\n".join(sorted(up))


def test_every_folder_of_the_code_has_a_folder_of_tests():
    folders = {path.name for path in (ROOT / "autopar").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    tested = {path.parent.name for path in trees() if path.parts[0] == "tests" and path.name.startswith("test_")}
    assert folders <= tested, f"no tests in tests/ for {sorted(folders - tested)}"


def test_private_names_of_torch_stay_in_compat():
    for path, tree in trees().items():
        if path != COMPAT:
            found = private_torch(tree)
            assert not found, f"{path} uses {sorted(found)}; give each a public name in {COMPAT}"


def test_nothing_is_unpickled():
    for path, tree in trees().items():
        found = unsafe_loads(tree)
        assert not found, f"{path} has {sorted(found)}; plans and problems are JSON, tensors load with weights_only"


def test_imports_are_absolute():
    for path, tree in trees().items():
        found = sorted(module for module, _ in imports(tree) if module.startswith("."))
        assert not found, f"{path} imports {found}; write the full name, the checks of this file read nothing else"


def test_functions_stay_short():
    found = [
        f"{path} {name} ({count})"
        for path, tree in trees().items()
        if path.parts[0] != "tests"  # where some are tables
        for name, count in long_functions(tree, MAX_FUNCTION_LINES)
    ]
    assert not found, f"over {MAX_FUNCTION_LINES} lines, so probably several steps in one function: {found}"


def test_files_stay_short():
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in trees()}
    long = {str(path): count for path, count in lines.items() if count > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines, so probably two subjects in one file: {long}"


# --- the checks themselves, on small samples -----------------------------------------------------------------------


def sample(files: dict[str, str]) -> dict[Path, ast.Module]:
    """A tree of small files: `{"rules/table": "import torch"}` is autopar/rules/table.py."""
    return {Path("autopar", f"{name}.py"): ast.parse(text) for name, text in files.items()}


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "import torch.fx as fx",
        "from torch import nn",
        "def late():\n    import torch",
        "import importlib\nimportlib.import_module('torch.fx')",
        "__import__('torch')",
    ],
)
def test_an_import_is_seen_however_it_is_written(text):
    assert "torch" in packages(ast.parse(text))


def test_what_only_looks_like_an_import_is_none():
    assert packages(ast.parse("import torchvision\n'import torch'\ntorch = 1")) == {"torchvision"}


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch import _C",
        "from torch.fx.node import _side_effectful_functions",
        "from torch.testing._internal.distributed.fake_pg import FakeStore",
        "import torch.distributed._functional_collectives as fc",
        "import torch\ntorch._C._get_privateuse1_backend_name()",
        "import torch.distributed as dist\ndist._shard",
        "from torch import distributed\ndistributed.tensor._api",
    ],
)
def test_private_torch_is_found(text):
    assert private_torch(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.ops._c10d_functional.wait_tensor.default",
        "import torch\ntorch.__version__",
        "from torch.distributed.tensor import DTensor\nDTensor._op_dispatcher",
        "self._torch._x",
        "from autopar._compat import FakeStore",
    ],
)
def test_public_torch_passes(text):
    assert not private_torch(ast.parse(text))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("import pickle", True),
        ("from cloudpickle import loads", True),
        ("torch.load(f, weights_only=False)", True),
        ("torch.load(f, weights_only=trusted)", True),
        ("np.load(f, allow_pickle=True)", True),
        ("torch.load(f, weights_only=True)", False),
        ("np.load(f, allow_pickle=False)", False),
    ],
)
def test_unsafe_loads_are_found(text, wrong):
    assert bool(unsafe_loads(ast.parse(text))) is wrong


@pytest.mark.parametrize(
    ("text", "long"),
    [
        ("def f():\n    a\n    b", []),
        ("def f():\n    a\n    b\n    c", [("f", 4)]),
        ("async def f():\n    a\n\n    c", [("f", 4)]),
        ('def f():\n    """What\n    it does.\n    """\n    a\n    b', []),
        ('def f():\n    """What it does."""\n    a\n    b\n    c', [("f", 4)]),
        ("@g(\n    1\n)\ndef f():\n    a", []),
        (
            "class A:\n    def f(self):\n        def g():\n            a\n            b\n            c\n",
            [("f", 5), ("g", 4)],
        ),
    ],
)
def test_a_long_function_is_found_whatever_its_docstring(text, long):
    assert list(long_functions(ast.parse(text), 3)) == long


def test_torch_in_a_plain_file_is_found_also_behind_another_file():
    direct = sample({"ir/graph": "import torch"})
    behind = sample({"rules/table": "from autopar.trace import x", "trace": "import torch"})
    by_package = sample({"ir/graph": "import autopar", "__init__": ""})
    other_way = sample({"graph": "import math", "trace": "import torch\nimport autopar.ir.graph"})
    assert torch_in_plain(direct) == ["autopar.ir.graph -> torch"]
    assert torch_in_plain(behind) == ["autopar.rules.table -> autopar.trace -> torch"]
    assert torch_in_plain(by_package) == ["autopar.ir.graph -> autopar -> torch"]
    assert torch_in_plain(other_way) == []


def test_a_circle_of_imports_is_found():
    two = sample({"a": "from autopar import b", "b": "def late():\n    from autopar.a import f"})
    package = sample({"__init__": "from autopar.a import f", "a": "from autopar import b", "b": "import math"})
    assert len(circles(two)) == 1 and set(circles(two)[0].split(" -> ")) == {"autopar.a", "autopar.b"}
    assert circles(sample({"a": "import autopar.a"})) == ["autopar.a -> autopar.a"]
    assert circles(package) == []
