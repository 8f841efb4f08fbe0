"""The rules of structure that the code is held to: small functions and classes, no import cycle, a README a folder."""

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

from tests.rules.source_tree import (
    PACKAGES,
    ROOT,
    Module,
    imports,
    modules,
    num_lines,
    num_parameters,
    public_methods,
)

MAX_LINES, MAX_LINES_OF_KERNELS = 60, 120
MAX_PARAMETERS = 7
MAX_PUBLIC_METHODS = 15
README_LINES = 60  # of a folder's: one screen


def test_no_function_is_longer_than_a_screen():
    long = [
        f"{module.path}:{function.lineno} {function.name} has {num_lines(function)} lines"
        for module in modules(*PACKAGES)
        for function in module.functions()
        if num_lines(function) > (MAX_LINES_OF_KERNELS if module.in_kernels else MAX_LINES)
    ]
    assert long == []


def test_no_function_outside_kernels_takes_more_than_seven_parameters():
    wide = [
        f"{module.path}:{function.lineno} {function.name} takes {num_parameters(function)} parameters"
        for module in modules(*PACKAGES)
        if not module.in_kernels
        for function in module.functions()
        if num_parameters(function) > MAX_PARAMETERS
    ]
    assert wide == []


def test_no_class_has_more_than_fifteen_public_methods():
    large = [
        f"{module.path}:{node.lineno} {node.name} has {len(public_methods(node))} public methods"
        for module in modules(*PACKAGES)
        for node in module.classes()
        if len(public_methods(node)) > MAX_PUBLIC_METHODS
    ]
    assert large == []


def test_no_module_imports_itself_through_others():
    known = {module.name: module for module in modules(*PACKAGES)}
    graph = {name: _imported(module, known) - {name} for name, module in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a cycle: {' -> '.join(error.args[1])}") from error


def test_no_folder_has_an_arrow_that_points_up():
    """Its rooms import each other one way, also inside functions and for types alone: a reader follows these too."""
    packages = {module.name.rpartition(".")[0] for module in modules("services", "kvtransfer", "loadtest")}
    assert {package: cycle for package in sorted(packages) if package and (cycle := _cycle_of_rooms(package))} == {}


def _cycle_of_rooms(package: str) -> list[str]:
    """Returns rooms, files or folders of this one, that import each other in a circle; none, if there is no circle."""
    known = {module.name: module for module in modules(*PACKAGES) if module.name.startswith(f"{package}.")}
    room = {name: name.removeprefix(f"{package}.").partition(".")[0] for name in known}
    arrows: dict[str, set[str]] = defaultdict(set)
    for name, module in known.items():
        arrows[room[name]] |= {room[other] for other in imports(module, everywhere=True) if other in known} - {
            room[name]
        }
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _imported(module: Module, known: dict[str, Module]) -> set[str]:
    return {name for name in imports(module) if name in known}


def test_one_file_makes_channels_and_opens_ports_of_grpc():
    """So that no connection is plain text where the process has a certificate."""
    calls = ("insecure_channel", "secure_channel", "add_insecure_port", "add_secure_port")
    found = {
        module.path
        for module in modules("services", "kvtransfer")
        for node in module.nodes
        if isinstance(node, ast.Attribute) and node.attr in calls
    }
    assert found == {"services/tls/grpc_ends.py"}


def test_every_folder_of_the_services_says_on_one_screen_what_it_is():
    folders = {file.parent for file in (ROOT / "services").rglob("*.py")} - {ROOT / "services"}
    readmes = {folder: folder / "README.md" for folder in folders if folder.parent == ROOT / "services"}
    missing = sorted(str(folder.relative_to(ROOT)) for folder, readme in readmes.items() if not readme.is_file())
    assert missing == []
