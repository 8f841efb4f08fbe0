"""Docstrings begin with a verb or a noun phrase that says what the thing does or is."""

from tests.rules.source_tree import PACKAGES, imports, modules

# Words that begin half a sentence, after which a reader asks "who?" or "of what?".
_HALF_SENTENCES = frozenset(
    [
        "After",
        "And",
        "As",
        "At",
        "Before",
        "But",
        "By",
        "For",
        "From",
        "How",
        "If",
        "In",
        "It",
        "Its",
        "Like",
        "Nobody",
        "Not",
        "Nothing",
        "Of",
        "On",
        "Only",
        "So",
        "That",
        "To",
        "Until",
        "What",
        "When",
        "Where",
        "Whether",
        "Which",
        "While",
        "Who",
        "Whose",
        "With",
        "Without",
    ]
)


def test_a_docstring_begins_with_a_verb_or_a_noun():
    begun = [
        f"{module.path}:{line} {text.splitlines()[0]}"
        for module in modules(*PACKAGES)
        for line, text in module.docstrings()
        if text.split()[0].strip(".,:;") in _HALF_SENTENCES or text.startswith("The same")
    ]
    assert begun == []


def test_a_docstring_says_who_does_what():
    """`Has X done` leaves open who does it: `Asks Y to do X`, or `Does X`."""
    begun = [
        f"{module.path}:{line} {text.splitlines()[0]}"
        for module in modules(*PACKAGES)
        for line, text in module.docstrings()
        if text.split()[0] in ("Has", "Have")
    ]
    assert begun == []


def test_a_docstring_refers_to_another_one_only_by_its_name():
    """`See X.` names an interface, ours or one that the module imports, so that a reader finds its words there."""
    names = {node.name for module in modules(*PACKAGES) for node in module.classes()}
    vague = [
        f"{module.path}:{line} {text}"
        for module in modules(*PACKAGES)
        for line, text in module.docstrings()
        if text.startswith("See ")
        if (interface := text.split()[1].strip("`.,:;").partition(".")[0]) not in names
        if not any(name.rpartition(".")[2] == interface for name in imports(module))
    ]
    assert vague == []
