"""The import table of docs/structure.md as data: which room may import what. A folder without a row fails."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = [ROOT, ROOT / "kernels", ROOT / "models", ROOT / "quantize", ROOT / "tui"]
PACKAGES = {
    "edgellm_kernels": ROOT / "kernels" / "edgellm_kernels",
    "edgellm_models": ROOT / "models" / "edgellm_models",
    "edgellm": ROOT / "edgellm",
    "edgellm_quantize": ROOT / "quantize" / "edgellm_quantize",
    "edgellm_tui": ROOT / "tui" / "edgellm_tui",
}
HEAVY = {
    "torch",
    "triton",
    "textual",
    "transformers",
    "numpy",
    "jinja2",
    "huggingface_hub",
    "tokenizers",
    "gguf",
    "llguidance",
    "starlette",
    "uvicorn",
    "httpx2",
}

NETWORK = {"edgellm_models.network"}
# The cache's integers: nothing of torch, so that schedules are planned and tested without it.
INTEGER_CACHE = {
    f"edgellm.cache.{name}"
    for name in (
        "block_pool",
        "conversation",
        "eviction",
        "host_offload",
        "integrity",
        "kv_manager",
        "kv_sizes",
        "prefix_index",
        "prefix_match",
        "saved_blocks",
        "sequence_blocks",
        "tail_rings",
    )
}
TUI = {"edgellm.contracts", "edgellm.locations", "edgellm_models.errors"}

# room -> prefixes of ours that it may import, and third-party packages that it may import (anywhere in
# its files). The longest room that is a prefix of the module's name applies.
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "edgellm_kernels": (set(), {"torch", "numpy", "triton"}),
    "edgellm_kernels.native": (set(), set()),  # its builder runs before anything is installed
    "edgellm_models": (set(), set()),
    "edgellm_models.errors": (set(), set()),
    "edgellm_models.metadata_values": ({"edgellm_models.errors"}, set()),
    "edgellm_models.architectures": ({"edgellm_models.errors", "edgellm_models.metadata_values"}, set()),
    "edgellm_models.checkpoint": (
        {
            "edgellm_models.architectures",
            "edgellm_models.errors",
            "edgellm_models.metadata_values",
            "edgellm_kernels.weights",
            "edgellm_kernels.ggml_blocks",
            "edgellm_kernels.ggml_types",
            "edgellm_kernels.int_groups",
        },
        {"torch", "numpy", "gguf", "safetensors"},
    ),
    "edgellm_models.network": (
        {
            "edgellm_models.architectures",
            "edgellm_models.errors",
            "edgellm_models.metadata_values",
            "edgellm_kernels.ops",
            "edgellm_kernels.weights",
            "edgellm_kernels.batch",
        },
        {"torch"},
    ),
    "edgellm_models.network.build": (
        {
            "edgellm_models.architectures",
            "edgellm_models.errors",
            "edgellm_models.metadata_values",
            "edgellm_models.checkpoint",
            "edgellm_kernels",
        }
        | NETWORK,
        {"torch"},
    ),
    "edgellm_models.tokenizer": (
        {"edgellm_models.errors", "edgellm_models.metadata_values"},
        {"tokenizers", "sentencepiece", "jinja2", "regex"},
    ),
    "edgellm_models.catalog": ({"edgellm_models.errors"}, {"huggingface_hub", "httpx"}),
    "edgellm": (set(), set()),
    "edgellm.contracts": ({"edgellm_models.errors"}, set()),
    "edgellm.config": (
        {"edgellm.contracts", "edgellm.switches", "edgellm.locations", "edgellm_models.errors"},
        set(),
    ),
    "edgellm.switches": ({"edgellm.contracts", "edgellm_models.errors"}, set()),
    "edgellm.log": ({"edgellm.contracts", "edgellm.locations", "edgellm_models.errors"}, set()),
    "edgellm.locations": ({"edgellm.contracts", "edgellm_models.errors"}, {"platformdirs"}),
    "edgellm.chat": ({"edgellm.contracts", "edgellm_models.errors", "edgellm_models.tokenizer"}, set()),
    "edgellm.history": ({"edgellm.contracts", "edgellm_models.errors"}, set()),
    "edgellm.constraint": (
        {"edgellm.contracts", "edgellm_models.errors", "edgellm_models.tokenizer.base"},
        {"llguidance"},
    ),
    "edgellm.cache": (
        {"edgellm.contracts", "edgellm_models.errors", "edgellm_models.network", "edgellm_kernels.batch"},
        {"torch"},
    ),
    # The integer half of the cache: no torch.
    **{
        f"edgellm.cache.{name}": ({"edgellm.contracts", "edgellm.cache", "edgellm_models.errors"}, set())
        for name in (
            "block_pool",
            "conversation",
            "eviction",
            "host_offload",
            "integrity",
            "kv_manager",
            "prefix_index",
            "prefix_match",
            "saved_blocks",
            "sequence_blocks",
        )
    },
    **{
        module: (INTEGER_CACHE | {"edgellm.contracts", "edgellm_models.errors"}, set())
        for module in INTEGER_CACHE
    },
    # Pure arithmetic; numpy only to measure how fast memory is read.
    "edgellm.planning": (
        {"edgellm.cache.kv_sizes", "edgellm_models.errors", "edgellm_models.network"},
        {"numpy"},
    ),
    # Pure: ids, lengths and times; what computes is given to it.
    "edgellm.speculative": (
        {
            "edgellm.contracts",
            "edgellm.planning.speculation",
            "edgellm_models.errors",
            "edgellm_models.network.sub_layers",
        },
        set(),
    ),
    "edgellm.speculative.acceptance": (set(), set()),
    "edgellm.scheduler": (
        {
            "edgellm.contracts",
            "edgellm.cache.block_pool",
            "edgellm.cache.eviction",
            "edgellm.cache.kv_manager",
            "edgellm_models.errors",
        },
        set(),
    ),
    "edgellm.runner": (
        {
            "edgellm.contracts",
            "edgellm.cache",
            "edgellm.speculative.acceptance",
            "edgellm_models.errors",
            "edgellm_models.network",
            "edgellm_kernels.ops",
            "edgellm_kernels.batch",
        },
        {"torch", "numpy"},
    ),
    # Measures for the calibration, whose figures it hands over.
    "edgellm.runner.skip_probe": (
        {
            "edgellm.contracts",
            "edgellm.cache.kv_storage",
            "edgellm.runner",
            "edgellm.speculative.calibration",
            "edgellm_models.network",
            "edgellm_kernels.ops",
            "edgellm_kernels.batch",
        },
        {"torch"},
    ),
    "edgellm.engine": (
        {
            "edgellm.contracts",
            "edgellm.cache",
            "edgellm.scheduler",
            "edgellm.speculative",
            "edgellm.constraint",
            "edgellm_models.errors",
            "edgellm_models.tokenizer",
        },
        {"torch"},
    ),
    # No torch when imported: only functions that measure load it.
    "edgellm.bench": (
        {"edgellm.contracts", "edgellm.planning.roofline", "edgellm_models.errors"},
        {"torch", "xllamacpp"},
    ),
    "edgellm.bench.natural_text": ({"edgellm_models.errors"}, set()),
    "edgellm.evaluate": (
        {
            "edgellm.contracts",
            "edgellm.engine",
            "edgellm.runner",
            "edgellm_models.errors",
        },
        {"torch", "numpy"},
    ),
    "edgellm.evaluate.windows": ({"edgellm_models.errors"}, set()),
    "edgellm.engine.saved_kv": (
        {"edgellm.contracts", "edgellm_models.errors", "edgellm_models.checkpoint.safetensors_header"},
        {"torch"},
    ),
    "edgellm.engine.stop_strings": ({"edgellm.contracts", "edgellm_models.errors"}, set()),
    "edgellm.client": (
        {
            "edgellm.contracts",
            "edgellm.chat",
            "edgellm.engine",
            "edgellm.log",
            "edgellm_models.errors",
            "edgellm_models.tokenizer",
        },
        {"httpx2"},
    ),
    "edgellm.server": (
        {
            "edgellm.contracts",
            "edgellm.chat",
            "edgellm.constraint",
            "edgellm.engine.async_engine",
            "edgellm.engine.stop_strings",
            "edgellm.locations",
            "edgellm.log",
            "edgellm_models.errors",
            "edgellm_models.tokenizer",
        },
        {"starlette", "uvicorn"},
    ),
    "edgellm.cli": (
        {"edgellm", "edgellm_models", "edgellm_kernels", "edgellm_quantize", "edgellm_tui"},
        {"click", "torch", "numpy", "textual"},
    ),
    # The other composition root: what a command does, for Python programs.
    "edgellm.llm": (
        {
            "edgellm.contracts",
            "edgellm.config",
            "edgellm.locations",
            "edgellm.own_loop",
            "edgellm.chat",
            "edgellm.cli.runtime",
            "edgellm_models.catalog",
            "edgellm_models.errors",
            "edgellm_models.tokenizer",
        },
        set(),
    ),
    "edgellm.own_loop": (set(), set()),
    "edgellm.__main__": ({"edgellm.cli"}, set()),
    "edgellm_quantize": (
        {"edgellm_kernels", "edgellm_models"},
        {"torch", "numpy", "gguf", "safetensors", "sentencepiece", "tokenizers"},
    ),
    "edgellm_tui": (TUI, {"textual", "rich", "markdown_it"}),
    "edgellm_tui.screens": (TUI | {"edgellm_tui"}, {"textual", "rich", "markdown_it"}),
    "edgellm_tui.widgets": (TUI | {"edgellm_tui"}, {"textual", "rich", "markdown_it"}),
}
# What may be imported only inside functions: commands stay quick, as nothing loads before it is needed.
LAZY_ONLY = {"edgellm.cli": HEAVY | {"edgellm_kernels", "edgellm_quantize", "edgellm_tui", "edgellm.engine"}}


def modules() -> list[tuple[str, Path]]:
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found.append((".".join(parts).removesuffix(".__init__"), path))
    return found


def room_of(module: str) -> str:
    return max((room for room in ROOMS if is_within(module, room)), key=len)


def is_within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def imports(path: Path, module: str) -> list[tuple[str, bool]]:
    """(imported module, at module level) of every import that runs, so not those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            found.extend((f"{base}.{alias.name}", top) for alias in node.names)
        inner = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(tree, True)
    return found


@pytest.mark.parametrize(
    ("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_imports_follow_the_table(module: str, path: Path) -> None:
    room = room_of(module)
    ours, third_party = ROOMS[room]
    for imported, top in imports(path, module):
        head = imported.split(".")[0]
        if head == "__future__" or head in sys.stdlib_module_names:
            continue
        if head in PACKAGES:
            allowed = is_within(imported, room) or any(is_within(imported, prefix) for prefix in ours)
            # `from edgellm_kernels import ops` imports edgellm_kernels.ops, as the loop above spells it out.
            assert allowed, f"{module} (room {room}) may not import {imported}"
        else:
            assert head in third_party, f"{module} (room {room}) may not import {head}"
        lazy = next((names for prefix, names in LAZY_ONLY.items() if is_within(module, prefix)), set())
        if top:
            assert not any(is_within(imported, name) for name in lazy), (
                f"{module} must import {imported} lazily"
            )


def test_every_folder_has_a_row() -> None:
    for package, folder in PACKAGES.items():
        for path in folder.rglob("__init__.py"):
            name = ".".join((package, *path.parent.relative_to(folder).parts))
            assert room_of(name) == name or name.count(".") > 1, f"{name} has no row in the import table"


def test_triton_is_imported_only_in_files_named_for_it() -> None:
    for module, path in modules():
        uses = any(name.split(".")[0] == "triton" for name, _ in imports(path, module))
        assert not uses or path.stem.endswith("_triton"), f"{path} imports triton"


def test_nothing_is_named_after_a_dependency_or_a_standard_module() -> None:
    taken = (
        HEAVY | {"safetensors", "sentencepiece", "pytest", "click"} | (sys.stdlib_module_names - {"__main__"})
    )
    for module, path in modules():
        assert path.stem not in taken, f"{module} shadows {path.stem}"
        assert not {parent.name for parent in path.parents if ROOT in parent.parents} & (HEAVY | {"types"})


def test_nobody_imports_the_command_line() -> None:
    for module, path in modules():
        if is_within(module, "edgellm.cli") or module == "edgellm.__main__":
            continue
        names = {name for name, _ in imports(path, module)}
        if module == "edgellm.llm":  # puts a model together as the commands do
            names = {name for name in names if not is_within(name, "edgellm.cli.runtime")}
        assert not any(is_within(name, "edgellm.cli") for name in names), module


def test_no_files_need_each_other() -> None:
    """Imports within functions count: whoever reads one file of a circle has to read all of them."""
    names = {module for module, _ in modules()}
    needs: dict[str, set[str]] = {}
    for module, path in modules():
        found = {name if name in names else name.rpartition(".")[0] for name, _ in imports(path, module)}
        needs[module] = (found & names) - {module}
    while leaves := [module for module, others in needs.items() if not others & needs.keys()]:
        for module in leaves:
            del needs[module]
    circle = [next(iter(needs), "")]
    while needs and circle[-1] not in circle[:-1]:  # every file that is left leads to another
        circle.append(min(needs[circle[-1]] & needs.keys()))
    assert not needs, f"these need each other: {' -> '.join(circle)}"


def test_there_is_no_conftest_at_the_root() -> None:
    assert not (ROOT / "conftest.py").exists()
