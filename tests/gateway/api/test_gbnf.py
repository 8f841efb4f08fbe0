"""Grammars in GBNF have, in Lark, the texts that they have in GBNF."""

import random
import re

import orjson
import pytest
from llguidance import LLMatcher, LLTokenizer

from services.gateway.api.grammars.gbnf import RULE_OF_GBNF, GbnfError, gbnf_to_lark

BYTES = LLTokenizer("byte", n_vocab=262, eos_token=261)
NUM_GRAMMARS = 150


def has(grammar: str, text: str) -> bool:
    """True where a text is one of the grammar's."""
    lark = orjson.dumps({"grammars": [{"lark_grammar": gbnf_to_lark(grammar)}]}).decode()
    matcher = LLMatcher(BYTES, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


CASES: list[tuple[str, list[str], list[str]]] = [
    ('root ::= ("a"+)+', ["a", "aaa"], ["", "b"]),
    ('root ::= ("a"* | "b")* "c"', ["c", "abac"], ["ab"]),
    ('root ::= (("a"?)*)+ "b"{0}', ["", "aa"], ["b"]),
    ('root ::= "a"+*', ["", "aa"], ["b"]),
    ('root ::= "a" |', ["", "a"], ["aa"]),
    ('root ::= | "a"', ["", "a"], ["aa"]),
    ('root ::= ("a" | )+ "b"', ["b", "aab"], ["a"]),
    ('root ::= ""', [""], ["a"]),
    ("root ::= ([a-c]{2}){2,3}", ["abca", "abcabc"], ["ab", "abc"]),
    ('root ::= "a"{ 2 , } "b"{2} [c] {0,1}', ["aabb", "aaabbc"], ["abb", "aab"]),
    (r'root ::= [^"\\\n]* "x"', ["x", "yx", "/x"], ['"x', "\nx"]),
    ("root ::= [a&&b~~-]+", ["a&b~-"], ["c"]),
    ("root ::= [+--]+ [a-]", [",-a", "+-"], ["."]),
    (r"root ::= [\[\]^]+", ["[]^"], ["\\"]),
    ("root ::= [/#|(]+", ["/#|("], ["a"]),
    (r'root ::= "\x41\u00e9\U0001F600\t\"\\"', ['Aé😀\t"\\'], ["A"]),
    (r"root ::= [\u0430-\u044f]+", ["привет"], ["hi"]),
    ('root ::= "größer /* # */ // \' {"', ["größer /* # */ // ' {"], ["größer "]),
    ("root ::= . .", ["a\n", "é/", "\0 "], ["a"]),
    ('root ::= aB a-b a_b start\naB ::= "1"\na-b ::= "2"\na_b ::= "3"\nstart ::= "4"', ["1234"], []),
    ('# of\r\nroot ::= # a\r\n  x # b\r\n\r\nx ::= ( # c\r\n  "q"\r\n  | "w" ) # d\r\n', ["q", "w"], ["qw"]),
    ('root ::= "a" |\n  "b" |\n  "c"', ["a", "b", "c"], ["ab"]),
    ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x"]),
    ('root ::= e\ne ::= e "+" t | t\nt ::= [0-9]+ | "(" e ")"', ["1", "1+(22+3)"], ["1+"]),
    ('root ::= "a" "b" "c" | "ab" "d" root?', ["abc", "abd", "abdabc"], ["abdd"]),
    ('root ::= x\nx ::= "a" y |\ny ::= "b" x', ["", "ab", "abab"], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "inside", "outside"), CASES, ids=[grammar for grammar, _, _ in CASES])
def test_what_is_nested_or_escaped_or_empty_means_what_it_says(grammar: str, inside: list[str], outside: list[str]):
    assert [text for text in inside if not has(grammar, text)] == []
    assert [text for text in outside if has(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('root "a"', "line 1: '::=' is expected"),
        ('root ::= "a', "line 1: the text ends"),
        ("root ::= [a", "line 1: the text ends"),
        ('root ::= ("a"', "')' is expected"),
        ('root ::= "a")', "the end of the rule"),
        ('root ::= "a"\n  "b"', "line 2: a name is expected"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a"{,2}', "{m,n} is expected"),
        ('root ::= "a"{3,2}', "a number of times"),
        ('root ::= "a"{99999}', "a number of times"),
        ("root ::= [b-a]", "a range ends"),
        ("root ::= []", "a class has no character"),
        (r'root ::= "\q"', "no such escape"),
        (r'root ::= "\ud800"', "no such character"),
        ("root ::= other", "uses 'other'"),
        ('other ::= "a"', "no rule 'root'"),
        ("::= x", "a name is expected"),
    ],
)
def test_what_is_no_gbnf_is_refused_in_words(grammar: str, says: str):
    with pytest.raises(GbnfError, match=re.escape(says)):
        gbnf_to_lark(grammar)


@pytest.mark.parametrize(
    ("grammar", "gbnf"),
    [
        ('root ::= "a"', True),
        ('  root::="a"', True),
        ('# a comment\r\n\troot ::= "a"', True),
        ('root ::= "a"\rx ::= "b"', True),
        ("::= x", True),
        ('start: "a" // ::=', False),
        ('start: "::=" /::=/', False),
        ('// x ::= y\nstart: "a"', False),
    ],
)
def test_a_grammar_is_gbnf_where_a_line_begins_as_its_rules_do(grammar: str, gbnf: bool):
    assert bool(RULE_OF_GBNF.search(grammar)) == gbnf


class Drawn:
    """A random expression over a, b and c: in GBNF, as a regular expression, and one of its texts."""

    def __init__(self, chance: random.Random, rules: list[str], depth: int = 0) -> None:
        kind = chance.choice(
            ["literal", "class"] if depth > 3 else ["literal", "class", "all", "any", "times", "times", "rule"]
        )
        inner = [
            Drawn(chance, rules, depth + 1) for _ in range({"all": 2, "any": 2, "times": 1, "rule": 1}.get(kind, 0))
        ]
        letters = "".join(chance.choices("abc", k=chance.randint(0, 2)))
        if kind == "literal":
            self.gbnf, self.regex, self.text = f'"{letters}"', letters, letters
        elif kind == "class":
            self.gbnf, self.regex, self.text = "[a-b]", "[a-b]", chance.choice("ab")
        elif kind == "all":
            self.gbnf = " ".join(f"({part.gbnf})" for part in inner)
            self.regex = "".join(f"(?:{part.regex})" for part in inner)
            self.text = "".join(part.text for part in inner)
        elif kind == "any":
            self.gbnf = " | ".join([*(part.gbnf for part in inner), ""])
            self.regex = "|".join([*(part.regex for part in inner), ""])
            self.text = chance.choice([*(part.text for part in inner), ""])
        elif kind == "times":
            sign, number = chance.choice([("*", 2), ("+", 1), ("?", 0), ("{2}", 2), ("{1,}", 3), ("{0,2}", 1)])
            self.gbnf, self.regex = f"({inner[0].gbnf}){sign}", f"(?:{inner[0].regex}){sign}"
            self.text = inner[0].text * number
        else:
            rules.append(inner[0].gbnf)
            self.gbnf, self.regex, self.text = f"rule-{len(rules)}", inner[0].regex, inner[0].text


@pytest.mark.few(40)
@pytest.mark.parametrize("seed", range(NUM_GRAMMARS))
def test_grammars_as_chance_has_them_have_the_texts_of_their_regular_expressions(seed: int):
    chance, rules = random.Random(seed), list[str]()
    drawn = Drawn(chance, rules)
    lines = [f"root ::= {drawn.gbnf}", *(f"rule-{number} ::= {rule}" for number, rule in enumerate(rules, 1))]
    texts = {drawn.text, "", "a", "ab", "abc", drawn.text + "a", drawn.text[1:], "c" + drawn.text}
    for text in texts:
        expected = re.fullmatch(drawn.regex, text) is not None
        assert has("\n".join(lines), text) == expected, (lines, text)
