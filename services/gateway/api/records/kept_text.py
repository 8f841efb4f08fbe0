"""The text of one request, kept beside its record where `--console-text` asks for it. Each part has a bound."""

from dataclasses import dataclass, field

MAX_PROMPT_TOKENS = 512  # that become text, of either end of a longer prompt
MAX_PROMPT_CHARACTERS = 4096
MAX_ANSWER_CHARACTERS = 4096  # of all choices together
MAX_ANSWERS = 8
GAP = "\n[...]\n"  # in the place of the middle of a long prompt


@dataclass(slots=True, eq=False)
class KeptText:
    """The first prompt and the beginnings of the answers, each by choice. cut: something is left out."""

    prompt: str = ""
    answers: list[str] = field(default_factory=list)
    cut: bool = False
    _room: int = MAX_ANSWER_CHARACTERS

    def note_prompt(self, beginning: str, end: str) -> None:
        """Keeps a prompt. end: of a prompt whose middle is left out; empty: `beginning` is the whole of it."""
        whole = beginning + GAP + end if end else beginning
        if len(whole) > MAX_PROMPT_CHARACTERS:
            half = MAX_PROMPT_CHARACTERS // 2
            whole, end = whole[:half] + GAP + whole[-half:], GAP
        self.prompt = whole
        self.cut = self.cut or bool(end)

    def note_answer(self, choice: int, text: str) -> None:
        """Keeps the next piece of a choice's answer, as far as there is room."""
        if choice >= MAX_ANSWERS or not self._room:
            self.cut = self.cut or bool(text)
            return
        while len(self.answers) <= choice:
            self.answers.append("")
        taken = text[: self._room]
        self.answers[choice] += taken
        self._room -= len(taken)
        self.cut = self.cut or len(taken) < len(text)

    def describe(self) -> dict[str, object]:
        """The text as JSON values."""
        return {"prompt": self.prompt, "answers": self.answers, "cut": self.cut}
