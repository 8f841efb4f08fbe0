"""Questions before something is done to the fleet, and the record of one request."""

from collections.abc import Awaitable, Callable, Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, ScrollableContainer, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Static

from services.top.feed import GatewayError

Numbers = Mapping[str, int]  # of workers, by role: those that are to change alone
_ROLES = ("prefill", "decode")

_BOX = """
{name} {{ align: center middle; }}
{name} > Vertical {{ width: 90%; max-width: 72; height: auto; padding: 1 2; background: $surface; }}
{name} > Vertical {{ border: round $primary; }}
{name} Label {{ width: 100%; }}
{name} Horizontal {{ height: auto; margin-top: 1; }}
{name} Button {{ margin-right: 2; }}
"""


class Confirmation(ModalScreen[bool]):
    """Asks whether something is to be done; No is chosen until a person chooses otherwise."""

    CSS = _BOX.format(name="Confirmation")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Lays out the question and its answers."""
        with Vertical():
            yield Label(self._question, markup=False)
            with Horizontal():
                yield Button("No (n)", id="no", variant="primary")
                yield Button("Yes (y)", id="yes", variant="error")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Answers."""
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        """Answers."""
        self.dismiss(yes)


class ScaleQuestion(ModalScreen[Numbers | None]):
    """Asks how many workers there are to be; None: nothing is to change. here: the workers that there are, in words."""

    CSS = _BOX.format(name="ScaleQuestion")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave")]

    def __init__(self, here: str) -> None:
        super().__init__()
        self._here = here

    def compose(self) -> ComposeResult:
        """Lays out a field for each role, which is empty: what is not filled in stays as it is."""
        with Vertical():
            yield Label(f"`baton up` has {self._here}.", id="here", markup=False)
            yield Label("Workers that are to be there (Enter: do it, Escape: leave it)")
            for role in _ROLES:
                yield Label(role)
                yield Input(placeholder="as it is", id=role, type="integer", max_length=4)
            yield Label("", id="wrong")

    def on_input_submitted(self, _: Input.Submitted) -> None:
        """Answers with the numbers that are filled in, or says what is wrong with them."""
        texts = {role: self.query_one(f"#{role}", Input).value for role in _ROLES}
        given = {role: text for role, text in texts.items() if text}
        if not all(text.isascii() and text.isdigit() for text in given.values()):
            self.query_one("#wrong", Label).update("each is a number, or empty")
            return
        numbers = {role: int(text) for role, text in given.items()}
        if numbers.get("decode") == 0:
            self.query_one("#wrong", Label).update("one decode worker stays: every request ends there")
            return
        self.dismiss(numbers or None)

    def action_leave(self) -> None:
        """Answers that nothing is to change."""
        self.dismiss(None)


class RequestScreen(ModalScreen[None]):
    """The record of one request, as text. read: gets it for a width; raises GatewayError."""

    CSS = """
    RequestScreen { align: center middle; }
    RequestScreen > ScrollableContainer { width: 100%; height: 100%; padding: 0 1; background: $surface; }
    RequestScreen > ScrollableContainer { border: round $primary; }
    RequestScreen Static { width: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", "Back"),
        Binding("r", "read_again", "Read again"),
    ]

    def __init__(self, read: Callable[[int], Awaitable[str]]) -> None:
        super().__init__()
        self._read = read

    def compose(self) -> ComposeResult:
        """Lays out the text."""
        with ScrollableContainer() as box:
            box.border_subtitle = "r: read again, Escape: back"
            yield Static("reading", id="record", markup=False)

    async def on_mount(self) -> None:
        """Reads the record."""
        await self.action_read_again()

    async def action_read_again(self) -> None:
        """Reads the record once more."""
        try:
            text = await self._read(max(self.app.size.width - 4, 20))
        except GatewayError as error:
            text = str(error)
        self.query_one("#record", Static).update(text)

    def action_leave(self) -> None:
        """Closes the screen."""
        self.dismiss()
